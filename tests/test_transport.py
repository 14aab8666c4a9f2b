"""Clocks, epochs and failures of the two transports, and the link that makes them slow."""

import ctypes
import os
import signal
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Outcome, attempt, run

from ddpx.algorithms import build
from ddpx.communicator import Communicator
from ddpx.compiled import LIBRARY
from ddpx.errors import DeadlineExceeded, Error, Mismatch, PeerFailed, PeerLost
from ddpx.execute import bind_mapped, compile_plan
from ddpx.group import Group
from ddpx.operations import Claim, Combine, Hold, Operation
from ddpx.program import READY
from ddpx.transport import IN_BACKWARD, IN_FORWARD, Landings, Link, MappedTransport
from ddpx.transport.process_group import ProcessGroup
from ddpx.transport.shared_memory import PAGE_BYTES, Segment, SharedMemory

CPU = torch.device("cpu")
MESSAGES = "process_group" if LIBRARY is None else "sockets"
needs_library = pytest.mark.skipif(LIBRARY is None, reason="ddpx._native was not built")


# ---- Links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "alpha_s", "bytes_per_s"),
    [
        ("200us,1GB/s", 200e-6, 1e9),
        ("1ms,10Gbit/s", 1e-3, 1.25e9),
        (" 5 ns , 400 kB/s ", 5e-9, 400e3),
        (".5ms,2.GB/s", 0.5e-3, 2e9),
        ("0s,2.5MB/s", 0.0, 2.5e6),
        ("1.5s,8Mbit/s", 1.5, 1e6),
    ],
)
def test_links_are_read_from_text(text: str, alpha_s: float, bytes_per_s: float) -> None:
    link = Link.parse(text)
    assert link.alpha_s == pytest.approx(alpha_s) and link.beta_s_per_byte == pytest.approx(1 / bytes_per_s)
    assert Link.parse(str(link)).seconds(12345) == pytest.approx(link.seconds(12345), rel=1e-4)


def test_a_link_takes_its_latency_and_a_time_for_each_byte() -> None:
    assert Link(0.5, 0.25).seconds(10) == 3.0


@pytest.mark.parametrize(
    "text", ["", "fast", "1ms", "1GB/s", "1ms;1GB/s", "1ms,1GB", "-1ms,1GB/s", "1h,1GB/s", "1.2.3ms,1GB/s", "1ms,GB/s"]
)
def test_a_link_that_makes_no_sense_is_quoted_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"a link is LATENCY,BANDWIDTH such as 200us,1GB/s"):
        Link.parse(text)


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="a link needs a bandwidth above zero"):
        Link.parse("1ms,0GB/s")


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_landings_are_shared_by_messages_of_one_position_and_type() -> None:
    landings = Landings()
    large = landings.take(0, torch.zeros(100))
    assert landings.take(0, torch.zeros(10)).data_ptr() == large.data_ptr()
    assert landings.take(1, torch.zeros(10)).data_ptr() != large.data_ptr()
    assert landings.take(0, torch.zeros(10, dtype=torch.int32)).dtype is torch.int32
    assert landings.take(0, torch.zeros(1000)).numel() == 1000


def test_a_segment_has_no_name_a_sealed_size_and_one_writer() -> None:
    own = Segment.create(10_000)
    assert own.nbytes == 3 * PAGE_BYTES
    theirs = Segment.open(own.address(), writable=False)
    own.tensor(10, torch.float32).fill_(3.0)
    assert theirs.tensor(10, torch.float32).tolist() == [3.0] * 10
    with pytest.raises(PermissionError):
        os.ftruncate(own.fd, PAGE_BYTES)
    with pytest.raises(TypeError, match="readonly"):
        theirs.memory[0:1] = b"x"
    assert "memfd:ddpx" in os.readlink(f"/proc/self/fd/{own.fd}")
    address = own.address()
    own.close_fd()
    with pytest.raises(FileNotFoundError):
        Segment.open(address, writable=False)
    other = Segment.create(10_000)
    os.dup2(other.fd, address.fd)  # its number is used again
    with pytest.raises(FileNotFoundError, match="has closed it"):
        Segment.open(address, writable=False)
    for number in {other.fd, address.fd}:
        os.close(number)
    assert theirs.tensor(10, torch.float32)[0] == 3.0  # the mapping stays


