"""Messages over TCP connections that the compiled helper reads and writes: between hosts, where it was built.

The thread that runs a plan moves the bytes itself, without the GIL, and is woken for a quarter of a megabyte at a time.
Every message says in which epoch and with which header it was sent, so ranks out of step find out with no message more.
"""

import atexit
import contextlib
import ctypes
import fcntl
import os
import secrets
import socket
import struct
import termios
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ddpx.compiled import LIBRARY, Outcome
from ddpx.errors import Error, Mismatch, PeerFailed
from ddpx.group import Group
from ddpx.transport import Message, header_mismatch
from ddpx.transport.connected import Connected, Post
from ddpx.transport.introductions import HELLO_BYTES, STRANGERS, Offer, introduce, own_address
from ddpx.transport.process_group import ProcessGroup

WELL, CLOSED, LATE, OTHER = range(4)  # how a wait in the library ends
ESTABLISHED = 1  # in the first byte of TCP_INFO
NOTHING = torch.empty(0)
LEAVE_S = 5.0  # the most to wait at the end for peers that have not taken in what was sent
MOST_S = 1e9  # the library counts nanoseconds in 64 bits


class Sockets(Connected):
    """Raises Error on every rank where one has no compiled helper or cannot be reached.

    In front of an epoch's first message each rank sends an empty one to the next, as a greeting: two ranks that wait
    for each other in different epochs would not know of it otherwise. Nobody waits for it.
    """

    segment_bytes = 256 << 10
    segments = 64

    def __init__(self, group: Group) -> None:
        self._listener: socket.socket | None = None
        self._label = (0, 0)
        self._greets = False
        self._is_call = False
        super().__init__(group, torch.device("cpu"))

    def _offer(self) -> Offer:
        if LIBRARY is None:
            return Offer(reason="the compiled helper was not built")
        try:
            family, address = own_address()
            self._listener = socket.create_server((address, 0), family=family, backlog=self.world_size + STRANGERS)
        except OSError as error:
            return Offer(reason=str(error))
        address, port = self._listener.getsockname()[:2]
        return Offer(family, address, port, secrets.token_bytes(HELLO_BYTES - 4))

    def _make(self, name: str, offers: list[Offer]) -> "Mesh":
        listener, self._listener = self._listener, None
        try:
            for rank, offer in enumerate(offers):
                if offer.reason:
                    raise Error(
                        f"ranks cannot connect by sockets of their own: rank {rank}: {offer.reason}. "
                        "transport='process_group' sends by gloo instead."
                    )
            assert listener is not None
            peers = introduce(self.rank, offers, listener, self.timeout_s, self.group.is_dead)
            mesh = Mesh(self, peers)
            mesh.label(*self._label)
            return mesh
        finally:
            if listener is not None:
                listener.close()

    def mark(self, number: int, header: int) -> None:
        super().mark(number, header)
        self._is_call = True
        self._say(number, header)

    def _say(self, epoch: int, header: int | None) -> None:
        self._label = epoch, header or 0
        self._greets = header is not None
        if self._connections is not None:
            self._connections.label(*self._label)

    def open_connections(self) -> "Mesh":
        mesh: Mesh = super().open_connections()
        if self._greets:
            self._greets = False
            mesh.post((self.rank - 1) % self.world_size, NOTHING, is_sent=False)
            mesh.post((self.rank + 1) % self.world_size, NOTHING, is_sent=True)
        return mesh

    def waits_for(self) -> int | None:
        mesh = self._connections
        return None if mesh is None else mesh.waits_for()

    def check(self, mesh: "Mesh", how: int) -> None:
        """Raise where a wait on `mesh` has not ended well."""
        if how == OTHER:
            self._refused = self._mismatch(*mesh.wrong())
            raise self._refused
        if how != WELL:
            self.refuse(RuntimeError("timed out" if how == LATE else "connection closed"), mesh.wrong()[0])
        self.check_open(mesh)

    def close(self) -> None:
        if self._connections is not None:
            self._connections.linger()
        super().close()

    def _mismatch(self, peer: int, theirs: Sequence[int], mine: Sequence[int]) -> Mismatch:
        """What to tell of two labels: bytes, epoch, header."""
        if self._is_call or theirs[1:] == mine[1:]:
            return Mismatch(
                f"rank {self.rank} expected a message of {mine[0]} bytes from rank {peer}, which sent {theirs[0]} bytes"
                + (" in another call." if theirs[1:] != mine[1:] else ".")
            )
        message = header_mismatch(self.group, mine[2], peer, theirs[2])
        if theirs[1] != mine[1]:  # they will never meet again
            self.group.announce(message)
        return Mismatch(message)


