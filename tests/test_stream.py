"""The communication stream on CPU: a thread that takes tasks in order, hands errors back and can be emptied."""

import gc
import threading
import time
import weakref

import pytest
import torch

from ddpx.errors import DeadlineExceeded, Error, PeerFailed
from ddpx.stream import ThreadStream, open_stream


def nothing() -> None:
    pass


@pytest.fixture
def stream():
    stream = ThreadStream()
    yield stream
    stream.close()


def test_tasks_run_in_order_on_another_thread(stream: ThreadStream) -> None:
    ran = []
    pendings = [
        stream.submit(lambda number=number: ran.append((number, threading.get_ident()))) for number in range(50)
    ]
    for pending in pendings:
        pending.wait(nothing, 10)
    assert [number for number, _ in ran] == list(range(50))
    assert {ident for _, ident in ran} != {threading.get_ident()} and len({ident for _, ident in ran}) == 1


def test_the_caller_goes_on_while_a_task_runs(stream: ThreadStream) -> None:
    go = threading.Event()
    pending = stream.submit(go.wait)
    assert not pending.done()
    go.set()
    pending.wait(nothing, 10)
    assert pending.done()
    assert pending.started_s <= pending.ended_s <= time.perf_counter()


def test_what_is_waited_for_at_once_runs_here_if_nothing_is_under_way(stream: ThreadStream) -> None:
    ran: list[int] = []
    here, go = threading.get_ident(), threading.Event()
    stream.submit(nothing).wait(nothing, 10)
    stream.run(lambda: ran.append(threading.get_ident())).wait(nothing, 10)
    assert ran == [here]
    before = stream.submit(lambda: (go.wait(), ran.append(0)))
    behind = stream.run(lambda: ran.append(threading.get_ident()))
    assert not behind.done()
    go.set()
    behind.wait(nothing, 10)
    assert before.done() and ran[1] == 0 and ran[2] != here


def test_an_error_of_a_task_that_ran_here_is_raised_by_the_wait(stream: ThreadStream) -> None:
    def fail() -> None:
        raise PeerFailed("rank 3 says so")

    pending = stream.run(fail)
    assert pending.started_s <= pending.ended_s <= time.perf_counter()
    with pytest.raises(PeerFailed, match="rank 3 says so"):
        pending.wait(nothing, 10)


def test_waiting_twice_is_fine(stream: ThreadStream) -> None:
    pending = stream.submit(nothing)
    for _ in range(3):
        pending.wait(nothing, 10)


def test_an_error_is_raised_by_the_wait_and_the_next_task_runs(stream: ThreadStream) -> None:
    def fail() -> None:
        raise PeerFailed("rank 3 says so")

    failing, next_one = stream.submit(fail), stream.submit(nothing)
    with pytest.raises(PeerFailed, match="rank 3 says so"):
        failing.wait(nothing, 10)
    next_one.wait(nothing, 10)


def test_a_wait_polls_and_raises_what_the_poll_raises(stream: ThreadStream) -> None:
    go = threading.Event()
    pending = stream.submit(go.wait)

    def poll() -> None:
        raise PeerFailed("announced elsewhere")

    with pytest.raises(PeerFailed, match="announced elsewhere"):
        pending.wait(poll, 10)
    go.set()


def test_a_wait_ends_at_its_deadline(stream: ThreadStream) -> None:
    go = threading.Event()
    pending = stream.submit(go.wait)
    with pytest.raises(DeadlineExceeded):
        pending.wait(nothing, 0.2)
    go.set()
    pending.wait(nothing, 10)


def test_cancel_drops_what_has_not_started(stream: ThreadStream) -> None:
    go, ran = threading.Event(), []
    running = stream.submit(go.wait)
    while running.started_s is None:
        time.sleep(0.001)
    dropped = stream.submit(lambda: ran.append("dropped"))
    threading.Timer(0.1, go.set).start()
    assert stream.cancel(10)
    running.wait(nothing, 10)
    with pytest.raises(Error, match="cancelled after a failure"):
        dropped.wait(nothing, 10)
    kept = stream.submit(lambda: ran.append("kept"))
    kept.wait(nothing, 10)
    assert ran == ["kept"]


def test_cancel_tells_when_the_thread_stays_busy(stream: ThreadStream) -> None:
    go = threading.Event()
    running = stream.submit(go.wait)
    while running.started_s is None:
        time.sleep(0.001)
    assert not stream.cancel(0.2)
    go.set()
    assert stream.cancel(10)


def test_the_thread_ends_when_closed_after_its_last_task() -> None:
    stream = ThreadStream("a name of its own")
    pending = stream.submit(nothing)
    stream.close()
    pending.wait(nothing, 10)
    until = time.monotonic() + 10
    while any(thread.name == "a name of its own" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_thread_ends_with_its_stream() -> None:
    stream = ThreadStream("another name")
    stream.submit(nothing).wait(nothing, 10)
    del stream
    until = time.monotonic() + 10
    while any(thread.name == "another name" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_task_is_let_go_once_it_has_run(stream: ThreadStream) -> None:
    flat = torch.zeros(10)
    dead = weakref.ref(flat)
    pending = stream.submit(flat.add_(1).sum)
    del flat
    pending.wait(nothing, 10)
    stream.submit(nothing).wait(nothing, 10)
    gc.collect()
    assert dead() is None


def test_only_cpu_and_cuda_have_a_stream() -> None:
    with pytest.raises(Error, match="ddpx trains on cpu and cuda, not on meta"):
        open_stream(torch.device("meta"))
