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
import selectors
import socket
import struct
import termios
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ddpx.compiled import LIBRARY, Outcome
from ddpx.errors import Error, Mismatch, PeerFailed
from ddpx.group import Group, ranks_text
from ddpx.transport import Message, header_mismatch
from ddpx.transport.connected import Connected, Post
from ddpx.transport.process_group import ProcessGroup

WELL, CLOSED, LATE, OTHER = range(4)  # how a wait in the library ends
ESTABLISHED = 1  # in the first byte of TCP_INFO
HELLO_BYTES = 32
NOTHING = torch.empty(0)
HINT = "GLOO_SOCKET_IFNAME names the network interface to use."
CONNECT_S = 30.0  # for connections among ranks that are all there
STRANGERS = 128  # who may wait to be taken in, beside our ranks
LOOK_S = 0.5  # how often to look after those that have not connected yet
LEAVE_S = 5.0  # the most to wait at the end for peers that have not taken in what was sent
MOST_S = 1e9  # the library counts nanoseconds in 64 bits
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a host without power is noticed in 2 minutes


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a rank can be reached, or why it cannot."""

    family: int = 0
    address: str = ""
    port: int = 0
    token: bytes = b""  # who connects has to show it, followed by its rank
    reason: str = ""


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
            peers = _connect(self.rank, offers, listener, min(CONNECT_S, self.timeout_s), self.group.is_dead)
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


# ---- Making connections ----------------------------------------------------------------------------------------------


def own_address() -> tuple[int, str]:
    """Where peers are to connect to: family and address.

    That of the interface GLOO_SOCKET_IFNAME, as for gloo; else the one from which MASTER_ADDR is reached; else what the
    host's name stands for. OSError where there is none.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if names[0]:
        text = ctypes.create_string_buffer(64)
        assert LIBRARY is not None
        if not LIBRARY.ddpx_address_of(names[0].encode(), text, len(text)):
            raise OSError(f"GLOO_SOCKET_IFNAME names {names[0]!r}, which has no address here")
        address = text.value.decode()
        return (socket.AF_INET6 if ":" in address else socket.AF_INET), address
    master = os.environ.get("MASTER_ADDR")
    if master:
        try:
            found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
        except OSError as error:
            raise OSError(f"MASTER_ADDR is {master!r}, which has no address here: {error}. {HINT}") from error
        for family, kind, _, _, where in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                return family, probe.getsockname()[0]
    host = socket.gethostname()
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(f"this host's name {host!r} has no address here: {error}. {HINT}") from error
    return family, str(where[0])


def _connect(
    rank: int, offers: Sequence[Offer], listener: socket.socket, timeout_s: float, is_dead: Callable[[int], bool]
) -> dict[int, socket.socket]:
    """Connect to each lower rank, then take in each higher one: a listener holds who came before it was asked."""
    peers = {}
    for peer, offer in enumerate(offers[:rank]):
        try:
            connection = socket.create_connection((offer.address, offer.port), timeout_s)
            connection.sendall(offer.token + rank.to_bytes(4, "big"))
        except OSError as error:
            raise OSError(f"rank {peer} at {offer.address}, port {offer.port}: {error}. {HINT}") from error
        peers[peer] = connection
    missing = set(range(rank + 1, len(offers)))
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(_Door(listener)) as door:
        while missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise OSError(f"{ranks_text(sorted(missing))} did not come within {timeout_s:.0f} s. {HINT}")
            for hello, connection in door.greeted(min(left_s, LOOK_S)):
                peer = int.from_bytes(hello[-4:], "big")
                if secrets.compare_digest(hello[:-4], offers[rank].token) and peer in missing:
                    missing.remove(peer)
                    peers[peer] = connection
                else:
                    connection.close()  # nobody of us
            for peer in filter(is_dead, missing):
                raise OSError(f"rank {peer} is gone: its process ended before it had connected")
    for connection in peers.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peers


class _Door:
    """Takes in whoever connects, all at once: a stranger who says nothing keeps nobody waiting."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._guests = selectors.DefaultSelector()
        self._guests.register(listener, selectors.EVENT_READ)

    def greeted(self, timeout_s: float) -> Iterator[tuple[bytes, socket.socket]]:
        """Who has said HELLO_BYTES meanwhile, and what."""
        for key, _ in self._guests.select(timeout_s):
            guest = key.fileobj
            assert isinstance(guest, socket.socket)
            if guest is self._listener:
                with contextlib.suppress(BlockingIOError, ConnectionError):  # gone again
                    guest, _ = guest.accept()
                    guest.setblocking(False)
                    self._guests.register(guest, selectors.EVENT_READ, bytearray())
                continue
            try:
                part = guest.recv(HELLO_BYTES - len(key.data))
            except OSError:
                part = b""
            key.data.extend(part)
            if not part or len(key.data) == HELLO_BYTES:
                self._guests.unregister(guest)
                if part:
                    yield bytes(key.data), guest
                else:
                    guest.close()

    def close(self) -> None:
        """Turn away who has not said enough."""
        for key in list(self._guests.get_map().values()):
            if key.fileobj is not self._listener:
                key.fileobj.close()  # type: ignore[union-attr]
        self._guests.close()


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
