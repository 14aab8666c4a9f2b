"""Run a function on n ranks: processes of their own, joined by gloo over the loopback device.

    run(function, 2, "argument")            # two new processes: function(rank, world_size, "argument") on each
    ranks(2).run(function, "argument")      # the same on processes that are shared by all tests (a fixture)

Both give the results in rank order, or raise `RanksFailed` with what every failed rank said. Functions travel by name,
so they stand at the top level of a module. `attempt` does not raise: for tests that kill a rank.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

Function = Callable[..., Any]

NO_ENV: Mapping[str, str] = MappingProxyType({})
GROUP_TIMEOUT_S = 30.0  # of gloo and so, by default, of every wait in ddpx


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a function on one rank. `exitcode` is that of a process which ended without an answer."""

    rank: int
    value: Any = None
    error: str | None = None  # a traceback, or how the process ended
    exitcode: int | None = None


def everywhere(value: Any) -> list[Any]:
    """On a rank: what each rank passed, in rank order."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class RanksFailed(AssertionError):
    """Some ranks failed; the text has all of them."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        parts = [f"{name} failed on {len(failed)} of {len(outcomes)} ranks"]
        parts += [f"---- rank {outcome.rank}\n{outcome.error}" for outcome in failed]
        super().__init__("\n".join(parts))


def run(
    function: Function, world_size: int, *args: Any, timeout_s: float = 60, env: Mapping[str, str] = NO_ENV
) -> list[Any]:
    """Results of function(rank, world_size, *args) on `world_size` new processes; killed after `timeout_s`."""
    return _values(function, attempt(function, world_size, *args, timeout_s=timeout_s, env=env))


def attempt(
    function: Function, world_size: int, *args: Any, timeout_s: float = 60, env: Mapping[str, str] = NO_ENV
) -> list[Outcome]:
    """As `run`, but tells what became of each rank instead of raising."""
    pool = Ranks(world_size, env)
    try:
        return pool.attempt(function, *args, timeout_s=timeout_s)
    finally:
        pool.close()


class Ranks:
    """A group of processes that wait for functions. Processes start with the first one, and anew after a failure."""

    def __init__(self, world_size: int, env: Mapping[str, str] = NO_ENV) -> None:
        self.world_size = world_size
        self._env = dict(env)
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Function, *args: Any, timeout_s: float = 60) -> list[Any]:
        """Results of function(rank, world_size, *args), in rank order; RanksFailed where there are none."""
        return _values(function, self.attempt(function, *args, timeout_s=timeout_s))

    def attempt(self, function: Function, *args: Any, timeout_s: float = 60) -> list[Outcome]:
        """What became of function(rank, world_size, *args) on each rank."""
        if not self._workers:
            self._start()
        job = pickle.dumps((function, args))
        outcomes: dict[int, Outcome] = {}
        for rank, (process, pipe) in enumerate(self._workers):
            try:
                pipe.send_bytes(job)
            except OSError:
                outcomes[rank] = _ended(rank, process)
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers) if rank not in outcomes}
            for pipe in multiprocessing.connection.wait(list(open_pipes), deadline - time.monotonic()):
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = Outcome(rank, *pickle.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, OSError):  # the process is gone
                    outcomes[rank] = _ended(rank, self._workers[rank][0])
        for rank in range(self.world_size):
            outcomes.setdefault(rank, Outcome(rank, error=f"had not ended after {timeout_s:g} s, and was killed"))
        if any(outcome.error is not None for outcome in outcomes.values()):
            self.close()  # ranks may be out of step with each other now
        return [outcomes[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # torch._dynamo, since optimizers import it, which takes each process seconds otherwise
        context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "pytest", "ddpx"])
        self._folder = tempfile.TemporaryDirectory(prefix="ddpx-ranks-")
        store = os.path.join(self._folder.name, "store")
        with _no_main():
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, rank, self.world_size, store, self._env), daemon=True
                )
                process.start()
                theirs.close()
                self._workers.append((process, ours))

    def close(self) -> None:
        """End the processes: those that are idle leave by themselves, the others are killed."""
        for _, pipe in self._workers:
            pipe.close()
        deadline = time.monotonic() + 1.0
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _values(function: Function, outcomes: Sequence[Outcome]) -> list[Any]:
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailed(getattr(function, "__name__", str(function)), outcomes)
    return [outcome.value for outcome in outcomes]


def _ended(rank: int, process: multiprocessing.process.BaseProcess) -> Outcome:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return Outcome(rank, error=f"was killed by {signal.Signals(-code).name}", exitcode=code)
    return Outcome(rank, error=f"ended with exit code {code}, without an answer", exitcode=code)


@contextlib.contextmanager
def _no_main() -> Any:
    """Keep children from importing the main module, which is pytest's: nothing in there is for them."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    main.__spec__ = None
    if file is not None:
        del main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


# ---- In the child ----------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int, world_size: int, store: str, env: Mapping[str, str]) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.enable()  # a crash in native code says where, on standard error
    gc.freeze()  # what torch has made stays; collecting what a function made takes a millisecond then, not 200
    group_is_up = False
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # without the exit handlers of gloo, which wait for peers
        try:
            if not group_is_up:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                )
                group_is_up = True
            function, args = pickle.loads(job)
            torch.manual_seed(rank)
            answer = pickle.dumps((function(rank, world_size, *args), None, None))
            function = args = None
            gc.collect()
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc(), None))
        pipe.send_bytes(answer)
