"""How ranks find each other for connections of their own: addresses, tokens, and who may come in."""

import contextlib
import ctypes
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddpx.compiled import LIBRARY
from ddpx.group import ranks_text

HELLO_BYTES = 32
HINT = "GLOO_SOCKET_IFNAME names the network interface to use."
CONNECT_S = 30.0  # for connections among ranks that are all there
STRANGERS = 128  # who may wait to be taken in, beside our ranks
LOOK_S = 0.5  # how often to look after those that have not connected yet
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a silent host without power is found in 2 min


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a rank can be reached, or why it cannot."""

    family: int = 0
    address: str = ""
    port: int = 0
    token: bytes = b""  # who connects has to show it, followed by its rank
    reason: str = ""


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


def introduce(
    rank: int, offers: Sequence[Offer], listener: socket.socket, timeout_s: float, is_dead: Callable[[int], bool]
) -> dict[int, socket.socket]:
    """Connections of `rank` with all others, who are there already. OSError names a rank that does not connect.

    Connect to each lower rank, then take in each higher one: a listener holds who came before it was asked.
    """
    timeout_s = min(CONNECT_S, timeout_s)
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
