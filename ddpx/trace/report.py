"""The report as text for a terminal and as a JSON-ready dict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from ddpx.trace.advise import advise, size_text
from ddpx.trace.result import (
    CAUSE_WORDS,
    CAUSES,
    METRICS,
    Difference,
    Hole,
    RankReport,
    Row,
    RunReport,
    StepReport,
    t_95,
)

BAR = 60
BAR_MARKS = (("compute_only_ms", "█"), ("overlapped_ms", "▓"), ("exposed_ms", "▒"), ("gap_ms", "·"))
SHOWN_STEPS = 12
SHOWN_ROWS = 24
METRIC_WORDS = {
    "step_ms": "step",
    "compute_only_ms": "compute only",
    "overlapped_ms": "overlapped",
    "exposed_ms": "exposed communication",
    "gap_ms": "gap",
    "compute_ms": "all compute",
    "comm_ms": "all communication",
    "idle_ms": "without computation",
    "ideal_ms": "step if all that fits were hidden",
}


def metric_words(metric: str) -> str:
    """A metric's name for readers."""
    if metric not in METRIC_WORDS:
        return "  of it " + CAUSE_WORDS[metric[5:-3].replace("_", " ")]
    return METRIC_WORDS[metric]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns padded to line up; the first `left` columns are text, the others numbers."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]


def percent(share: float | None, digits: int = 1) -> str:
    return "n/a" if share is None else f"{100 * share:.{digits}f} %"


def bandwidth(bytes_per_s: float | None) -> str:
    """GB/s = 10^9 bytes a second, with three digits."""
    return "n/a" if bytes_per_s is None else f"{bytes_per_s / 1e9:#.3g}"


def milliseconds(ms: float | None) -> str:
    return "n/a" if ms is None else f"{ms:.2f}" if ms < 1000 else f"{ms:.0f}"


def headline(run: RunReport) -> str:
    """Where the time goes, in one sentence."""
    if run.blind:
        return (
            f"A step takes {run.mean('step_ms'):.1f} ms, {run.mean('compute_ms'):.1f} ms of it computing; the traces "
            f"don't show the communication."
        )
    step, exposed, gap = run.mean("step_ms"), run.mean("exposed_ms"), run.mean("gap_ms")
    compute = run.mean("compute_ms")
    sent = f"{exposed:.1f} ms ({percent(exposed / step, 0)}) of exposed communication, waits for peers included"
    return (
        f"A step takes {step:.1f} ms: {compute:.1f} ms ({percent(compute / step, 0)}) computing, "
        f"{sent if run.mean('comm_ms') else 'no communication'}, "
        f"{gap:.1f} ms ({percent(gap / step, 0)}) with nothing running."
    )


def subject(run: RunReport) -> str:
    """What was read: ranks, device, backend, steps."""
    first = run.ranks[0]
    whole = f" of {first.world_size}" if first.world_size and first.world_size != len(run.ranks) else ""
    ranks = f"{len(run.ranks)}{whole} rank" + ("s" if len(run.ranks) > 1 or whole else "")
    numbers = run.step_numbers
    steps = f"steps {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}"
    backend = f", {first.backend}" if first.backend else ""
    return f"{ranks}, {first.device.upper()}{backend}, {steps}"


def overlap_of(step: StepReport) -> float | None:
    comm = step.split.overlapped + step.split.exposed
    return step.split.overlapped / comm if comm else None


def idle_causes(run: RunReport) -> list[tuple[str, float]]:
    """(cause in words, ms a step) of the time without compute, largest first, zeros left out."""
    means = [(CAUSE_WORDS[cause], run.mean(f"idle_{cause.replace(' ', '_')}_ms")) for cause in CAUSES]
    return sorted((pair for pair in means if pair[1] > 0.0005), key=lambda pair: -pair[1])


