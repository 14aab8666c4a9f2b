"""Say where each step's time went, on every rank, and refuse what the traces can't tell.

Each step of each rank splits into compute-only, overlapped, exposed communication and gap, which add up to the step
exactly (integers of nanoseconds). A step is the host's ProfilerStep; on a GPU it ends when both the host and
everything it launched are done, and the next begins there, so work that runs after its host step is still its own.

Across ranks a collective is the same one by step, process group, bucket and order; kinds and sizes must agree. The
rank that arrives last waits least, so each rank's wait is its duration minus the shortest one: no clocks are compared.
"""

from __future__ import annotations

import heapq
import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, stdev

from ddpx.trace.collect import Collective, Recording, Samples, Stream, collect
from ddpx.trace.intervals import Cutter, Interval, Split, intersect, join, split, subtract, total, union
from ddpx.trace.read import TraceError

CAUSES = ("communication", "peer", "data loading", "copy", "host", "other")
CAUSE_WORDS = {
    "communication": "waiting for communication",
    "peer": "waiting for a peer",
    "data loading": "data loading",
    "copy": "copying memory",
    "host": "host late (nothing launched)",
    "other": "launched, not yet running",
}
T_95 = (
    math.inf,
    12.7,
    4.3,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.1,
    2.0,
)  # Student's t, two-sided, n - 1 degrees
PIECE = 20_000  # intervals of compute held at a time
DRAWN_STEPS = 8
DRAWN_SLIVERS = 6000  # finest detail kept for pictures: a step's length over this
INSIDE, OUTSIDE = 0.9, 0.05  # share of an operator under communication that counts as with / without it


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


def short(name: str) -> str:
    """A kernel's or operator's name without template and call arguments."""
    name = re.sub(r" \[[\d, ]*\]\[[\d, ]*\]$", "", name)
    name = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    name = name.removeprefix("autograd::engine::evaluate_function: ").strip()
    return name if len(name) <= 60 else name[:59] + "…"


# One rank ------------------------------------------------------------------------------------------------------------


def windows_of(recording: Recording) -> list[Interval]:
    """Each step's window; on a GPU stretched to the end of the work it launched (see the module's docstring)."""
    steps = recording.steps
    if recording.device == "cpu":
        return [(step.start, step.end) for step in steps]
    starts = [step.start for step in steps]
    done = [step.end for step in steps]
    begin = steps[0].start
    for stream in recording.streams.values():
        for i, correlation in enumerate(stream.correlation):
            launch = recording.launch_of(correlation)
            k = bisect_right(starts, stream.start[i] if launch is None else launch) - 1
            if k < 0:
                begin = max(begin, stream.end[i])
            elif stream.end[i] > done[k]:
                done[k] = stream.end[i]
    out = []
    for step, end in zip(steps, done, strict=True):
        lo = max(step.start, begin)
        if end <= lo:
            raise TraceError(f"{recording.path}: step {step.number} has no time of its own on the device")
        out.append((lo, end))
        begin = end
    return out


def _device_intervals(recording: Recording, kind: str, launched_before: int | None = None) -> Iterator[Interval]:
    """Sorted (not yet joined) intervals of one kind of device work, over all streams."""

    def of(key: tuple[bytes, bytes], stream: Stream) -> Iterator[Interval]:
        spans = recording.comm_spans.get(key, [])
        whole = key in recording.comm_streams
        span = 0
        for i, start in enumerate(stream.start):
            while span < len(spans) and spans[span][1] <= start:
                span += 1
            inside = whole or (span < len(spans) and spans[span][0] <= start)
            if ("comm" if inside else recording.kernel_kind[stream.name[i]]) != kind:
                continue
            if launched_before is not None:
                launch = recording.launch_of(stream.correlation[i])
                if launch is None or launch >= launched_before:
                    continue
            yield start, stream.end[i]

    sources: list[Iterable[Interval]] = [of(key, stream) for key, stream in recording.streams.items()]
    if kind == "comm":
        for spans in (*recording.comm_spans.values(), *map(union, recording.comm_by_thread.values())):
            sources.append([span for span in spans if launched_before is None or span[0] < launched_before])
    return heapq.merge(*sources)