def open_messages(group: Group) -> Connected:
    """Sockets of our own where all ranks can have them, else the process group's gloo. A collective."""
    try:
        return Sockets(group)
    except PeerFailed:
        raise
    except Error:
        return ProcessGroup(group, torch.device("cpu"))


class Mesh:
    """A connection to each peer, and the library's state of them. Closed by any thread, used by one."""

    def __init__(self, transport: Sockets, peers: dict[int, socket.socket]) -> None:
        assert LIBRARY is not None
        self._library = LIBRARY
        self._transport = weakref.proxy(transport)
        self.peers = peers
        self.is_open = True
        self.handle = LIBRARY.ddpx_mesh(transport.world_size)
        if not self.handle:
            raise MemoryError(f"rank {transport.rank} has no memory for connections")
        # Not as the interpreter exits: a thread may be at work in there.
        weakref.finalize(self, LIBRARY.ddpx_mesh_free, self.handle).atexit = False
        self.timeout_ns = int(min(transport.timeout_s, MOST_S) * 1e9)
        self._outcome = Outcome()
        for peer, connection in peers.items():
            LIBRARY.ddpx_mesh_connect(self.handle, peer, connection.fileno())
        _MESHES.add(self)

    def label(self, epoch: int, header: int) -> None:
        """What messages posted from here on say of themselves, sent or expected."""
        self._library.ddpx_mesh_label(self.handle, epoch, header)

    def posts(self, sends: Sequence[Message], receives: Sequence[Message]) -> Iterator[Post]:
        for peer, flat in receives:
            yield peer, partial(_Ending, self, peer, flat, False), 0, flat.nbytes
        for peer, flat in sends:
            yield peer, partial(_Ending, self, peer, flat, True), flat.nbytes, 0

    def post(self, peer: int, flat: torch.Tensor, is_sent: bool) -> int:
        return self._library.ddpx_mesh_post(self.handle, peer, flat.data_ptr(), flat.nbytes, is_sent)

    def wait(self, peer: int, is_sent: bool, number: int) -> None:
        outcome = ctypes.byref(self._outcome)
        how = self._library.ddpx_mesh_wait(self.handle, peer, is_sent, number, self.timeout_ns, outcome)
        self._transport.check(self, how)

    def waits_for(self) -> int | None:
        """The peer that the thread at work waits for now. From any thread."""
        peer = self._library.ddpx_mesh_waits_for(self.handle)
        return None if peer < 0 else peer

    def wrong(self) -> tuple[int, list[int], list[int]]:
        """Of a wait that did not end well: the peer; then bytes, epoch and header that came, and that should have."""
        words = self._library.ddpx_mesh_wrong(self.handle)
        return words[0], words[1:4], words[4:7]

    def linger(self) -> None:
        """Wait until the peers' kernels have what was sent, for LEAVE_S at most.

        Where something unread lies here, such as a greeting, or comes later, closing a connection resets it. A peer
        still reads what has come by then; what has not left is lost.
        """
        deadline = time.monotonic() + LEAVE_S
        pause_s = 0.0002
        while any(map(_unsent_bytes, self.peers.values())) and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)

    def close(self) -> None:
        self.is_open = False
        for connection in self.peers.values():
            with contextlib.suppress(OSError):  # closed by the peer already
                connection.shutdown(socket.SHUT_RDWR)


class _Ending:
    """Of a message, which is posted as this is made."""

    __slots__ = ("flat", "is_sent", "mesh", "number", "peer")

    def __init__(self, mesh: Mesh, peer: int, flat: torch.Tensor, is_sent: bool) -> None:
        self.mesh, self.peer, self.flat, self.is_sent = mesh, peer, flat, is_sent
        self.number = mesh.post(peer, flat, is_sent)

    def wait(self) -> None:
        self.mesh.wait(self.peer, self.is_sent, self.number)


# ---- The end of a process --------------------------------------------------------------------------------------------


def _unsent_bytes(connection: socket.socket) -> int:
    """What the peer's kernel has still to take in; 0 where the peer has closed the connection."""
    try:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
            return 0
        (left,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return 0
    return int(left)


_MESHES: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a child that was forked, such as a loader's worker: else it would hold its dead parent's connections open."""
    for mesh in _MESHES:
        for connection in mesh.peers.values():
            connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _leave() -> None:
    """A process may end without closing anything."""
    for mesh in list(_MESHES):
        if mesh.is_open:
            mesh.linger()