def longest_holes(run: RunReport, top: int) -> list[tuple[RankReport, Hole]]:
    every = [(rank, hole) for rank in run.ranks for hole in rank.holes]
    return sorted(every, key=lambda pair: -pair[1].length)[:top]


def hole_text(hole: Hole) -> str:
    """Its causes in words, with shares where more than one matters."""
    ranked = sorted(hole.parts.items(), key=lambda part: -part[1])
    named = [(CAUSE_WORDS[cause], ns / hole.length) for cause, ns in ranked if ns >= 0.05 * hole.length]
    return ", ".join(words if len(named) == 1 else f"{words} {percent(share, 0)}" for words, share in named)


def between(hole: Hole) -> str:
    inside = f" in {hole.within}" if hole.within else ""
    held = f", after {hole.sync}" if hole.sync else ""
    return f"{hole.before or 'start'} → {hole.after or 'end'}{inside}{held}"


def transfer_known(rows: list[Row]) -> bool:
    return bool(rows) and all(row.transfer_ms is not None for row in rows)


def collective_cells(run: RunReport, known: bool) -> list[list[str]]:
    """The table of collectives, the most exposed of them in order of time; `known`: with transfer and wait apart."""
    shown = sorted(run.rows, key=lambda row: -row.exposed_ms)[:SHOWN_ROWS]
    return [
        [
            row.label,
            row.kind,
            "n/a" if row.size is None else size_text(row.size),
            f"{row.per_step:g}" if row.per_step == int(row.per_step) else f"{row.per_step:.2f}",
            f"{row.offset_ms:.2f}",
            milliseconds(row.duration_ms),
            *([milliseconds(row.transfer_ms), milliseconds(row.wait_ms)] if known else []),
            bandwidth(row.algbw),
            bandwidth(row.busbw),
            milliseconds(row.exposed_ms),
        ]
        for row in run.rows
        if row in shown
    ]


def part(rank: RankReport, step: StepReport, metric: str) -> float | None:
    """One step's metric in ms; None where the trace can't tell."""
    return None if rank.blind and metric not in ("step_ms", "compute_ms") else METRICS[metric](step)


def bar(run: RunReport) -> str:
    """The step in one line of BAR characters."""
    step = run.mean("step_ms")
    edges, done = [0], 0.0
    for metric, _ in BAR_MARKS:
        done += run.mean(metric)
        edges.append(round(BAR * done / step))
    return "".join(mark * (edges[i + 1] - edges[i]) for i, (_, mark) in enumerate(BAR_MARKS))