def memory_is_shared_and_unnamed(rank: int, world_size: int) -> None:
    before = set(os.listdir("/dev/shm"))
    transport = SharedMemory(Group())
    assert isinstance(transport, MappedTransport)
    flat = transport.empty(1000, torch.float32, CPU)
    assert not flat.any()
    flat.fill_(rank + 1.0)
    transport.group.gather("written", None)
    peers = transport.peers(flat[100:200])
    assert [peer.tolist() for peer in peers] == [[peer + 1.0] * 100 for peer in range(world_size)]
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(ValueError, match="shared memory holds CPU tensors, not meta"):
        transport.empty(1, torch.float32, torch.device("meta"))
    transport.group.gather("read", None)
    transport.release(flat)
    with pytest.raises(ValueError, match="does not lie in memory of this transport"):
        transport.peers(flat[100:200])
    transport.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ddpx")


def nothing_is_kept(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Mappings and open files after each of several transports was opened and closed."""
    import gc

    counts = []
    for _ in range(4):
        transport = SharedMemory(Group())
        flat = transport.empty(1000, torch.float32, CPU)
        transport.group.gather("made", None)
        transport.close()
        del transport, flat
        gc.collect()
        counts.append((mappings(), len(os.listdir("/proc/self/fd"))))
    return counts


def test_ranks_see_each_others_memory_and_no_file_names_it(ranks) -> None:
    ranks(3).run(memory_is_shared_and_unnamed)


def resident_after_empty(rank: int, world_size: int) -> tuple[int, bool]:
    """Bytes of shared memory that a new arena of 32 MiB makes resident, and whether it is zero."""
    transport = SharedMemory(Group(None))

    def resident() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))

    before = resident()
    flat = transport.empty(8 << 20, torch.float32, CPU)
    taken = resident() - before
    is_zero = not flat.any()
    transport.close()
    return taken, bool(is_zero)


def test_a_new_arena_is_zero_and_takes_no_memory_until_it_is_written(ranks) -> None:
    for taken, is_zero in ranks(2).run(resident_after_empty):
        assert taken < 1 << 20 and is_zero


def test_closed_transports_leave_no_mappings_and_no_open_files() -> None:
    for counts in run(nothing_is_kept, 2):  # processes of their own, in which no other test has left anything
        assert counts[0] == counts[-1] and counts[-1][0] == 0


# ---- Clocks ----------------------------------------------------------------------------------------------------------


def wait_for_a_late_peer(rank: int, world_size: int) -> float:
    """Rank 1 publishes after 0.3 s; how long rank 0 waited for it."""
    transport = SharedMemory(Group())
    transport.group.gather("start", None)
    before = time.perf_counter()
    if rank == 1:
        time.sleep(0.3)
        transport.publish(5)
    else:
        transport.wait(1, 5)
        transport.wait(1, 3)  # long past
    waited_s = time.perf_counter() - before
    transport.group.gather("end", None)
    transport.close()
    return waited_s


def wait_without_futex(rank: int, world_size: int) -> float:
    import unittest.mock

    with unittest.mock.patch("ddpx.transport.shared_memory._FUTEX_CALL", None):
        return wait_for_a_late_peer(rank, world_size)


@pytest.mark.parametrize("function", [wait_for_a_late_peer, wait_without_futex])
def test_a_wait_ends_when_the_clock_gets_there(ranks, function: Callable[..., float]) -> None:
    waited_s, _ = ranks(2).run(function)
    assert 0.25 < waited_s < 5


def one_way_is_quick(rank: int, world_size: int) -> float:
    """Seconds for a hundred turns of ping-pong."""
    transport = SharedMemory(Group())
    transport.group.gather("start", None)
    before = time.perf_counter()
    for turn in range(1, 101):
        if rank == 0:
            transport.publish(turn)
            transport.wait(1, turn)
        else:
            transport.wait(0, turn)
            transport.publish(turn)
    passed_s = time.perf_counter() - before
    transport.group.gather("end", None)
    transport.close()
    return passed_s


def test_a_published_clock_wakes_who_sleeps_for_it(ranks) -> None:
    """A lost wake-up would cost a slice of sleep, 50 ms, each time: 10 seconds here."""
    assert max(ranks(2).run(one_way_is_quick)) < 4


def deadline(rank: int, world_size: int, transport_name: str) -> str:
    """Rank 1 sleeps through the deadline of the others; their words."""
    group = Group(timeout_s=1.0)
    communicator = Communicator(group, CPU, transport=transport_name, algorithm="direct")
    flat = communicator.empty(10, torch.float32)
    plan = communicator.plan_all_reduce(flat)
    communicator.begin(1, IN_BACKWARD)
    text = ""
    before = time.perf_counter()
    if rank == 1:
        time.sleep(2.5)
    else:
        with pytest.raises(Error) as raised:
            communicator.wait(communicator.start(plan.run))
        assert isinstance(raised.value, DeadlineExceeded)
        assert 0.9 < time.perf_counter() - before < 2.4
        text = str(raised.value)
    return text


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks, transport: str) -> None:
    texts = ranks(3).run(deadline, transport)
    assert all("waited 1 s for rank 1" in texts[rank] for rank in (0, 2))


# ---- Epochs and failures ---------------------------------------------------------------------------------------------


def announce(rank: int, world_size: int, transport_name: str) -> list[str]:
    """Rank 2 fails in epochs 1 and 3; what the others are told, and that epochs 2 and 4 work."""
    communicator = Communicator(Group(), CPU, transport=transport_name, algorithm="ring")
    flat = communicator.empty(10, torch.float32)
    plan = communicator.plan_all_reduce(flat)
    words = []
    for epoch in (1, 2, 3, 4):
        communicator.begin(epoch, IN_BACKWARD)
        flat.fill_(rank)
        if epoch % 2 and rank == 2:
            communicator.fail(f"a cat walked over rank 2 in epoch {epoch}")
        elif epoch % 2:
            with pytest.raises(PeerFailed) as raised:
                communicator.wait(communicator.start(plan.run))
            words.append(str(raised.value))
            communicator.fail(str(raised.value))
        else:
            communicator.wait(communicator.start(plan.run))
            assert flat.tolist() == [3.0] * 10
    communicator.group.gather("end", None)
    communicator.close()
    return words


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_a_failure_ends_its_epoch_with_the_words_of_the_failed_rank_and_the_next_works(ranks, transport: str) -> None:
    words = ranks(3).run(announce, transport)
    told = ["a cat walked over rank 2 in epoch 1", "a cat walked over rank 2 in epoch 3"]
    assert words == [told, told, []]


def late_delivery(rank: int, world_size: int, where: type[Operation], shut: bool) -> list[float]:
    """Rank 0 gives up a sum that rank 1 is about to deliver, or is delivering; what rank 0's memory holds at the end.

    Rank 1 stops for a while just before the operation `where`.
    """

    def slowly(*arguments: Any) -> tuple[list[Operation], int]:
        operations, ticks = bind_mapped(*arguments)
        at = next(number for number, operation in enumerate(operations) if isinstance(operation, where))
        return [*operations[:at], Hold(0.3), *operations[at:]], ticks

    transport = SharedMemory(Group())
    flat = transport.empty(1000, torch.float32, CPU)
    flat.fill_(5.0 * rank)
    transport.begin(1, IN_BACKWARD)
    if rank == 0:
        transport.publish(transport.start() + READY)
        time.sleep(0.1)
        transport.fail("rank 0 gave up")
        if shut:
            transport.shut()
        flat.fill_(-1.0)
    else:
        with unittest.mock.patch("ddpx.execute.bind_mapped", slowly):
            plan = compile_plan(build("all_reduce", "direct", world_size), transport, flat)
        with pytest.raises(PeerFailed, match="rank 0 gave up"):
            plan.run()
        with pytest.raises(PeerFailed, match="rank 0 gave up"):  # and so does every later one of the epoch
            plan.run()
    transport.group.gather("both are through", None)
    held = sorted(set(flat.tolist()))
    transport.begin(2, IN_BACKWARD)  # the next epoch works, and its sums are delivered again
    flat.fill_(rank + 1.0)
    compile_plan(build("all_reduce", "direct", world_size), transport, flat).run()
    assert flat.tolist() == [3.0] * 1000
    transport.group.gather("end", None)
    transport.close()
    return held


@needs_library
@pytest.mark.parametrize("where", [Claim, Combine])
def test_a_late_sum_is_kept_out_of_memory_that_was_shut(ranks, where: type[Operation]) -> None:
    assert ranks(2).run(late_delivery, where, True)[0] == [-1.0]


@needs_library
def test_a_late_sum_would_overwrite_memory_that_was_not_shut(ranks) -> None:
    assert ranks(2).run(late_delivery, Combine, False)[0] == [-1.0, 4.0]


def stopped_while_it_delivers(rank: int, world_size: int) -> str:
    """Rank 1 says that it writes, and stays there; what rank 0 is told when it begins again."""
    transport = SharedMemory(Group(timeout_s=0.3))
    transport.begin(1, IN_BACKWARD)
    words = ""
    if rank == 1:
        ctypes.c_uint64.from_address(transport.addresses(1).writing).value = 1
    transport.group.gather("writing", None)
    if rank == 0:
        transport.fail("rank 0 gave up")
        transport.shut()
        with pytest.raises(DeadlineExceeded) as raised:
            transport.begin(2, IN_BACKWARD)
        words = str(raised.value)
    transport.group.gather("end", None)
    transport.close()
    return words


@needs_library
def test_a_rank_stopped_while_it_delivers_makes_later_epochs_impossible(ranks) -> None:
    words = ranks(2).run(stopped_while_it_delivers)[0]
    assert "rank 1 has been writing a sum into the memory of rank 0" in words and "Start the job again" in words


def headers_that_differ(rank: int, world_size: int, transport_name: str, headers: list[int]) -> str:
    communicator = Communicator(Group(timeout_s=10), CPU, transport=transport_name)
    flat = communicator.empty(10, torch.float32)
    plan = communicator.plan_all_reduce(flat)
    communicator.begin(1, headers[rank])
    text = ""
    try:
        communicator.wait(communicator.start(plan.run))
    except (Mismatch, PeerFailed) as error:
        text = str(error)
        communicator.fail(text)
    communicator.group.gather("end", None)
    communicator.close()
    return text


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
@pytest.mark.parametrize(
    ("headers", "words"),
    [
        (
            [IN_BACKWARD | 1, IN_BACKWARD | 1, IN_BACKWARD | 2],
            "runs another backward through the forwards of its last one",
        ),
        ([IN_FORWARD | 1, IN_BACKWARD | 1, IN_BACKWARD | 1], "in a backward, reducing gradients"),
    ],
)
def test_ranks_in_different_places_are_told_on_every_rank(
    ranks, transport: str, headers: list[int], words: str
) -> None:
    for text in ranks(3).run(headers_that_differ, transport, headers):
        assert "ranks are out of step" in text and words in text


def killed_while_awaited(rank: int, world_size: int, transport_name: str) -> tuple[str, float]:
    communicator = Communicator(Group(), CPU, transport=transport_name, algorithm="direct")
    flat = communicator.empty(10, torch.float32)
    plan = communicator.plan_all_reduce(flat)
    communicator.wait(communicator.start(plan.run))
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.perf_counter()
    try:
        communicator.wait(communicator.start(plan.run))
    except (PeerLost, PeerFailed) as error:
        communicator.fail(str(error))
        return str(error), time.perf_counter() - before
    return "it went well", 0.0


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_a_killed_rank_is_named_within_seconds(transport: str) -> None:
    outcomes: list[Outcome] = attempt(killed_while_awaited, 3, transport)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        words, seconds = outcomes[rank].value
        assert "rank 1 is gone" in words and seconds < 5


# ---- Which transport -------------------------------------------------------------------------------------------------


def chosen(rank: int, world_size: int, hosts: list[str], transport_name: str = "auto") -> str:
    os.environ["DDPX_HOST_ID"] = hosts[rank]
    try:
        communicator = Communicator(Group(), CPU, transport=transport_name)
    finally:
        del os.environ["DDPX_HOST_ID"]
    name = communicator.transport_name
    communicator.close()
    return name


def test_one_host_shares_memory_and_several_send_messages(ranks) -> None:
    assert ranks(2).run(chosen, ["here", "here"]) == ["shared_memory"] * 2
    assert ranks(2).run(chosen, ["here", "there"]) == [MESSAGES] * 2


def waits_inside_a_host(rank: int, world_size: int) -> int:
    """Rank 3 comes late; whom this rank's longest wait was for."""
    with unittest.mock.patch.dict(os.environ, {"DDPX_HOST_ID": f"host {rank // 2}"}):
        communicator = Communicator(Group(timeout_s=20), transport="hierarchical")
    plan = communicator.plan_all_reduce(communicator.empty(1000, torch.float32))
    plan.run()
    communicator.group.gather("ready", None)
    if rank == 3:
        time.sleep(0.2)
    plan.run()
    communicator.group.gather("end", None)
    communicator.close()
    return plan.last_peer


def test_a_wait_inside_a_host_is_told_by_the_ranks_number_in_the_group(ranks) -> None:
    assert ranks(4).run(waits_inside_a_host)[2] == 3


def refused(rank: int, world_size: int) -> str:
    with pytest.raises(Error) as raised:
        chosen(rank, world_size, ["here", "there"], "shared_memory")
    return str(raised.value)


def test_shared_memory_across_hosts_is_refused_on_every_rank(ranks) -> None:
    for text in ranks(2).run(refused):
        assert "shared memory does not join these ranks" in text
        assert "on another host (there and here)" in text or "on another host (here and there)" in text
        assert "transport='process_group'" in text


def unmappable_on_one_rank(rank: int, world_size: int) -> str:
    """Rank 1 can't map its peers, as in a container that hides their processes."""
    import unittest.mock

    def hidden(address: object, writable: bool) -> Segment:
        raise PermissionError(1, "Operation not permitted")

    with unittest.mock.patch.object(Segment, "open", hidden if rank == 1 else Segment.open):
        communicator = Communicator(Group(), CPU)
    flat = communicator.empty(10, torch.float32)
    flat.fill_(1.0)
    communicator.wait(communicator.start(communicator.plan_all_reduce(flat).run))
    assert flat[0] == world_size
    communicator.group.gather("end", None)
    communicator.close()
    return communicator.transport_name


def test_auto_falls_back_to_messages_on_all_ranks_when_one_cannot_map(ranks) -> None:
    assert ranks(3).run(unmappable_on_one_rank) == [MESSAGES] * 3


def other_collectives_at_the_same_time(rank: int, world_size: int) -> None:
    """The user's own all-reduces on the default group do not meet our messages."""
    import torch.distributed as dist

    transport = ProcessGroup(Group(), CPU)
    ours, theirs = torch.zeros(1000), torch.zeros(1000)
    for turn in range(50):
        theirs.fill_(rank + turn)
        work = dist.all_reduce(theirs, async_op=True)
        ours.fill_(rank)
        landing = torch.empty(1000)
        transport.exchange([((rank + 1) % world_size, ours)], [((rank - 1) % world_size, landing)])
        assert landing[0] == (rank - 1) % world_size
        work.wait()
        assert theirs[0] == sum(range(world_size)) + world_size * turn
    transport.group.gather("end", None)
    transport.close()


def test_messages_do_not_meet_the_users_collectives(ranks) -> None:
    ranks(3).run(other_collectives_at_the_same_time)
