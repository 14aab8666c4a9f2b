"""Messages over TCP connections that the compiled helper reads and writes: between hosts, where it was built.

The thread that runs a plan moves the bytes itself, without the GIL, and is woken for a quarter of a megabyte at a time.
Every message says in which epoch and with which header it was sent, so ranks out of step find out with no message more.
"""

import contextlib
import ctypes
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
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
HELLO_BYTES = 32
NOTHING = torch.empty(0)
HINT = "GLOO_SOCKET_IFNAME names the network interface to use."
CONNECT_S = 30.0  # for connections among ranks that are all there
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
            self._listener = socket.create_server((address, 0), family=family, backlog=self.world_size)
        except OSError as error:
            return Offer(reason=str(error))
        address, port = self._listener.getsockname()[:2]
        return Offer(family, address, port, secrets.token_bytes(HELLO_BYTES - 4))

    def _make(self, name: str, offers: list[Offer]) -> "Mesh":
        listener, self._listener = self._listener, None
        try:
            for rank, offer in enumerate(offers):
                if offer.reason:
                    raise Error(f"ranks cannot connect by sockets of their own: rank {rank}: {offer.reason}")
            assert listener is not None
            mesh = Mesh(self, _connect(self.rank, offers, listener, min(CONNECT_S, self.timeout_s)))
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
        self.handle = LIBRARY.ddpx_mesh(transport.world_size)
        if not self.handle:
            raise MemoryError(f"rank {transport.rank} has no memory for connections")
        weakref.finalize(self, LIBRARY.ddpx_mesh_free, self.handle)
        self.timeout_ns = int(transport.timeout_s * 1e9)
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

    def close(self) -> None:
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
        for family, kind, _, _, where in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                return family, probe.getsockname()[0]
    family, _, _, _, where = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0]
    return family, str(where[0])


def _connect(rank: int, offers: Sequence[Offer], listener: socket.socket, timeout_s: float) -> dict[int, socket.socket]:
    """Connect to each lower rank, then take in each higher one: a listener holds who came before it was asked."""
    peers = {}
    for peer, offer in enumerate(offers[:rank]):
        try:
            connection = socket.create_connection((offer.address, offer.port), timeout_s)
            connection.sendall(offer.token + rank.to_bytes(4, "big"))
        except OSError as error:
            raise OSError(f"rank {peer} at {offer.address}, port {offer.port}: {error}. {HINT}") from error
        peers[peer] = connection
    deadline = time.monotonic() + timeout_s
    while len(peers) < len(offers) - 1:
        missing = [peer for peer in range(rank + 1, len(offers)) if peer not in peers]
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise OSError(f"{ranks_text(missing)} did not come within {timeout_s:.0f} s. {HINT}") from error
        peer = int.from_bytes(hello[-4:], "big")
        if secrets.compare_digest(hello[:-4], offers[rank].token) and peer in missing:
            peers[peer] = connection
        else:
            connection.close()  # nobody of us
    for connection in peers.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peers


_MESHES: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a child that was forked, such as a loader's worker: else it would hold its dead parent's connections open."""
    for mesh in _MESHES:
        for connection in mesh.peers.values():
            connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)
