"""A run of several ranks: match their collectives, tell waiting from transfer, name stragglers, compare runs.

Across ranks a collective is the same one by step, process group, bucket and order; kinds and sizes must agree. The
rank that arrives last waits least, so each rank's wait is its duration minus the shortest one: no clocks are compared.
What can't be matched is refused by name, and what each rank says on its own still stands.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from ddpx.trace.collect import Collective, collect
from ddpx.trace.intervals import Interval, intersect, total, union
from ddpx.trace.rank import analyse_rank, parts_inside
from ddpx.trace.rank import busy as busy
from ddpx.trace.read import TraceError
from ddpx.trace.result import METRICS, Arrival, Difference, Placed, RankReport, Row, RunReport, t_95


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
                exposed_by_step[item.step] += parts_inside(union(item.exposed), waiting)
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
