"""What an analysis finds: plain records of one rank and of a run, and the metrics read off them.

Times are integers of nanoseconds unless the name says otherwise, so that parts add up exactly.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from ddpx.trace.collect import Collective
from ddpx.trace.intervals import Interval, Split

CAUSES = ("communication", "peer", "data loading", "copy", "host", "other")
CAUSE_WORDS = {
    "communication": "communicating, or a thread blocked on it",
    "peer": "waiting for a peer",
    "data loading": "data loading",
    "copy": "copying memory",
    "host": "host late (nothing launched)",
    "other": "launched, not yet running",
}
# Student's t, two-sided, for n - 1 degrees of freedom at index n - 1
T_95 = (math.inf, 12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.1, 2.0)


@dataclass(slots=True)
class Hole:
    """A stretch of a step in which no compute runs."""

    step: int
    start: int
    end: int
    parts: dict[str, int]  # cause -> ns; sums to the length
    before: str  # the operator that ends where it starts
    after: str
    within: str  # the user's annotation around it
    sync: str  # the call in which the host was waiting for the device when it began
    comm: list[Interval] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def cause(self) -> str:
        return max(self.parts, key=lambda cause: self.parts[cause])


@dataclass(slots=True)
class Placed:
    """A collective as one rank saw it, in its step."""

    event: Collective
    step: int
    exposed_ns: array[int] = field(default_factory=lambda: array("q"))  # start, end, start, end, ...
    wait: int | None = None  # ns until the last rank arrived; None where ranks couldn't be compared
    transfer: int | None = None

    @property
    def duration(self) -> int:
        return self.event.end - self.event.start

    @property
    def exposed(self) -> list[Interval]:
        """The parts of it that ran while nothing was computed."""
        return list(zip(self.exposed_ns[::2], self.exposed_ns[1::2], strict=True))

    @property
    def exposed_total(self) -> int:
        return sum(self.exposed_ns[1::2]) - sum(self.exposed_ns[::2])


@dataclass(slots=True)
class StepReport:
    number: int
    start: int
    end: int
    host: int  # ns of the host's ProfilerStep
    split: Split
    idle: dict[str, int]  # cause -> ns of the time without compute; sums to exposed + gap
    hideable: tuple[int, int]  # overlapped and total communication without the step's last collective
    tail: int  # exposed communication after the last compute under or before the last collective
    compute: list[Interval] = field(default_factory=list)  # for pictures, coarse
    exposed: list[Interval] = field(default_factory=list)


@dataclass(slots=True)
class Slowdown:
    name: str
    shape: str
    alone_us: float  # median
    with_comm_us: float
    count_alone: int
    count_with_comm: int

    @property
    def ratio(self) -> float:
        return self.with_comm_us / self.alone_us


@dataclass(slots=True)
class RankReport:
    path: Path
    rank: int
    world_size: int | None
    backend: str
    device: str
    host: str
    base_ns: int
    events: int
    json_bytes: int
    steps: list[StepReport]
    collectives: list[Placed]
    holes: list[Hole]
    hta_overlap: float | None  # as Holistic Trace Analysis: whole trace, last step dropped
    slowdowns: list[Slowdown]
    slowdown: float | None  # compute with communication / alone, weighted by time
    slowdown_ms: float | None  # per step
    blind: bool  # several ranks, but no communication in the trace: it can't be told from a gap
    notes: list[str]


@dataclass(slots=True)
class Row:
    """One collective of a step (or all of one kind and size), over steps and ranks."""

    label: str
    kind: str
    size: int | None
    dtype: str
    group_size: int | None
    per_step: float
    offset_ms: float  # start within the step
    duration_ms: float  # as a rank sees it, waiting included
    transfer_ms: float | None  # shortest of the ranks
    wait_ms: float | None
    exposed_ms: float  # per step
    duration_total_ms: float  # per step

    @property
    def bandwidth_ms(self) -> float:
        return self.transfer_ms if self.transfer_ms is not None else self.duration_ms

    @property
    def algbw(self) -> float | None:
        """Bytes per second."""
        return self.size / self.bandwidth_ms * 1e3 if self.size and self.bandwidth_ms else None

    @property
    def busbw(self) -> float | None:
        n = self.group_size
        factor = bus_factor(self.kind, n) if n else None
        return self.algbw * factor if self.algbw is not None and factor is not None else None


@dataclass(slots=True)
class Arrival:
    """How often one rank came last to collectives, and what that cost the others."""

    rank: int
    last: int
    of: int
    others_wait_ms: float  # mean wait of the other ranks where it came last
    cost_ms: float  # the others' mean wait for it, per step
    worst_ms: float  # the longest such wait, and where it was
    worst_at: str
    by_step: list[float]  # cost_ms, step by step


@dataclass(slots=True)
class RunReport:
    name: str
    ranks: list[RankReport]
    rows: list[Row]
    arrivals: list[Arrival]
    straggler: str | None
    problems: list[str]  # analyses refused, by name
    notes: list[str]

    @property
    def blind(self) -> bool:
        """Some rank's trace lacks its communication: only step_ms and compute_ms mean what they say."""
        return any(rank.blind for rank in self.ranks)

    @property
    def step_numbers(self) -> list[int]:
        return [step.number for step in self.ranks[0].steps]

    def series(self, metric: str) -> list[float]:
        """A metric (see METRICS) step by step, mean over ranks; empty where ranks' steps don't line up."""
        value = METRICS[metric]
        if any([step.number for step in rank.steps] != self.step_numbers for rank in self.ranks):
            return []
        return [fmean(value(rank.steps[i]) for rank in self.ranks) for i in range(len(self.step_numbers))]

    def mean(self, metric: str) -> float:
        """A metric's mean over every step of every rank."""
        return fmean(METRICS[metric](step) for rank in self.ranks for step in rank.steps)

    def ratio(self, which: str) -> float | None:
        """overlap or hideable: time hidden over time communicating, over all steps and ranks."""
        hidden = whole = 0
        for rank in self.ranks:
            for step in rank.steps:
                parts = step.split
                one = (parts.overlapped, parts.overlapped + parts.exposed) if which == "overlap" else step.hideable
                hidden, whole = hidden + one[0], whole + one[1]
        return hidden / whole if whole else None