def text(run: RunReport, top: int = 10) -> str:
    """The whole report of one run."""
    lines = [f"{run.name}: {subject(run)}", "", f"  {headline(run)}"]
    if not run.blind:
        lines += [f"  {bar(run)}", "  " + "   ".join(f"{mark} {METRIC_WORDS[metric]}" for metric, mark in BAR_MARKS)]
    overlap, hideable = run.ratio("overlap"), run.ratio("hideable")
    if overlap is not None:
        lines += [
            "",
            f"  overlap {percent(overlap)}: the part of communication that runs under computation"
            + (f" ({percent(hideable)} leaving out each step's last collective)" if hideable is not None else ""),
            f"  if all that fits were hidden, a step would take {run.mean('ideal_ms'):.1f} ms",
        ]
    hta = [(rank.rank, rank.hta_overlap) for rank in run.ranks if rank.hta_overlap is not None]
    if hta:
        told = ", ".join(f"rank {rank} {percent(value, 2)}" for rank, value in hta[:8])
        lines.append(f"  overlap by HTA's definition (last step dropped): {told}")
    if not run.blind and (causes := idle_causes(run)):
        lines.append("  without computation, ms a step: " + ", ".join(f"{words} {ms:.2f}" for words, ms in causes))

    lines += ["", "steps, ms (compute only + overlapped + exposed + gap = step)"]
    rows = []
    for rank in run.ranks:
        for step in rank.steps[:SHOWN_STEPS]:
            parts = [milliseconds(part(rank, step, metric)) for metric in ("step_ms", *(m for m, _ in BAR_MARKS))]
            rows.append([str(rank.rank), str(step.number), *parts, percent(overlap_of(step))])
        if len(rank.steps) > 1 and not rank.blind:
            means = [
                milliseconds(fmean(METRICS[metric](step) for step in rank.steps))
                for metric in ("step_ms", *(m for m, _ in BAR_MARKS))
            ]
            hidden = sum(step.split.overlapped for step in rank.steps)
            comm = hidden + sum(step.split.exposed for step in rank.steps)
            rows.append(
                [str(rank.rank), f"mean of {len(rank.steps)}", *means, percent(hidden / comm if comm else None)]
            )
    lines += table(["rank", "step", "step ms", "compute only", "overlapped", "exposed", "gap", "overlap"], rows, 2)
    if any(len(rank.steps) > SHOWN_STEPS for rank in run.ranks):
        lines.append(f"  (the first {SHOWN_STEPS} steps of each rank; --json has all)")

    if not run.blind and (holes := longest_holes(run, top)):
        lines += ["", "longest stretches without computation"]
        rows = [
            [str(rank.rank), str(hole.step), milliseconds(hole.length / 1e6), hole_text(hole), between(hole)]
            for rank, hole in holes
        ]
        # numbers first, then words: pad by hand what `table` would right-align
        widths = [max(len(row[3]) for row in rows), max(len(row[4]) for row in rows)]
        rows = [[*row[:3], row[3].ljust(widths[0]), row[4].ljust(widths[1])] for row in rows]
        lines += table(["rank", "step", "ms", "cause".ljust(widths[0]), "between".ljust(widths[1])], rows, 0)

    if run.rows:
        known = transfer_known(run.rows)
        lines += ["", "collectives, mean over steps" + (" and ranks" if len(run.ranks) > 1 else "")]
        if not known:
            lines.append("  (ms and bandwidth include waiting for peers: the traces don't allow telling it apart)")
        rows = collective_cells(run, known)
        split_head = ["transfer ms", "wait ms"] if known else []
        head = ["which", "kind", "bytes", "a step", "starts at ms", "ms", *split_head, "algbw GB/s", "busbw GB/s"]
        lines += table([*head, "exposed ms/step"], rows, 2)
        if len(run.rows) > SHOWN_ROWS:
            lines.append(f"  (the {SHOWN_ROWS} most exposed of {len(run.rows)}; --json has all)")

    if run.arrivals:
        lines += ["", "who arrives last"]
        rows = [
            [
                str(one.rank),
                f"{one.last} of {one.of}",
                milliseconds(one.others_wait_ms),
                milliseconds(one.cost_ms),
                milliseconds(one.worst_ms),
                one.worst_at or "-",
            ]
            for one in run.arrivals
        ]
        lines += table(["rank", "last at", "others wait ms", "ms a step", "at most ms", "where"], rows, 1)
        lines.append(f"  {run.straggler}" if run.straggler else "  no straggler beyond chance")

    slow = [(rank, row) for rank in run.ranks for row in rank.slowdowns[:3]]
    ratios = [(rank.rank, rank.slowdown, rank.slowdown_ms) for rank in run.ranks if rank.slowdown is not None]
    if ratios:
        lines += ["", "computation while communication runs, against alone (medians of the same operator and shape)"]
        lines += [f"  rank {rank}: {ratio:.2f} times as long, {cost:.2f} ms a step" for rank, ratio, cost in ratios]
        rows = [
            [
                str(rank.rank),
                f"{row.name} {row.shape}"[:70],
                f"{row.alone_us:.0f}",
                f"{row.with_comm_us:.0f}",
                f"{row.ratio:.2f}",
                f"{row.count_alone}, {row.count_with_comm}",
            ]
            for rank, row in slow
        ]
        lines += table(["rank", "operator", "alone µs", "with µs", "ratio", "samples"], rows, 2)
    elif run.rows:
        lines += ["", "slowdown under communication: n/a (too few operators ran both with and without it)"]

    if found := advise(run):
        lines += ["", "what to change"]
        for number, one in enumerate(found, 1):
            lines += [f"  {number}. {one.sentence}", f"     → {one.change}"]
    lines += [""] + [f"  note: {note}" for note in run.notes] if run.notes else []
    lines += [""] + [f"  NOT REPORTED: {problem}" for problem in run.problems] if run.problems else []
    return "\n".join(lines)


