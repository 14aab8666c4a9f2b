"""One rank's trace, step by step: split the time, find causes, place collectives, measure slowdown.

Each step splits into compute-only, overlapped, exposed communication and gap, which add up to the step exactly. A step
is the host's ProfilerStep; on a GPU it ends when both the host and everything it launched are done, and the next begins
there, so work that runs after its host step is still its own.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from statistics import median

from ddpx.trace.collect import Recording
from ddpx.trace.intervals import Cutter, Interval, Split, intersect, join, split, subtract, total, union
from ddpx.trace.lanes import Samples, Stream
from ddpx.trace.read import TraceError
from ddpx.trace.result import CAUSES, Hole, Placed, RankReport, Slowdown, StepReport

PIECE = 20_000  # intervals of compute held at a time
DRAWN_STEPS = 8
DRAWN_SLIVERS = 6000  # finest detail kept for pictures: a step's length over this
INSIDE, OUTSIDE = 0.9, 0.05  # share of an operator under communication that counts as with / without it


def short(name: str) -> str:
    """A kernel's or operator's name without template and call arguments."""
    name = re.sub(r" \[[\d, ]*\]\[[\d, ]*\]$", "", name)
    name = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    name = name.removeprefix("autograd::engine::evaluate_function: ").strip()
    return name if len(name) <= 60 else name[:59] + "…"


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


def parts_inside(some: list[Interval], spans: list[Interval]) -> list[Interval]:
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
            for span in parts_inside(exposed, [(item.event.start, item.event.end)]):
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
            report.tail += total(parts_inside(exposed, [(done, end)])) if done < end else 0
        if len(steps) <= DRAWN_STEPS:
            resolution = (window[1] - window[0]) // DRAWN_SLIVERS
            report.compute = _coarse(report.compute + compute, resolution)
            report.exposed = _coarse(report.exposed + exposed, resolution)
        empty = subtract([piece], compute)
        for start, end in heapq.nlargest(top, empty, key=lambda hole: hole[1] - hole[0]):
            shares = {cause: total(parts_inside(some, [(start, end)])) for cause, some in causes.items()}
            inside = parts_inside(exposed, [(start, end)])
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
        blind=not comm and (recording.world_size or 1) > 1 and not recording.is_local,
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