def busy(recording: Recording, kind: str, launched_before: int | None = None) -> Iterator[Interval]:
    """The disjoint time in which the rank does `kind` ("compute", "comm" or "copy")."""
    if recording.device == "gpu":
        return join(_device_intervals(recording, kind, launched_before))
    if kind == "compute":
        threads = [thread for thread in recording.lanes if thread not in recording.comm_threads]
        return join(heapq.merge(*(recording.lane_compute(thread) for thread in threads)))
    if kind == "comm":
        return iter(union(span for spans in recording.comm_by_thread.values() for span in spans))
    return iter(())


def _hta_overlap(recording: Recording) -> float | None:
    """Overlap as Holistic Trace Analysis reports it, to compare with: one union over what was launched before the
    last step, each kernel rounded inward to whole microseconds (which costs short kernels more than long ones).
    It knows no CPU communication; there the same union is taken, without rounding.
    """
    if len(recording.steps) < 2:
        return None
    cutoff = recording.steps[-1].start
    if recording.device == "gpu":

        def rounded(kind: str) -> Iterator[Interval]:
            return join((-(-start // 1000), end // 1000) for start, end in _device_intervals(recording, kind, cutoff))

        comm, compute = list(rounded("comm")), rounded("compute")
    else:
        kept = [(-(1 << 62), cutoff)]
        comm, compute = list(intersect(busy(recording, "comm"), kept)), intersect(busy(recording, "compute"), kept)
    return total(intersect(compute, comm)) / total(comm) if comm else None


def _gap_causes(
    recording: Recording,
    gaps: list[Interval],
    loader: list[Interval],
    copy: list[Interval],
    waits: list[Interval],
    window_end: int,
) -> dict[str, list[Interval]]:
    """Part the time in which neither compute nor communication runs by its cause."""
    parts: dict[str, list[Interval]] = {}
    rest = gaps
    for cause, some in (("copy", copy), ("data loading", loader), ("communication", waits)):
        parts[cause] = list(intersect(rest, some))
        rest = list(subtract(rest, some))
    if recording.device == "cpu":
        parts["host"] = rest
        return parts
    # The device idles because the host hadn't launched the next piece of work yet, or although it had.
    ends = {end for _, end in rest}
    launches: dict[int, int] = {}
    if rest:
        for stream in recording.streams.values():
            for i in range(bisect_left(stream.start, rest[0][1]), bisect_right(stream.start, rest[-1][1])):
                if stream.start[i] in ends:
                    launch = recording.launch_of(stream.correlation[i])
                    if launch is not None:
                        launches[stream.start[i]] = min(launch, launches.get(stream.start[i], launch))
    parts["host"], parts["other"] = [], []
    for start, end in rest:
        issued = end if end == window_end else min(max(launches.get(end, start), start), end)
        if issued > start:
            parts["host"].append((start, issued))
        if end > issued:
            parts["other"].append((issued, end))
    return parts


def _neighbours(recording: Recording, hole: Interval) -> tuple[str, str]:
    """Names of the compute that ends where a hole starts and starts where it ends."""
    before: tuple[int, int] | None = None
    after: tuple[int, int] | None = None
    if recording.device == "cpu":
        for thread, lane in recording.lanes.items():
            if thread not in recording.comm_threads:
                before = max(filter(None, (before, lane.before(hole[0]))), default=None)
                after = min(filter(None, (after, lane.after(hole[1]))), default=None)
    else:
        for stream in recording.streams.values():
            i = bisect_left(stream.start, hole[1]) - 1
            while i >= 0 and (stream.end[i] > hole[0] or recording.kernel_kind[stream.name[i]] != "compute"):
                i -= 1
            if i >= 0:
                before = max(filter(None, (before, (stream.end[i], stream.name[i]))))
            i = bisect_left(stream.start, hole[1])
            while i < len(stream) and recording.kernel_kind[stream.name[i]] != "compute":
                i += 1
            if i < len(stream):
                after = min(filter(None, (after, (stream.start[i], stream.name[i]))))
    return tuple(short(recording.names[found[1]]) if found else "" for found in (before, after))  # type: ignore


def _annotation_at(recording: Recording, t: int) -> str:
    """The innermost of the user's annotations around a time, on the thread that takes the steps."""
    best: tuple[int, int] | None = None
    for start, end, name in recording.annotations:
        if start > t:
            break
        if end > t and (best is None or end - start < best[0]):
            best = (end - start, name)
    return recording.names[best[1]] if best else ""


def _coarse(disjoint: list[Interval], resolution: int) -> list[Interval]:
    """Close gaps too narrow to see; for pictures only."""
    out: list[Interval] = []
    for start, end in disjoint:
        if out and start - out[-1][1] < resolution:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def _overlap_each(some: list[Interval], spans: list[Interval]) -> list[Interval]:
    """The part of a disjoint set inside a few spans, found by bisection."""
    out = []
    for lo, hi in spans:
        i = max(0, bisect_right(some, (lo, lo)) - 1)
        while i < len(some) and some[i][0] < hi:
            if some[i][1] > lo:
                out.append((max(lo, some[i][0]), min(hi, some[i][1])))
            i += 1
    return out


def _pieces(compute: Iterator[Interval], windows: list[Interval]) -> Iterator[tuple[int, Interval, list[Interval]]]:
    """Cut windows into pieces with at most PIECE intervals of compute: yields (which window, piece, compute in it).

    A piece ends where an interval of compute starts, so no stretch without compute is cut in two.
    """
    current = next(compute, None)
    for k, (lo, hi) in enumerate(windows):
        begin = lo
        inside: list[Interval] = []
        while current is not None and current[0] < hi:
            start, end = max(current[0], lo), current[1]
            if end > lo:
                if len(inside) >= PIECE:
                    yield k, (begin, start), inside
                    begin, inside = start, []
                inside.append((start, min(end, hi)))
            if end > hi:
                break
            current = next(compute, None)
        yield k, (begin, hi), inside


def analyse_rank(recording: Recording, top: int = 10, only: range | None = None) -> RankReport:
    """Everything that one rank's trace tells on its own; `only` keeps the steps with these numbers."""
    path = recording.path
    windows = windows_of(recording)
    keep = [k for k, step in enumerate(recording.steps) if only is None or step.number in only]
    if not keep:
        numbers = f"{recording.steps[0].number}-{recording.steps[-1].number}"
        raise TraceError(f"{path}: none of the steps asked for is in it; it has {numbers}")
    notes = list(recording.notes)
    placed, strays = _place(recording, windows)
    comm = list(busy(recording, "comm"))
    kept_windows = [windows[k] for k in keep]
    asked = defaultdict(list)  # collectives by the step that asked for them
    for item in placed:
        asked[item.step].append(item.event)
    in_flight = sorted(placed, key=lambda item: item.event.start, reverse=True)  # next one last
    active: list[Placed] = []
    sent_in, copied_in, loading_in, waiting_in = map(
        Cutter,
        (
            comm,
            busy(recording, "copy"),
            recording.loader,
            union(span for spans in recording.waits.values() for span in spans),
        ),
    )
    steps: list[StepReport] = []
    holes: list[Hole] = []
    for k, piece, compute in _pieces(busy(recording, "compute"), kept_windows):
        step, window = recording.steps[keep[k]], kept_windows[k]
        mine = asked[step.number]
        if len(steps) == k:
            nothing = dict.fromkeys(CAUSES, 0)
            steps.append(StepReport(step.number, *window, step.end - step.start, Split(0, 0, 0, 0), nothing, (0, 0), 0))
        report = steps[k]
        sent = sent_in.take(*piece)
        exposed = list(subtract(sent, compute))
        gaps = list(subtract(subtract([piece], compute), sent))
        cuts = loading_in.take(*piece), copied_in.take(*piece), waiting_in.take(*piece)
        causes = _gap_causes(recording, gaps, *cuts, window[1])
        parts = split(piece, compute, sent)
        report.split = report.split + parts
        for cause, some in causes.items():
            report.idle[cause] += total(some)
        report.idle["communication"] += parts.exposed
        while in_flight and in_flight[-1].event.start < piece[1]:
            active.append(in_flight.pop())
        active = [item for item in active if item.event.end > piece[0]]
        for item in active:
            for span in _overlap_each(exposed, [(item.event.start, item.event.end)]):
                item.exposed_ns.extend(span)
        others = union(
            (max(event.start, piece[0]), min(event.end, piece[1]))
            for event in sorted(mine, key=lambda event: event.start)[:-1]
        )
        hidden, whole = report.hideable
        report.hideable = hidden + total(intersect(others, compute)), whole + total(others)
        if mine:
            end = max(event.end for event in mine)
            before = [stop for start, stop in compute if start < end]
            report.tail = 0 if before else report.tail
            done = before[-1] if before else piece[0]
            report.tail += total(_overlap_each(exposed, [(done, end)])) if done < end else 0
        if len(steps) <= DRAWN_STEPS:
            resolution = (window[1] - window[0]) // DRAWN_SLIVERS
            report.compute = _coarse(report.compute + compute, resolution)
            report.exposed = _coarse(report.exposed + exposed, resolution)
        empty = subtract([piece], compute)
        for start, end in heapq.nlargest(top, empty, key=lambda hole: hole[1] - hole[0]):
            shares = {cause: total(_overlap_each(some, [(start, end)])) for cause, some in causes.items()}
            inside = _overlap_each(exposed, [(start, end)])
            shares["communication"] = shares.get("communication", 0) + total(inside)
            shares = {cause: ns for cause, ns in shares.items() if ns}
            holes.append(Hole(step.number, start, end, shares, "", "", "", "", inside))
        holes = heapq.nlargest(top, holes, key=lambda hole: hole.length)
    for hole in holes:
        hole.before, hole.after = _neighbours(recording, (hole.start, hole.end))
        hole.within = _annotation_at(recording, (hole.start + hole.end) // 2)
        held = [name for start, end, name in recording.syncs if start < hole.end and end >= hole.start]
        hole.sync = recording.names[held[0]] if held else ""
    kept_numbers = {step.number for step in steps}
    if strays:
        notes.append(f"{strays} collectives lie outside every step and are left out")
    crossing = sum(
        1 for item in placed for k in keep if recording.steps[k].number == item.step and item.event.end > windows[k][1]
    )
    if crossing:
        notes.append(f"{crossing} collectives end after their step; each step counts the part inside it")
    unknown = sum(1 for item in placed if item.event.size is None and item.event.kind != "barrier")
    if unknown:
        notes.append(f"{unknown} of {len(placed)} collectives don't say their size (record_shapes=True makes them)")
    late = [(step, window) for step, window in zip(recording.steps, windows, strict=True) if window[1] > step.end]
    if recording.device == "gpu" and late:
        worst = max(window[1] - step.end for step, window in late)
        notes.append(
            f"{len(late)} of {len(windows)} host steps end before their device work (by up to {worst / 1e6:.2f} ms); "
            f"steps are stretched to its end"
        )
    slowdowns, ratio, cost = _slowdowns(recording, comm, kept_windows)
    return RankReport(
        path=path,
        rank=recording.rank if recording.rank is not None else -1,
        world_size=recording.world_size,
        backend=recording.backend,
        device=recording.device,
        host=recording.host,
        base_ns=recording.base_ns,
        events=recording.events,
        json_bytes=recording.json_bytes,
        steps=steps,
        collectives=[item for item in placed if item.step in kept_numbers],
        holes=holes,
        hta_overlap=_hta_overlap(recording),
        slowdowns=slowdowns,
        slowdown=ratio,
        slowdown_ms=cost,
        blind=not comm and (recording.world_size or 1) > 1,
        notes=notes,
    )


def _place(recording: Recording, windows: list[Interval]) -> tuple[list[Placed], int]:
    """Give each collective the step that asked for it; also how many no step asked for."""
    steps = recording.steps
    starts = [step.start for step in steps]
    placed, strays = [], 0
    for event in recording.collectives:
        asked = event.start if event.launch is None else event.launch
        k = bisect_right(starts, asked) - 1
        if k < 0 or (k == len(steps) - 1 and asked >= windows[k][1]):
            strays += 1
        else:
            placed.append(Placed(event, steps[k].number))
    return placed, strays


def _slowdowns(
    recording: Recording, comm: list[Interval], windows: list[Interval]
) -> tuple[list[Slowdown], float | None, float | None]:
    """Compare each operator's median time under communication with its median time alone."""
    if not comm:
        return [], None, None
    starts = [start for start, _ in comm]
    covered = [0, *accumulate(end - start for start, end in comm)]

    def cover(t: int) -> int:
        i = bisect_right(starts, t)
        return covered[i - 1] + min(t, comm[i - 1][1]) - starts[i - 1] if i else 0

    samples: dict[tuple[str, str], Samples] = recording.samples
    if recording.device == "gpu":
        samples = {}
        by_id: dict[int, Samples] = {}
        for key, stream in recording.streams.items():
            if key in recording.comm_streams or key in recording.comm_spans:
                continue
            for i, ident in enumerate(stream.name):
                if recording.kernel_kind[ident] == "compute":
                    by_id.setdefault(ident, Samples()).add(stream.start[i], stream.end[i])
        for ident, kept in by_id.items():
            text = recording.names[ident]
            shape = re.search(r" (\[[\d, ]*\]\[[\d, ]*\])$", text)
            samples[text, shape.group(1) if shape else ""] = kept
    lo, hi = windows[0][0], windows[-1][1]
    out = []
    with_comm = alone = extra = 0.0
    for (name, shape_text), kept in samples.items():
        during, outside = [], []
        for start, end in kept.rows:
            if start < lo or end > hi or end == start:
                continue
            share = (cover(end) - cover(start)) / (end - start)
            if share >= INSIDE:
                during.append((end - start) / 1e3)
            elif share <= OUTSIDE:
                outside.append((end - start) / 1e3)
        if len(during) < 3 or len(outside) < 3:
            continue
        row = Slowdown(short(name), shape_text, median(outside), median(during), len(outside), len(during))
        out.append(row)
        with_comm += row.with_comm_us * len(during)
        alone += row.alone_us * len(during)
        extra += (row.with_comm_us - row.alone_us) * len(during) * kept.stride
    if sum(row.count_with_comm for row in out) < 10:
        return [], None, None
    out.sort(key=lambda row: (row.alone_us - row.with_comm_us) * row.count_with_comm)
    return out, with_comm / alone, extra / 1e3 / len(windows)


# Several ranks -------------------------------------------------------------------------------------------------------


def _compare_ranks(ranks: list[RankReport], problems: list[str]) -> bool:
    """Find out whether ranks can be compared; says why not in `problems`."""
    before = len(problems)
    sizes = {rank.world_size for rank in ranks if rank.world_size}
    if len(sizes) > 1:
        told = ", ".join(f"{rank.path.name} says {rank.world_size}" for rank in ranks)
        problems.append(f"the traces are of jobs of different sizes: {told}")
    elif sizes:
        missing = sorted(set(range(sizes.pop())) - {rank.rank for rank in ranks})
        if missing and len(ranks) > 1:
            names = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            problems.append(
                f"rank{'s' if len(missing) > 1 else ''} {names} of {ranks[0].world_size} missing: waits for peers and "
                f"stragglers can't be told without {'them' if len(missing) > 1 else 'it'}"
            )
    first = [step.number for step in ranks[0].steps]
    for rank in ranks[1:]:
        numbers = [step.number for step in rank.steps]
        if numbers != first:
            problems.append(
                f"steps don't line up: rank {ranks[0].rank} has {_span(first)}, rank {rank.rank} has {_span(numbers)}"
            )
            break
    devices = {rank.device for rank in ranks}
    if len(devices) > 1:
        problems.append("some ranks' traces have GPU kernels and others don't")
    return len(problems) == before


def _span(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}"
    return "steps " + ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else "")


def _in_order(rank: RankReport) -> dict[tuple[int, str], list[Placed]]:
    """A rank's collectives by step and process group: by bucket where every one has its own, else by start."""
    groups: dict[tuple[int, str], list[Placed]] = defaultdict(list)
    for item in rank.collectives:
        if item.event.kind not in ("send", "recv", "send_recv"):
            groups[item.step, item.event.group].append(item)
    for items in groups.values():
        items.sort(key=lambda item: item.event.start)
        if all(item.event.bucket is not None for item in items):
            items.sort(key=lambda item: item.event.bucket or 0)
    return groups


def _describe(event: Collective) -> str:
    size = "of unknown size" if event.size is None else f"of {event.size} bytes"
    bucket = "" if event.bucket is None else f" (bucket {event.bucket})"
    return f"{event.kind} {size}{bucket}"


def _pair(ranks: list[RankReport], problems: list[str]) -> list[list[tuple[RankReport, Placed]]]:
    """Match collectives across ranks; an empty list, and a problem, where they don't match."""
    ordered = {rank.rank: _in_order(rank) for rank in ranks}
    keys = sorted({key for groups in ordered.values() for key in groups})
    pairs = []
    for step, group in keys:
        members = [rank for rank in ranks if (step, group) in ordered[rank.rank]]
        stated = [int(n) for n in re.findall(r"\d+", group)]
        expected = [rank for rank in ranks if rank.rank in stated] if stated and "..." not in group else ranks
        if stated and "..." in group:
            expected = members
        counts = {rank.rank: len(ordered[rank.rank].get((step, group), [])) for rank in expected}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"rank {rank} has {count}" for rank, count in counts.items())
            problems.append(f"unequal numbers of collectives in step {step}: {told}")
            return []
        for i in range(counts[expected[0].rank]):
            same = [(rank, ordered[rank.rank][step, group][i]) for rank in expected]
            one = same[0]
            for other in same[1:]:
                a, b = one[1].event, other[1].event
                if a.kind != b.kind or a.bucket != b.bucket or (a.kind == "all_reduce" and a.size != b.size):
                    problems.append(
                        f"collective {i} of step {step} is {_describe(a)} on rank {one[0].rank} but {_describe(b)} on "
                        f"rank {other[0].rank}: they can't be matched"
                    )
                    return []
            if len(same) > 1:
                pairs.append(same)
    return pairs


def _waits(ranks: list[RankReport], pairs: list[list[tuple[RankReport, Placed]]]) -> list[Arrival]:
    """Fill in waits and transfers, move exposed waiting to the cause "peer", and count who came last."""
    last: dict[int, list[tuple[float, str]]] = {rank.rank: [] for rank in ranks}
    blamed: dict[tuple[int, int], dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    seen = dict.fromkeys(last, 0)
    for same in pairs:
        transfer = min(item.duration for _, item in same)
        for rank, item in same:
            item.transfer, item.wait = transfer, item.duration - transfer
            seen[rank.rank] += 1
        latest = min(same, key=lambda one: one[1].duration)[0].rank
        waited = fmean(item.duration - transfer for rank, item in same if rank.rank != latest) / 1e6
        event = same[0][1].event
        where = f"bucket {event.bucket}" if event.bucket is not None else event.kind
        last[latest].append((waited, f"{where} of step {same[0][1].step}"))
        for rank, item in same:
            if rank.rank != latest:
                span = item.event.start, item.event.end - transfer
                blamed[latest, item.step][rank.rank].append(span)
    for rank in ranks:
        waits = union(
            (item.event.start, item.event.start + item.wait) for item in rank.collectives if item.wait is not None
        )
        exposed_by_step: dict[int, list[Interval]] = defaultdict(list)
        by_number = {step.number: step for step in rank.steps}
        for item in rank.collectives:
            if item.wait:
                waiting = [(item.event.start, item.event.start + item.wait)]
                exposed_by_step[item.step] += _overlap_each(union(item.exposed), waiting)
        for number, some in exposed_by_step.items():
            step = by_number[number]
            inside = list(intersect(union(some), [(step.start, step.end)]))
            step.idle["peer"] = total(inside)
            step.idle["communication"] -= total(inside)
        for hole in rank.holes:
            moved = total(intersect(hole.comm, waits))
            if moved:
                hole.parts["peer"] = moved
                hole.parts["communication"] -= moved
    arrivals = []
    for number, costs in last.items():
        # Collectives in flight together are waited for at once: their waits are joined, not added.
        by_step = [
            sum(total(union(spans)) for spans in blamed[number, step.number].values()) / 1e6 / (len(ranks) - 1)
            for step in ranks[0].steps
        ]
        worst_ms, worst_at = max(costs, default=(0.0, ""))
        mean = fmean(ms for ms, _ in costs) if costs else 0.0
        arrivals.append(Arrival(number, len(costs), seen[number], mean, fmean(by_step), worst_ms, worst_at, by_step))
    return arrivals


def _straggler(ranks: list[RankReport], arrivals: list[Arrival], step_ms: float) -> str | None:
    """Name the rank that the others wait for, where that costs more than 1 % of the step and is more than chance.

    Collectives of a step aren't independent (who is late for the first is late for all), steps nearly are: the rank
    must cost more than each other rank in the mean over steps, by Student's t at 95 %; or one of its stalls must dwarf
    every wait that the others caused.
    """
    worst, *others = sorted(arrivals, key=lambda arrival: -arrival.cost_ms)
    if worst.cost_ms < 0.01 * step_ms:
        return None
    n = len(worst.by_step)
    usual = n > 1
    for other in others:
        more = [a - b for a, b in zip(worst.by_step, other.by_step, strict=True)]
        usual = usual and fmean(more) > t_95(n) * stdev(more) / math.sqrt(n)
    stall = worst.worst_ms > max(0.1 * step_ms, 3 * max(other.worst_ms for other in others))
    if not usual and not stall:
        return None
    slow = next(rank for rank in ranks if rank.rank == worst.rank)
    rest = [rank for rank in ranks if rank.rank != worst.rank]

    def mean(of: list[RankReport], metric: str) -> float:
        return fmean(METRICS[metric](step) for rank in of for step in rank.steps)

    metrics = ["compute_ms", "idle_data_loading_ms", "idle_copy_ms", "idle_host_ms", "idle_other_ms"]
    why = {metric: mean([slow], metric) - mean(rest, metric) for metric in metrics}
    metric = max(why, key=lambda one: why[one])
    words = {"compute_ms": "computing", "idle_data_loading_ms": "loading data", "idle_copy_ms": "copying memory"}
    words |= {"idle_host_ms": "in host code between operators", "idle_other_ms": "between launch and start"}
    reason = ""
    if why[metric] > 0.25 * worst.cost_ms:
        reason = f"; it spends {why[metric]:.1f} ms a step more than the others {words[metric]}"
    return (
        f"rank {worst.rank} arrives last at {worst.last} of {worst.of} collectives and costs the others "
        f"{worst.cost_ms:.1f} ms a step (at most {worst.worst_ms:.1f} ms, at {worst.worst_at}){reason}"
    )


def _rows(ranks: list[RankReport]) -> list[Row]:
    """Fold collectives over steps and ranks: by bucket, by place in the step, or by kind and size."""
    shapes = {
        (rank.rank, step.number): [
            (item.event.kind, item.event.size, item.event.bucket)
            for item in sorted(
                (item for item in rank.collectives if item.step == step.number), key=lambda item: item.event.start
            )
        ]
        for rank in ranks
        for step in rank.steps
    }
    every = list(shapes.values())
    by_bucket = all(bucket is not None for shape in every for _, _, bucket in shape)
    by_place = all([one[:2] for one in shape] == [one[:2] for one in every[0]] for shape in every)
    table: dict[tuple[object, ...], list[tuple[RankReport, Placed]]] = defaultdict(list)
    for rank in ranks:
        places: dict[int, int] = defaultdict(int)
        for item in sorted(rank.collectives, key=lambda item: item.event.start):
            place = places[item.step]
            places[item.step] += 1
            event = item.event
            if by_bucket:
                key: tuple[object, ...] = (event.bucket, event.kind, event.size)
            elif by_place:
                key = (place, event.kind, event.size)
            else:
                key = (event.kind, event.size or 0)
            table[key].append((rank, item))
    starts = {(rank.rank, step.number): step.start for rank in ranks for step in rank.steps}
    steps = sum(len(rank.steps) for rank in ranks)
    rows = []
    for key, items in sorted(table.items(), key=lambda pair: str(pair[0]) if not by_bucket and not by_place else ""):
        event = items[0][1].event
        waits = [item.wait for _, item in items if item.wait is not None]
        transfers = [item.transfer for _, item in items if item.transfer is not None]
        label = f"bucket {event.bucket}" if by_bucket else f"{key[0]}" if by_place else event.kind
        whole = len(waits) == len(items)
        rows.append(
            Row(
                label=label,
                kind=event.kind,
                size=event.size,
                dtype=event.dtype,
                group_size=event.group_size,
                per_step=len(items) / steps,
                offset_ms=fmean(item.event.start - starts[rank.rank, item.step] for rank, item in items) / 1e6,
                duration_ms=fmean(item.duration for _, item in items) / 1e6,
                transfer_ms=fmean(transfers) / 1e6 if whole else None,
                wait_ms=fmean(waits) / 1e6 if whole else None,
                exposed_ms=sum(item.exposed_total for _, item in items) / 1e6 / steps,
                duration_total_ms=sum(item.duration for _, item in items) / 1e6 / steps,
            )
        )
    return sorted(rows, key=lambda row: row.offset_ms) if by_bucket or by_place else rows


def number_ranks(ranks: list[RankReport], notes: list[str]) -> None:
    """Fill in rank numbers that the files don't give, from their names or their order; refuse one given twice."""
    if any(rank.rank < 0 for rank in ranks):
        found = [re.search(r"rank[_-]?(\d+)|_(\d+)\.\d*\.?pt\.trace", rank.path.name) for rank in ranks]
        if all(found) and len({match.group(0) for match in found if match}) == len(ranks):
            for rank, match in zip(ranks, found, strict=True):
                if match:
                    rank.rank = int(match.group(1) or match.group(2))
            source = "file names"
        else:
            for number, rank in enumerate(ranks):
                rank.rank = number
            source = "the order of the files"
        notes.append(f"the traces don't say which rank they are (no distributedInfo); numbered by {source}")
    by_number: dict[int, RankReport] = {}
    for rank in ranks:
        if rank.rank in by_number:
            raise TraceError(
                f"rank {rank.rank} is there twice: {by_number[rank.rank].path} and {rank.path}; give one profiling "
                f"cycle of one run"
            )
        by_number[rank.rank] = rank
    ranks.sort(key=lambda rank: rank.rank)


def analyse_run(
    name: str, paths: list[Path], top: int = 10, only: range | None = None, step_name: str = "ProfilerStep"
) -> RunReport:
    """Analyse one run's traces, one rank after the other; raises TraceError for a file that can't be used."""
    notes: list[str] = []
    problems: list[str] = []
    ranks = []
    for path in paths:
        recording = collect(path, step_name)
        try:
            ranks.append(analyse_rank(recording, top, only))
        finally:
            recording.close()
    number_ranks(ranks, notes)
    arrivals: list[Arrival] = []
    straggler = None
    for rank in ranks:
        if rank.blind:
            problems.append(
                f"rank {rank.rank}: no communication in its trace, though the job has {rank.world_size} ranks, so "
                f"overlap, exposed communication and gap can't be told apart. On a CPU, profile with "
                f"experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)"
            )
    if len(ranks) > 1:
        if _compare_ranks(ranks, problems):
            pairs = _pair(ranks, problems)
            if pairs:
                arrivals = _waits(ranks, pairs)
    elif (ranks[0].world_size or 1) > 1:
        notes.append(
            f"one of {ranks[0].world_size} ranks: communication times include waiting for peers; "
            f"give all ranks' traces to tell them apart"
        )
    run = RunReport(name, ranks, _rows(ranks), arrivals, straggler, problems, notes)
    if arrivals:
        run.straggler = _straggler(ranks, arrivals, run.mean("step_ms"))
    for rank in ranks:
        run.notes += [f"rank {rank.rank}: {note}" for note in rank.notes]
    return run


# Two runs ------------------------------------------------------------------------------------------------------------


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


def compare(before: RunReport, after: RunReport) -> list[Difference]:
    """How each metric moved from one run to another, with what the spread over steps lets one say."""
    out = []
    for metric in METRICS:
        if (before.blind or after.blind) and metric not in ("step_ms", "compute_ms"):
            continue
        a, b = before.series(metric), after.series(metric)
        margin = None
        if len(a) > 1 and len(b) > 1:
            margin = t_95(min(len(a), len(b))) * math.sqrt(stdev(a) ** 2 / len(a) + stdev(b) ** 2 / len(b))
        out.append(Difference(metric, before.mean(metric), after.mean(metric), margin))
    return out