def difference_text(before: RunReport, after: RunReport, differences: list[Difference]) -> str:
    """Two runs side by side."""
    rows = []
    for one in differences:
        if one.metric.startswith("idle_") and max(one.before, one.after) < 0.005:
            continue
        words = metric_words(one.metric)
        sure = {None: "one step: no spread", True: "", False: "within noise"}[one.is_clear]
        relative = f"{one.delta / one.before:+.0%}" if one.before > 0.005 else "n/a"
        error = "n/a" if one.margin is None else f"{one.margin:.2f}"
        rows.append([words, f"{one.before:.2f}", f"{one.after:.2f}", f"{one.delta:+.2f}", error, relative, sure])
    lines = [f"from {before.name} to {after.name}, ms a step (mean over steps and ranks)"]
    lines += table(["", "before", "after", "change", "± (95 %)", "%", ""], rows)
    a, b = before.ratio("overlap"), after.ratio("overlap")
    lines.append(f"  overlap {percent(a)} → {percent(b)}")
    for (label, kind), (row, other) in matched_rows(before, after).items():
        lines.append(
            f"  {label} ({kind}): {milliseconds(row.bandwidth_ms)} → {milliseconds(other.bandwidth_ms)} ms, "
            f"exposed {milliseconds(row.exposed_ms)} → {milliseconds(other.exposed_ms)} ms a step"
        )
    return "\n".join(lines)


def matched_rows(before: RunReport, after: RunReport) -> dict[tuple[str, str], tuple[Row, Row]]:
    """Collectives that both runs have, by label, kind and size; empty where buckets were cut differently."""
    first = {(row.label, row.kind, row.size): row for row in before.rows}
    second = {(row.label, row.kind, row.size): row for row in after.rows}
    if first.keys() != second.keys() or len(first) > SHOWN_ROWS:
        return {}
    return {(key[0], key[1]): (row, second[key]) for key, row in first.items()}


