"""The ranks that train together, and the board on which they leave each other notes.

A `Group` is a torch process group seen by ddpx: who I am in it, and its store as a board of small values. The board is
for agreement at construction and for announcing failures; gradients never pass through it.
"""

import contextlib
import copy
import datetime
import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddpx.errors import DeadlineExceeded, Error, PeerFailed, PeerLost
from ddpx.processes import Processes

DEFAULT_TIMEOUT_S = 1800.0


class Group:
    """A process group of `world_size` ranks; `rank` counts inside it, `ranks` are the global numbers.

    Without an initialised torch.distributed this is a group of one, so that a script runs unchanged on one process.
    Every rank must construct its Groups of one `series` on one process group in the same order, as with any collective.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout_s: float | None = None, series: str = "groups"
    ) -> None:
        if process_group is None and not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    "Default process group has not been initialized, please make sure to call init_process_group: "
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so training alone would leave the ranks apart."
                )
            self.process_group: dist.ProcessGroup | None = None
            self.rank, self.world_size, self.ranks, self._members = 0, 1, [0], [0]
            self.timeout_s = timeout_s or DEFAULT_TIMEOUT_S
            return
        self._poll: Callable[[], None] | None = None
        self._place = "outside"
        process_group = process_group or dist.group.WORLD
        assert process_group is not None
        self.process_group = process_group
        self.rank = dist.get_rank(self.process_group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group it was given")
        self.world_size = dist.get_world_size(self.process_group)
        self.ranks = dist.get_process_group_ranks(self.process_group)
        self.timeout_s = timeout_s or _timeout_s(process_group)
        self._members = list(range(self.world_size))  # our ranks, as the whole group and `_processes` number them
        if self.world_size > 1:
            with self._told_when_the_board_is_gone("its first note"):
                store = process_group.get_group_store()
                # Each rank counts its own Groups; where all make them in the same order, equal counts are one Group.
                self._counter = store, f"ddpx/{series}/{self.rank}"
                serial = store.add(f"ddpx/{series}/{self.rank}", 1)
                self._store = self._whole = dist.PrefixStore(f"ddpx/{series}/{serial}", store)
                self._processes = Processes(self._store, self.rank)
            self._notes = itertools.count()

    def withdraw(self) -> None:
        """Take back this rank's part in a Group, its last one, to whose first note the others did not come."""
        self._store.delete_key(f"note/outside/0/{self.rank}")  # or who comes later would take it for company
        store, key = self._counter
        store.add(key, -1)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def subgroup(self, ranks: list[int], name: str) -> "Group":
        """Those of our ranks, on a part of our board called `name`. Only they call it."""
        part = copy.copy(self)
        part.rank, part.world_size, part.ranks = ranks.index(self.rank), len(ranks), [self.ranks[r] for r in ranks]
        part._poll = None
        part._members = [self._members[r] for r in ranks]
        if self.world_size > 1:
            part._store = self.store(name)
            part._notes = itertools.count()
        return part

    def known_as(self, rank: int) -> int:
        """The number of our `rank` in the whole group that we are a part of: the one to tell users."""
        return self._members[rank]

    def store(self, prefix: str) -> dist.PrefixStore:
        """A part of the board for somebody else's keys."""
        return dist.PrefixStore(prefix, self._store)

    def enter(self, place: str, poll: Callable[[], None] | None) -> None:
        """From here on gather at `place`, such as an epoch. Who is still elsewhere hears from `poll` why none comes."""
        if self.world_size > 1:
            self._place, self._poll, self._notes = place, poll, itertools.count()

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. A collective: all ranks call it, in the same order and with one `topic`.

        Raises DeadlineExceeded naming the ranks that did not come, PeerFailed when one of them announced a failure. A
        rank that hears of one may leave when its value is there already, and its peers return: `look` tells them.
        """
        if self.world_size == 1:
            return [value]
        with self._told_when_the_board_is_gone(topic):
            return self._gather(topic, value)

    def _gather(self, topic: str, value: Any) -> list[Any]:
        note = f"note/{self._place}/{next(self._notes)}"
        keys = [f"{note}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps((topic, value)))  # type: ignore[arg-type]
        deadline = time.monotonic() + self.timeout_s
        pause_s = 0.0002
        while not self._store.check(keys):
            self._raise_if_hopeless(topic, keys)
            if time.monotonic() > deadline:
                absent = [self.known_as(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                raise DeadlineExceeded(
                    f"rank {self.known_as(self.rank)} waited {self.timeout_s:.0f} s for {ranks_text(absent)} at "
                    f"'{topic}'. Every rank of the group has to get there: look at what these ranks were doing."
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
        notes = [pickle.loads(self._store.get(key)) for key in keys]
        if self._store.add(f"{note}/read", 1) == self.world_size:
            for key in [*keys, f"{note}/read"]:
                self._store.delete_key(key)
        topics = [their_topic for their_topic, _ in notes]
        if len(set(topics)) > 1:
            calls = ", ".join(f"rank {self.known_as(rank)}: '{topic}'" for rank, topic in enumerate(topics))
            raise PeerFailed(f"ranks do not do the same things in the same order ({calls}).")
        return [value for _, value in notes]

    def leave(self, topic: str, value: Any) -> None:
        """Let peers read this rank's `value`, in place of what it left there before, unless the board is gone."""
        if self.world_size > 1:
            with contextlib.suppress(RuntimeError):
                self._whole.set(f"left/{topic}/{self.ranks[self.rank]}", pickle.dumps(value))  # type: ignore[arg-type]

    def left(self, topic: str, rank: int) -> Any:
        """What a rank left last; None if nothing, or the board is gone."""
        with contextlib.suppress(RuntimeError):
            key = f"left/{topic}/{self.ranks[rank]}"
            return pickle.loads(self._whole.get(key)) if self._whole.check([key]) else None
        return None

    def announce(self, message: str, epoch: int = -1) -> None:
        """Leave a failure in an epoch (-1: outside of any) on the board. Never raises: it is called while failing."""
        if self.world_size > 1:
            with contextlib.suppress(Exception):  # The store may be gone with rank 0; then its connections speak.
                self._store.compare_set(f"failure/{epoch}", "", message)  # the first one stays

    def announced(self, epoch: int = -1) -> str | None:
        """The failure on the board for that epoch, if any."""
        key = f"failure/{epoch}"
        if self.world_size == 1 or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def look(self) -> None:
        """Raise PeerFailed if a rank announced a failure: for good, or at the place where this rank gathers."""
        message = self.announced()
        if message is not None:
            raise PeerFailed(message)
        if self.world_size > 1 and self._poll is not None:
            self._poll()

    def is_dead(self, rank: int) -> bool:
        """Whether the process of that rank is known to have ended: known of those on this host."""
        return self.world_size > 1 and self._processes.is_dead(self._members[rank])

    def close(self) -> None:
        """Stop watching processes."""
        if self.world_size > 1:
            self._processes.close()

    @contextlib.contextmanager
    def _told_when_the_board_is_gone(self, topic: str) -> Iterator[None]:
        try:
            yield
        except Error:
            raise
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self.known_as(self.rank)} lost the store of the process group, which rank 0 keeps as a rule, "
                f"at '{topic}': {str(error).splitlines()[0]}. The output of rank 0 says why it ended."
            ) from error

    def _raise_if_hopeless(self, topic: str, keys: list[str]) -> None:
        self.look()
        for rank, key in enumerate(keys):
            if self.is_dead(rank) and not self._store.check([key]):
                raise PeerLost(
                    f"rank {self.known_as(rank)} is gone: its process ended while rank {self.known_as(self.rank)} "
                    f"waited at '{topic}'."
                )


@contextlib.contextmanager
def announcing(group: Group, what: str) -> Iterator[None]:
    """A failure to make `what` is told to the group, whose ranks wait in it."""
    try:
        yield
    except Error:  # the others see it as well, or have said it
        raise
    except BaseException as error:
        group.announce(f"rank {group.rank} failed in constructing its {what}: {type(error).__name__}: {error}")
        raise


def _timeout_s(process_group: dist.ProcessGroup) -> float:
    """The process group's own timeout in seconds, which is the default deadline of every wait."""
    for device in ("cpu", "cuda"):
        try:
            timeout = process_group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds()
    return DEFAULT_TIMEOUT_S


def ranks_text(ranks: list[int]) -> str:
    """`rank 3` or `ranks 3, 4 and 9`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