def _ideal(parts: Split) -> int:
    """The step if communication hid under all computation there is, or the other way round."""
    compute, comm = parts.compute_only + parts.overlapped, parts.overlapped + parts.exposed
    return parts.gap + max(compute, comm)


def _idle_metric(cause: str) -> Callable[[StepReport], float]:
    return lambda step: step.idle.get(cause, 0) / 1e6


METRICS: dict[str, Callable[[StepReport], float]] = {
    "step_ms": lambda step: (step.end - step.start) / 1e6,
    "compute_only_ms": lambda step: step.split.compute_only / 1e6,
    "overlapped_ms": lambda step: step.split.overlapped / 1e6,
    "exposed_ms": lambda step: step.split.exposed / 1e6,
    "gap_ms": lambda step: step.split.gap / 1e6,
    "compute_ms": lambda step: (step.split.compute_only + step.split.overlapped) / 1e6,
    "comm_ms": lambda step: (step.split.overlapped + step.split.exposed) / 1e6,
    "ideal_ms": lambda step: _ideal(step.split) / 1e6,
    "idle_ms": lambda step: (step.split.exposed + step.split.gap) / 1e6,
    **{f"idle_{cause.replace(' ', '_')}_ms": _idle_metric(cause) for cause in CAUSES},
}


def t_95(n: int) -> float:
    """Student's t for a 95 % margin around the mean of n values."""
    return T_95[min(n, len(T_95)) - 1]


def bus_factor(kind: str, n: int) -> float | None:
    """busbw / algbw as nccl-tests defines it; None for a collective without one."""
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n
    return 1.0 if kind in ("broadcast", "reduce", "send", "recv", "send_recv") else None


@dataclass(slots=True)
class Difference:
    metric: str
    before: float
    after: float
    margin: float | None  # 95 % confidence, by Student's t from the spread over steps; None with a single step

    @property
    def delta(self) -> float:
        return self.after - self.before

    @property
    def is_clear(self) -> bool | None:
        """Whether the difference is more than chance would make it; None with a single step."""
        return None if self.margin is None else abs(self.delta) > self.margin