def side_by_side(runs: list[RunReport]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table with a column a run: mean ms a step, ± its 95 % margin where steps allow."""
    rows = []
    for metric in METRICS:
        if metric.startswith("idle_") and all(run.blind or run.mean(metric) < 0.005 for run in runs):
            continue
        cells = [metric_words(metric)]
        for run in runs:
            if run.blind and metric not in ("step_ms", "compute_ms"):
                cells.append("n/a")
                continue
            series = run.series(metric)
            error = f" ± {t_95(len(series)) * stdev(series) / math.sqrt(len(series)):.2f}" if len(series) > 1 else ""
            cells.append(f"{run.mean(metric):.2f}{error}")
        rows.append(cells)
    rows.append(["overlap", *("n/a" if run.blind else percent(run.ratio("overlap")) for run in runs)])
    return ["ms a step", *(run.name for run in runs)], rows


def side_by_side_text(runs: list[RunReport]) -> str:
    return "\n".join(["side by side (± what chance makes of it, at 95 %)", *table(*side_by_side(runs))])


# JSON ----------------------------------------------------------------------------------------------------------------


def run_dict(run: RunReport) -> dict[str, Any]:
    """Everything known of a run; times in ms, bandwidth in bytes a second, None where the traces can't tell."""
    return {
        "name": run.name,
        "headline": headline(run),
        "world_size": run.ranks[0].world_size,
        "device": run.ranks[0].device,
        "backend": run.ranks[0].backend,
        "mean": {
            metric: None if run.blind and metric not in ("step_ms", "compute_ms") else run.mean(metric)
            for metric in METRICS
        },
        "overlap": run.ratio("overlap"),
        "overlap_without_last_collective": run.ratio("hideable"),
        "ranks": [_rank_dict(rank) for rank in run.ranks],
        "collectives": [
            {
                "label": row.label,
                "kind": row.kind,
                "bytes": row.size,
                "dtype": row.dtype,
                "per_step": row.per_step,
                "starts_at_ms": row.offset_ms,
                "duration_ms": row.duration_ms,
                "transfer_ms": row.transfer_ms,
                "wait_ms": row.wait_ms,
                "algbw_bytes_per_s": row.algbw,
                "busbw_bytes_per_s": row.busbw,
                "bandwidth_includes_waiting": row.transfer_ms is None,
                "exposed_ms_per_step": row.exposed_ms,
            }
            for row in run.rows
        ],
        "stragglers": [
            {
                "rank": one.rank,
                "last": one.last,
                "of": one.of,
                "others_wait_ms": one.others_wait_ms,
                "cost_ms_per_step": one.cost_ms,
                "worst_ms": one.worst_ms,
                "worst_at": one.worst_at,
            }
            for one in run.arrivals
        ],
        "straggler": run.straggler,
        "advice": [
            {"sentence": one.sentence, "change": one.change, "saves_ms": one.saves_ms, "error_ms": one.error_ms}
            for one in advise(run)
        ],
        "problems": run.problems,
        "notes": run.notes,
    }


def _rank_dict(rank: RankReport) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "file": rank.path.name,
        "events": rank.events,
        "overlap_hta": rank.hta_overlap,
        "slowdown": rank.slowdown,
        "slowdown_ms_per_step": rank.slowdown_ms,
        "steps": [
            {
                "step": step.number,
                "step_ms": (step.end - step.start) / 1e6,
                "host_step_ms": step.host / 1e6,
                **{metric: part(rank, step, metric) for metric, _ in BAR_MARKS},
                "overlap": overlap_of(step),
                "exposed_after_last_compute_ms": None if rank.blind else step.tail / 1e6,
                "idle_by_cause_ms": None if rank.blind else {cause: ns / 1e6 for cause, ns in step.idle.items()},
            }
            for step in rank.steps
        ],
        "longest_gaps": [
            {
                "step": hole.step,
                "at_ms": (hole.start - next(step.start for step in rank.steps if step.number == hole.step)) / 1e6,
                "ms": hole.length / 1e6,
                "cause": hole.cause,
                "causes_ms": {cause: ns / 1e6 for cause, ns in hole.parts.items()},
                "before": hole.before,
                "after": hole.after,
                "within": hole.within,
                "host_was_in": hole.sync,
            }
            for hole in ([] if rank.blind else rank.holes)
        ],
        "collectives": [
            {
                "step": item.step,
                "kind": item.event.kind,
                "bucket": item.event.bucket,
                "bytes": item.event.size,
                "duration_ms": item.duration / 1e6,
                "wait_ms": None if item.wait is None else item.wait / 1e6,
                "exposed_ms": item.exposed_total / 1e6,
                "where": item.event.where,
            }
            for item in rank.collectives
        ],
        "slowdowns": [
            {
                "operator": row.name,
                "shape": row.shape,
                "alone_us": row.alone_us,
                "with_communication_us": row.with_comm_us,
                "samples": [row.count_alone, row.count_with_comm],
            }
            for row in rank.slowdowns
        ],
    }


def difference_dict(before: RunReport, after: RunReport, differences: list[Difference]) -> dict[str, Any]:
    return {
        "before": before.name,
        "after": after.name,
        "metrics": {
            one.metric: {"before": one.before, "after": one.after, "change": one.delta, "margin_95": one.margin}
            for one in differences
        },
        "overlap": [before.ratio("overlap"), after.ratio("overlap")],
    }
