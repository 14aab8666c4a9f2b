"""Where communication runs while the caller computes: a CUDA stream, or on CPU one worker thread.

Both are first in, first out, and both order a task after everything its caller did before submitting it. `Pending.wait`
orders the caller after the task: on CPU it blocks, on CUDA it makes the current stream wait and the host goes on.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ddpx.errors import DeadlineExceeded, Error

Task = Callable[[], None]


class Pending(Protocol):
    """A submitted task. Times are in seconds on time.perf_counter; None until known (on CUDA, until read)."""

    @property
    def started_s(self) -> float | None: ...

    @property
    def ended_s(self) -> float | None: ...

    def done(self) -> bool: ...

    def wait(self, poll: Callable[[], None], timeout_s: float) -> None:
        """Order the caller after the task; raise what the task raised. `poll` is called now and then, and may raise."""


class Stream(Protocol):
    def submit(self, task: Task) -> Pending: ...

    def run(self, task: Task) -> Pending:
        """Submit a task that the caller will wait for at once. It may have ended when this returns."""

    def cancel(self, timeout_s: float) -> bool: ...

    def abandon(self) -> None: ...

    def close(self) -> bool: ...


POLL_S = 0.1
CLOSE_S = 1.0


class _ThreadPending:
    __slots__ = ("ended_s", "error", "finished", "generation", "started_s", "task")

    def __init__(self, task: Task, generation: int) -> None:
        self.task: Task | None = task
        self.generation = generation
        self.error: BaseException | None = None
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.finished = threading.Lock()
        self.finished.acquire()

    def done(self) -> bool:
        return self.ended_s is not None

    def wait(self, poll: Callable[[], None], timeout_s: float) -> None:
        if self.ended_s is None:
            deadline = time.monotonic() + timeout_s
            while not self.finished.acquire(timeout=POLL_S):
                poll()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"communication did not end within {timeout_s:.0f} s")
            self.finished.release()
        if self.error is not None:
            raise self.error

    def run(self, generation: int) -> None:
        task, self.task = self.task, None
        self.started_s = time.perf_counter()
        try:
            if self.generation != generation:
                raise Error("cancelled after a failure")
            assert task is not None
            task()
        except BaseException as error:
            self.error = error
        self.ended_s = time.perf_counter()
        self.finished.release()


class ThreadStream:
    """One daemon thread that runs tasks in order."""

    def __init__(self, name: str = "ddpx comm") -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        self._line = _Line()
        self._last: Pending | None = None
        self._thread = threading.Thread(target=_run_tasks, args=(self._line,), name=self._name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._line.tasks.put, None)  # a stream that is dropped without close() ends it, too

    def submit(self, task: Task) -> Pending:
        pending = _ThreadPending(task, self._line.generation)
        self._last = pending
        self._line.tasks.put(pending)
        return pending

    def run(self, task: Task) -> Pending:
        """In the calling thread where that is in order, which saves two hand-overs between threads."""
        if self._last is not None and not self._last.done():
            return self.submit(task)
        pending = _ThreadPending(task, self._line.generation)
        pending.run(self._line.generation)
        return pending

    def cancel(self, timeout_s: float) -> bool:
        """Drop what has not started. Whether the thread is free again within `timeout_s`."""
        self._line.generation += 1
        try:
            self.submit(_nothing).wait(_nothing, timeout_s)
        except DeadlineExceeded:
            return False
        return True

    def abandon(self) -> None:
        """Leave the thread to a wait that will not end soon, and go on with another one. It ends with its task."""
        self._line.tasks.put(None)
        self._start()

    def close(self) -> bool:
        """End the thread after what it still has to do, such as the part of a small plan that a slower peer needs.

        Whether it has ended, within a second.
        """
        self._line.tasks.put(None)
        if threading.current_thread() is self._thread:  # where the garbage collector may call from
            return True
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()


class _Line:
    """What the thread and its stream share, so that the thread does not keep the stream alive."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[_ThreadPending | None] = queue.SimpleQueue()
        self.generation = 0


def _nothing() -> None:
    pass


def _run_tasks(line: _Line) -> None:
    while True:
        pending = line.tasks.get()
        if pending is None:
            return
        pending.run(line.generation)
        del pending  # else its buffers would live until the next task


class _CudaPending:
    """Ends are events on the stream; reading their times later costs the host nothing now."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event, stream: "CudaStream") -> None:
        self.begin, self.end, self._stream = begin, end, stream

    def done(self) -> bool:
        return bool(self.end.query())

    def wait(self, poll: Callable[[], None], timeout_s: float) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self.end)

    def _at(self, event: torch.cuda.Event) -> float | None:
        epoch, epoch_s = self._stream.epoch
        return epoch_s + epoch.elapsed_time(event) * 1e-3 if event.query() else None

    @property
    def started_s(self) -> float | None:
        return self._at(self.begin)

    @property
    def ended_s(self) -> float | None:
        return self._at(self.end)


class CudaStream:
    """A high-priority side stream. Unverified: never run on a GPU yet (tests/gpu_check.py is the proof)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        zero = torch.cuda.Event(enable_timing=True)
        zero.record(self._stream)
        zero.synchronize()  # once, at construction: pairs the device's clock with the host's
        self.epoch = (zero, time.perf_counter())

    def submit(self, task: Task) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begin.record()
            task()
            end.record()
        return _CudaPending(begin, end, self)

    def run(self, task: Task) -> Pending:
        return self.submit(task)

    def cancel(self, timeout_s: float) -> bool:
        """Nothing to drop: tasks are on the device as soon as they are submitted."""
        return True

    def abandon(self) -> None:
        """Nothing to leave: no thread waits."""

    def close(self) -> bool:
        """The stream goes with its last reference."""
        return True


def open_stream(device: torch.device) -> Stream:
    """The communication stream for tensors on `device`."""
    if device.type == "cuda":
        return CudaStream(device)
    if device.type == "cpu":
        return ThreadStream()
    raise Error(f"ddpx trains on cpu and cuda, not on {device.type}")
