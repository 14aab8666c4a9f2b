"""Connections of our own: what is sent arrives, what closes is noticed, and strangers bother nobody."""

import contextlib
import ctypes
import fcntl
import os
import random
import socket
import struct
import termios
import time
import unittest.mock
import weakref
from collections.abc import Iterator

import pytest
import torch
from processes import attempt

from ddpx.communicator import Communicator
from ddpx.compiled import LIBRARY, Outcome
from ddpx.errors import Error
from ddpx.group import Group
from ddpx.transport import sockets

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="ddpx._native was not built")

WELL, CLOSED, LATE, OTHER = range(4)
SECOND = 10**9
SOME = 8 << 20  # bytes that no pair of sockets holds


# ---- The library, both ends in this process --------------------------------------------------------------------------


class End:
    """Of a connection between ranks 0 and 1: a mesh of the library."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        assert LIBRARY is not None
        self.helper, self.peer, self.connection = LIBRARY, 1 - rank, connection
        self.handle = LIBRARY.ddpx_mesh(2)
        self.keep: list[bytearray] = []
        connection.setblocking(False)
        LIBRARY.ddpx_mesh_connect(self.handle, self.peer, connection.fileno())

    def label(self, epoch: int) -> None:
        self.helper.ddpx_mesh_label(self.handle, epoch, 0)

    def send(self, content: bytes) -> int:
        return self._post(bytearray(content), True)

    def receive(self, nbytes: int) -> tuple[int, bytearray]:
        place = bytearray(nbytes)
        return self._post(place, False), place

    def _post(self, place: bytearray, sent: bool) -> int:
        self.keep.append(place)
        address = (ctypes.c_char * len(place)).from_buffer(place) if place else None
        return self.helper.ddpx_mesh_post(self.handle, self.peer, address, len(place), sent)

    def wait(self, sent: bool, number: int, timeout_ns: int = 10 * SECOND) -> int:
        outcome = ctypes.byref(Outcome())
        return self.helper.ddpx_mesh_wait(self.handle, self.peer, sent, number, timeout_ns, outcome)


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[End, End]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    ends = End(0, near), End(1, far)
    with near, far:
        yield ends
    for end in ends:
        end.helper.ddpx_mesh_free(end.handle)


def test_messages_of_any_size_arrive_whole_and_in_order() -> None:
    rng = random.Random(0)
    with two_ends() as (one, other):
        for _ in range(20):
            sizes = [rng.choice([0, 1, 7, 24, 25, 4096, 262_143, 262_144, 262_145, 1 << 20]) for _ in range(150)]
            contents = [rng.randbytes(1) * size for size in sizes]
            receives = [other.receive(size) for size in sizes]
            sends = [one.send(content) for content in contents]
            for number in sends:  # one thread for both ends: neither waits for long
                while one.wait(True, number, 0) == LATE:
                    assert other.wait(False, receives[-1][0], 0) in (WELL, LATE)
            assert other.wait(False, receives[-1][0]) == WELL
            assert [bytes(place) for _, place in receives] == contents


def test_what_came_is_read_though_nothing_can_be_sent_any_more() -> None:
    with two_ends() as (one, other):
        one.send(b"1")
        one.send(b"2")
        time.sleep(0.05)
        one.connection.close()
        for content in (b"1", b"2"):  # what is sent to a closed end resets the connection, so the second one fails
            other.send(b"nobody reads this")
            time.sleep(0.05)
            number, place = other.receive(1)
            assert other.wait(False, number) == WELL and place == content
        assert other.wait(True, other.send(b"nor this")) == CLOSED


def test_a_send_ends_when_its_peer_has_left_without_reading() -> None:
    with two_ends() as (one, other):
        number = one.send(bytes(SOME))
        other.connection.shutdown(socket.SHUT_RDWR)  # not closed: somebody still holds it
        assert one.wait(True, number) == CLOSED


def test_messages_that_nobody_waits_for_do_not_pile_up() -> None:
    with two_ends() as (one, other):
        for _ in range(2000):
            other.receive(0)
            one.send(b"")
        (unread,) = struct.unpack("i", fcntl.ioctl(other.connection.fileno(), termios.FIONREAD, bytes(4)))
        assert unread <= 64 * 24


@pytest.mark.parametrize("unawaited", [1, 200])
@pytest.mark.parametrize("nbytes", [0, 10])
def test_another_epoch_is_told_at_the_next_wait(unawaited: int, nbytes: int) -> None:
    with two_ends() as (one, other):
        one.label(6)
        for _ in range(unawaited):
            one.send(bytes(nbytes))
        other.label(7)
        time.sleep(0.05)
        for _ in range(unawaited):
            number, _ = other.receive(nbytes)
        assert other.wait(False, number) == OTHER
        assert list(other.helper.ddpx_mesh_wrong(other.handle)[:7]) == [0, nbytes, 6, 0, nbytes, 7, 0]


# ---- Ranks that leave ------------------------------------------------------------------------------------------------


def ahead_and_away(rank: int, world_size: int, numel: int, closes: bool) -> int:
    """Rank 0 broadcasts what rank 1 asks for much later, and leaves. Returns how many came."""
    communicator = Communicator(Group(timeout_s=20), transport="sockets")
    flat = torch.zeros(numel)
    communicator.broadcast(flat, src=0)
    communicator.group.gather("ready", None)
    if rank == 1:
        time.sleep(0.5)
    came = 0
    for turn in range(1, 4):
        flat.fill_(turn if rank == 0 else 0)
        communicator.broadcast(flat, src=0)
        came += bool((flat == turn).all())
    if rank == 0:
        if closes:
            communicator.close()
        sockets._leave()
        os._exit(0)
    return came


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("numel", [100, 1 << 18])
def test_what_was_sent_arrives_though_the_sender_has_left(numel: int, closes: bool) -> None:
    outcome = attempt(ahead_and_away, 2, numel, closes)[1]
    assert outcome.error is None, outcome.error
    assert outcome.value == 3


def exits_while_its_thread_waits(rank: int, world_size: int) -> str:
    """Rank 0 exits, rank 1 wakes its thread, and rank 2 never comes."""
    communicator = Communicator(Group(timeout_s=20), transport="sockets", algorithm="direct")
    flat = torch.ones(4)
    communicator.all_reduce(flat)
    time.sleep(0.3 * rank)
    if rank == 2:
        os._exit(0)
    work = communicator.all_reduce(flat, async_op=True)
    assert work is not None
    if rank == 0:
        time.sleep(0.1)
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as the interpreter does, while threads are at work
    with pytest.raises(Error) as raised:
        work.wait()
    return str(raised.value)


def test_a_thread_may_wait_while_the_interpreter_exits() -> None:
    for outcome in attempt(exits_while_its_thread_waits, 3)[:2]:
        assert outcome.error is None, outcome.error
        assert "rank 2 is gone" in outcome.value


# ---- Connecting ------------------------------------------------------------------------------------------------------


def strangers_first(rank: int, world_size: int) -> tuple[str, float]:
    """Strangers of every kind come to each listener before the ranks do."""
    strangers = []
    offer_of = sockets.Sockets._offer

    def offer(self: sockets.Sockets) -> sockets.Offer:
        mine = offer_of(self)
        for words, leaves in [(b"", False), (b"half", False), (b"half", True), (b"", True), (b"x" * 100, False)]:
            stranger = socket.create_connection((mine.address, mine.port))
            stranger.sendall(words)
            if leaves:  # by a reset
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.close()
            strangers.append(stranger)
        return mine

    before = time.monotonic()
    with unittest.mock.patch.object(sockets.Sockets, "_offer", offer):
        communicator = Communicator(Group(timeout_s=20), transport="sockets")
    took_s = time.monotonic() - before
    flat = torch.ones(10)
    communicator.all_reduce(flat)
    communicator.group.gather("end", None)
    communicator.close()
    return str(flat[0].item()), took_s


def test_strangers_keep_nobody_waiting(ranks) -> None:
    for total, took_s in ranks(3).run(strangers_first):
        assert total == "3.0" and took_s < 10  # the deadline is 20 s


def gone_before_it_connects(rank: int, world_size: int) -> tuple[str, float]:
    def die(*_: object) -> None:
        os._exit(1)

    with unittest.mock.patch.object(sockets, "introduce", die if rank == 1 else sockets.introduce):
        before = time.monotonic()
        with pytest.raises(Error) as raised:
            Communicator(Group(timeout_s=25), transport="sockets")
        return str(raised.value), time.monotonic() - before


def test_a_rank_that_dies_before_it_connects_is_named_at_once() -> None:
    outcomes = attempt(gone_before_it_connects, 3, timeout_s=20)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert "rank 1" in outcomes[rank].value[0] and outcomes[rank].value[1] < 15


def without_helper_on_one_rank(rank: int, world_size: int, transport: str) -> str:
    os.environ["DDPX_HOST_ID"] = str(rank)
    library = None if rank == 1 else sockets.LIBRARY
    try:
        with unittest.mock.patch.object(sockets, "LIBRARY", library):
            communicator = Communicator(Group(timeout_s=20), transport=transport)
    except Error as error:
        return str(error)
    finally:
        del os.environ["DDPX_HOST_ID"]
    flat = torch.ones(10)
    communicator.all_reduce(flat)
    assert flat[0] == world_size
    communicator.group.gather("end", None)
    communicator.close()
    return communicator.transport_name


def without_interface_on_one_rank(rank: int, world_size: int) -> str:
    name = "lo" if rank else "ddpx none"
    with unittest.mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": name}), pytest.raises(Error) as raised:
        Communicator(Group(timeout_s=20), transport="sockets")
    return str(raised.value)


def test_a_rank_without_the_helper_makes_all_take_gloo_or_say_so(ranks) -> None:
    assert ranks(3).run(without_helper_on_one_rank, "auto") == ["process_group"] * 3
    for words in ranks(3).run(without_helper_on_one_rank, "sockets"):
        assert "rank 1: the compiled helper was not built" in words
    for words in ranks(3).run(without_interface_on_one_rank):
        assert "rank 0: GLOO_SOCKET_IFNAME names 'ddpx none', which has no address here" in words


def patient(rank: int, world_size: int) -> float:
    communicator = Communicator(Group(timeout_s=1e10), transport="sockets")
    flat = torch.ones(10)
    communicator.group.gather("made", None)
    if rank == 1:
        time.sleep(0.2)
    communicator.all_reduce(flat)
    communicator.group.gather("end", None)
    communicator.close()
    return flat[0].item()


def test_a_deadline_may_lie_beyond_what_the_library_counts(ranks) -> None:
    assert ranks(2).run(patient) == [2.0, 2.0]


def test_a_name_without_an_address_is_quoted(monkeypatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    with pytest.raises(OSError, match="MASTER_ADDR is 'nowhere', which has no address here.*GLOO_SOCKET_IFNAME"):
        sockets.own_address()
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setattr(socket, "gethostname", lambda: "mars")
    with pytest.raises(OSError, match="this host's name 'mars' has no address here.*GLOO_SOCKET_IFNAME"):
        sockets.own_address()


def tells_in_vain(rank: int, world_size: int) -> None:
    group = Group()
    group._whole = unittest.mock.Mock(set=unittest.mock.Mock(side_effect=RuntimeError("Broken pipe")))
    group.leave("waits", (1, 2))


def test_a_board_that_is_gone_takes_no_word_and_hides_no_error(ranks) -> None:
    ranks(2).run(tells_in_vain)
