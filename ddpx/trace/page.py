"""One HTML page that explains a run: opens from disk, needs no network, follows light and dark.

Pictures are inline SVG in units of microseconds, drawn here, so they are there without scripts; the script only moves
an SVG's viewBox to zoom and looks times up for the tooltip.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from ddpx.trace.advise import advise, size_text
from ddpx.trace.draw import CLASS_WORDS, CLASSES, COLOURS, DRAWN_RANKS, drawn_steps, make_up, step_lanes
from ddpx.trace.intervals import Interval, subtract
from ddpx.trace.report import (
    between,
    collective_cells,
    headline,
    hole_text,
    idle_causes,
    longest_holes,
    metric_words,
    milliseconds,
    overlap_of,
    part,
    percent,
    side_by_side,
    subject,
    transfer_known,
)
from ddpx.trace.result import Difference, Placed, RankReport, RunReport

WIDTH, LABELS = 1160, 132  # of the timeline, in CSS pixels at full width; LABELS is the column left of it
LANE, BARS_HEIGHT = 26, 26


def page(runs: list[RunReport], pairs: list[tuple[RunReport, RunReport, list[Difference]]]) -> str:
    """The page as text; `pairs` are the comparisons (before, after, differences)."""
    names = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    colours = "".join(
        f"{selector}{{{''.join(f'--{name}:{value};' for name, value in COLOURS[dark].items())}"
        f"{'color-scheme:dark;' + DARK if dark else 'color-scheme:light;' + LIGHT}}}{close}"
        for selector, dark, close in (
            (":root", False, ""),
            ("@media(prefers-color-scheme:dark){:root", True, "}"),
            (':root[data-theme="light"]', False, ""),
            (':root[data-theme="dark"]', True, ""),
        )
    )
    body = [
        f"<header><h1>Where the time of a training step goes: {escape(names)}</h1>"
        '<button id="theme" type="button">light / dark</button></header>',
        *(f'<p class="headline">{escape(_told(run, runs))}</p>' for run in runs if len(runs) < 3),
        _bars(runs),
        _legend(runs),
    ]
    if len(runs) > 2:
        head, rows = side_by_side(runs)
        note = "Means over steps and ranks, ± what chance makes of them at 95 %."
        body.append(_table("Side by side", head, rows, [0], note))
    else:
        body += [_difference(*pair) for pair in pairs]
    data = []
    for index, run in enumerate(runs):
        section, numbers = _run(run, index, len(runs) > 1)
        body.append(section)
        data.append(numbers)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)}: where the time goes</title><style>{colours}{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main>\n"
        f"<script>const RUNS={_script_json(data)};\n{SCRIPT}</script></body></html>\n"
    )


def _told(run: RunReport, runs: list[RunReport]) -> str:
    return headline(run) if len(runs) == 1 else f"{run.name}: {headline(run)}"


def _script_json(data: object) -> str:
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _legend(runs: list[RunReport]) -> str:
    present = [name for name in CLASSES if any(make_up(run, run.ranks).get(name) for run in runs)]
    items = "".join(f'<li><i style="background:var(--{name})"></i>{CLASS_WORDS[name]}</li>' for name in present)
    return f'<ul class="legend">{items}</ul>'


def _bars(runs: list[RunReport]) -> str:
    """Stacked bars, one a rank, on one scale."""
    rows = [(run, rank) for run in runs for rank in run.ranks[:DRAWN_RANKS]]
    longest = max(sum(make_up(run, [rank]).values()) for run, rank in rows)
    names = [f"rank {rank.rank}" if len(runs) == 1 else f"{run.name}, rank {rank.rank}" for run, rank in rows]
    margin = max(LABELS, min(300, 7 * max(map(len, names)) + 16))
    scale = (WIDTH - margin - 80) / longest
    out = []
    for i, (run, rank) in enumerate(rows):
        whole = sum(make_up(run, [rank]).values())
        y = i * (BARS_HEIGHT + 8)
        out.append(f'<text x="{margin - 8}" y="{y + 18}" text-anchor="end">{escape(names[i])}</text>')
        x = float(margin)
        for name, ms in make_up(run, [rank]).items():
            width = ms * scale
            if width <= 0:
                continue
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{BARS_HEIGHT}" fill="var(--{name})">'
                f"<title>{CLASS_WORDS[name]}: {ms:.2f} ms a step</title></rect>"
            )
            if width > 40:
                out.append(
                    f'<text class="on {name}" x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle">{ms:.1f}</text>'
                )
            x += width
        out.append(f'<text x="{x + 8:.1f}" y="{y + 18}">{whole:.1f} ms</text>')
    height = len(rows) * (BARS_HEIGHT + 8)
    left_out = sum(max(0, len(run.ranks) - DRAWN_RANKS) for run in runs)
    more = f"<p>{left_out} more ranks are in the tables.</p>" if left_out else ""
    return (
        "<h2>A step, in milliseconds (mean over steps)</h2>"
        f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" role="img">{"".join(out)}</svg>{more}'
    )


# One run -------------------------------------------------------------------------------------------------------------


def _run(run: RunReport, index: int, several: bool) -> tuple[str, dict[str, object]]:
    parts = [f"<section><h2>{escape(run.name)}</h2>" if several else "<section>"]
    parts.append(f'<p class="subject">{escape(subject(run))}</p>')
    if several:
        parts.append(f"<p>{escape(headline(run))}</p>")
    parts += [f'<p class="problem"><b>Not reported:</b> {escape(problem)}</p>' for problem in run.problems]
    overlap, hideable = run.ratio("overlap"), run.ratio("hideable")
    if overlap is not None and not run.blind:
        without = f" ({percent(hideable)} without each step's last collective)" if hideable is not None else ""
        hta = [rank.hta_overlap for rank in run.ranks if rank.hta_overlap is not None]
        told = ", ".join(percent(value, 2) for value in hta[:8])
        parts.append(
            f"<p>{percent(overlap)} of the communication is hidden under computation{without}. If all that fits were "
            f"hidden, a step would take {run.mean('ideal_ms'):.1f} ms."
            + (f" By Holistic Trace Analysis' definition, last step dropped: {told}." if told else "")
            + "</p>"
        )
        causes = "; ".join(f"{words} {ms:.2f} ms" for words, ms in idle_causes(run))
        parts.append(f"<p>Time without computation, a step: {escape(causes)}.</p>")
    if found := advise(run):
        items = "".join(
            f"<li>{escape(one.sentence[0].upper() + one.sentence[1:])}.<br><code>{escape(one.change)}</code></li>"
            for one in found
        )
        parts.append(f"<h3>What to change</h3><ol class='advice'>{items}</ol>")
    picture, data = _timeline(run, index)
    parts.append(picture)
    parts += [_holes(run), _collectives(run), _arrivals(run), _slowdowns(run), _steps(run)]
    if run.notes:
        parts.append("<h3>Notes</h3><ul>" + "".join(f"<li>{escape(note)}</li>" for note in run.notes) + "</ul>")
    parts.append("</section>")
    return "".join(parts), data


def _offsets(ranks: list[RankReport]) -> tuple[list[int], str]:
    """What to add to each rank's times to draw them on one axis, and how far that can be trusted."""
    starts = [rank.steps[0].start for rank in ranks]
    hosts = {rank.host for rank in ranks}
    if len(ranks) > 1 and len(hosts) == 1 and "" not in hosts:
        first = min(start + rank.base_ns for rank, start in zip(ranks, starts, strict=True))
        shifted = [rank.base_ns - first for rank in ranks]
        if all(start + shift < 60e9 for start, shift in zip(starts, shifted, strict=True)):
            return shifted, "ranks share their host's clock"
    return [-start for start in starts], "ranks are aligned at their first step" if len(ranks) > 1 else ""


def _path(intervals: Sequence[Interval], shift: int, y: float, height: float) -> str:
    """An SVG path of rectangles, in microseconds."""
    return "".join(
        f"M{(lo + shift) / 1e3:.1f} {y:g}h{max(hi - lo, 1) / 1e3:.1f}v{height:g}h-{max(hi - lo, 1) / 1e3:.1f}z"
        for lo, hi in intervals
    )


def _rows_of(items: list[Placed]) -> list[int]:
    """A row for each collective, so that those in flight together don't cover one another; at most three rows."""
    ends: list[int] = []
    rows = []
    for item in items:
        row = next((i for i, end in enumerate(ends) if end <= item.event.start), len(ends))
        if row == len(ends) and row < 3:
            ends.append(0)
        row = min(row, 2)
        ends[row] = max(ends[row], item.event.end)
        rows.append(row)
    return rows


def _timeline(run: RunReport, index: int) -> tuple[str, dict[str, object]]:
    ranks = run.ranks[:DRAWN_RANKS]
    shifts, alignment = _offsets(ranks)
    per_rank = {rank.rank: drawn_steps(rank) for rank in ranks}
    keep = max(1, min(8, 24 // len(ranks)))
    svg: list[str] = []
    labels: list[str] = []
    data_ranks: list[dict[str, object]] = []
    y = 28.0
    begin, end = 1e18, 0.0
    for rank, shift in zip(ranks, shifts, strict=True):
        steps = per_rank[rank.rank][:keep]
        shown = {step.number for step in steps}
        items = [item for item in rank.collectives if item.step in shown]
        rows = _rows_of(items)
        comm_height = LANE * (1 + max(rows, default=0) * 0.6)
        row_height = comm_height / (1 + max(rows, default=0))
        labels.append(f'<text x="{LABELS - 8}" y="{y + 14:g}" text-anchor="end">rank {rank.rank}: compute</text>')
        labels.append(
            f'<text x="{LABELS - 8}" y="{y + LANE + 4 + comm_height / 2 + 4:g}" text-anchor="end">communication</text>'
        )
        comm_y = y + LANE + 4
        for step in steps:
            begin = min(begin, (step.start + shift) / 1e3)
            end = max(end, (step.end + shift) / 1e3)
            lanes = step_lanes(rank, step)
            if not rank.blind:
                svg.append(f'<path fill="var(--gap)" d="{_path(lanes["gap"], shift, y + 6, LANE - 12)}"/>')
            svg.append(f'<path fill="var(--compute)" d="{_path(lanes["compute"], shift, y, LANE)}"/>')
            svg.append(
                f'<path class="edge" d="M{(step.start + shift) / 1e3:.1f} {y - 4:g}V{comm_y + comm_height + 2:g}"/>'
            )
        for item, row in zip(items, rows, strict=True):
            at = comm_y + row * row_height
            event = item.event
            late = event.start + (item.wait or 0)
            exposed = _merged(item.exposed, (event.end - event.start) // 400)
            waiting = [(lo, min(hi, late)) for lo, hi in exposed if lo < late]
            hidden = list(subtract([(event.start, event.end)], exposed)) if event.end > event.start else []
            moving = [(max(lo, late), hi) for lo, hi in exposed if hi > late]
            for name, some in (("hidden", hidden), ("exposed", moving), ("peer", waiting)):
                if some:
                    svg.append(f'<path fill="var(--{name})" d="{_path(some, shift, at, row_height - 1)}"/>')
        data_ranks.append(_rank_data(rank, steps, items, rows, shift, (y, comm_y, comm_height, row_height)))
        y = comm_y + comm_height + 16
    bottom = y - 8
    height = bottom + 30
    numbers = [step.number for step in per_rank[ranks[0].rank][:keep]]
    left_out = len(run.step_numbers) - len(numbers)
    which = f"Steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"Step {numbers[0]}" if numbers else ""
    told = [which] if which else []
    if left_out:
        told.append(f"{left_out} more are in the table; draw others with --steps")
    if len(run.ranks) > len(ranks):
        told.append(f"the first {len(ranks)} of {len(run.ranks)} ranks")
    if alignment:
        told.append(alignment)
    jump = "".join(f'<button type="button" data-step="{i}">step {number}</button>' for i, number in enumerate(numbers))
    first = per_rank[ranks[0].rank][:keep]
    scale = (WIDTH - LABELS) / max(end - begin, 1)
    names = [
        f'<text x="{x + 5:.1f}" y="15">step {step.number}</text>'
        for step in first
        for x in [LABELS + ((step.start + shifts[0]) / 1e3 - begin) * scale]
        if (step.end - step.start) / 1e3 * scale > 46
    ]
    view = f"{begin:.1f} 0 {max(end - begin, 1):.1f} {height:g}"
    picture = (
        "<h3>When it runs</h3>"
        f'<p class="how">{escape("; ".join(told))}. A thin bar is time in which nothing runs. Point at '
        "anything to read it; drag across a stretch to zoom in, "
        "double-click to see all.</p>"
        f'<div class="tools" data-run="{index}"><button type="button" data-zoom="0.5">zoom in</button>'
        f'<button type="button" data-zoom="2">zoom out</button><button type="button" data-pan="-0.5">←</button>'
        f'<button type="button" data-pan="0.5">→</button><button type="button" data-all="1">all</button>{jump}</div>'
        f'<svg class="timeline" id="timeline{index}" viewBox="0 0 {WIDTH} {height:g}" role="img" tabindex="0" '
        f'aria-label="Timeline of {escape(run.name)}">{"".join(labels)}'
        f'<svg class="data" x="{LABELS}" y="0" width="{WIDTH - LABELS}" height="{height:g}" viewBox="{view}" '
        f'preserveAspectRatio="none">{"".join(svg)}<rect class="select" y="0" height="{bottom:g}" width="0"/></svg>'
        f'<g class="ticks">{_ticks(begin, end, bottom)}{"".join(names)}</g></svg>'
    )
    data: dict[str, object] = {
        "begin": round(begin, 1),
        "end": round(end, 1),
        "height": height,
        "bottom": bottom,
        "steps": [[(step.start + shifts[0]) // 1000, (step.end + shifts[0]) // 1000, step.number] for step in first],
        "ranks": data_ranks,
    }
    return picture, data


def _merged(some: list[Interval], resolution: int) -> list[Interval]:
    out: list[Interval] = []
    for start, end in some:
        if out and start - out[-1][1] <= resolution:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def _rank_data(
    rank: RankReport,
    steps: Sequence[object],
    items: list[Placed],
    rows: list[int],
    shift: int,
    place: tuple[float, float, float, float],
) -> dict[str, object]:
    """What the tooltip looks up, in whole microseconds."""
    y, comm_y, comm_height, row_height = place
    comm = []
    for item, row in zip(items, rows, strict=True):
        event = item.event
        name = f"bucket {event.bucket}, {event.kind}" if event.bucket is not None else event.kind
        told = [f"{name}" + (f" of {size_text(event.size)}" if event.size else "")]
        told.append(f"{item.duration / 1e6:.3f} ms, {item.exposed_total / 1e6:.3f} of it exposed")
        if item.wait is not None:
            told.append(f"{item.wait / 1e6:.3f} ms waiting for a peer, {(item.transfer or 0) / 1e6:.3f} transfer")
        comm.append([(event.start + shift) // 1000, (event.end + shift) // 1000, row, told])
    compute: list[int] = []
    for step in drawn_steps(rank):
        if step in steps:
            for lo, hi in step.compute:
                compute += [(lo + shift) // 1000, (hi + shift) // 1000]
    holes = [
        [(hole.start + shift) // 1000, (hole.end + shift) // 1000, f"{hole_text(hole)}; {between(hole)}"]
        for hole in rank.holes
    ]
    return {
        "name": f"rank {rank.rank}",
        "y": y,
        "lane": LANE,
        "commY": comm_y,
        "commHeight": comm_height,
        "row": row_height,
        "comm": comm,
        "compute": compute,
        "holes": holes,
    }


def _ticks(begin: float, end: float, bottom: float) -> str:
    """The axis as it stands before anyone zooms; the script redraws it the same way."""
    span = max(end - begin, 1)
    step = 10.0 ** len(str(int(span / 10))) / 10
    step = next(one for one in (step, 2 * step, 5 * step, 10 * step) if span / one <= 10)
    out = []
    i = 0
    while i * step <= span:
        x = LABELS + i * step / span * (WIDTH - LABELS)
        out.append(
            f'<path d="M{x:.1f} {bottom:g}v5"/><text x="{x:.1f}" y="{bottom + 19:g}" text-anchor="middle">'
            f"{i * step / 1e3:g}{' ms' if i == 0 else ''}</text>"
        )
        i += 1
    return "".join(out)


# Tables --------------------------------------------------------------------------------------------------------------


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int], note: str = "") -> str:
    """A table whose columns in `words` are text and left-aligned."""
    if not rows:
        return ""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=w' if i in words else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    told = f'<p class="how">{escape(note)}</p>' if note else ""
    return (
        f"<h3>{escape(title)}</h3>{told}<div class='scroll'><table><thead><tr>{cells(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _holes(run: RunReport) -> str:
    if run.blind:
        return ""
    rows = [
        [str(rank.rank), str(hole.step), milliseconds(hole.length / 1e6), hole_text(hole), between(hole)]
        for rank, hole in longest_holes(run, 10)
    ]
    return _table("Longest stretches without computation", ["rank", "step", "ms", "cause", "between"], rows, [3, 4])


def _collectives(run: RunReport) -> str:
    known = transfer_known(run.rows)
    rows = collective_cells(run, known)
    note = (
        "Means over steps and ranks, ms. algbw = bytes / time; busbw counts what crosses each link, as nccl-tests does."
    )
    if not known:
        note += " Times include waiting for peers: these traces don't allow telling it apart."
    if len(run.rows) > len(rows):
        note += f" The {len(rows)} most exposed of {len(run.rows)}."
    split = ["transfer", "wait for a peer"] if known else []
    head = [
        "which",
        "kind",
        "bytes",
        "a step",
        "starts at",
        "takes",
        *split,
        "algbw GB/s",
        "busbw GB/s",
        "exposed/step",
    ]
    return _table("Collectives", head, rows, [0, 1], note)


def _arrivals(run: RunReport) -> str:
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
    head = ["rank", "arrives last at", "others wait, ms", "ms a step", "at most, ms", "where"]
    note = (run.straggler or "No rank is late more than chance would have it") + "."
    return _table("Who the others wait for", head, rows, [5], note[0].upper() + note[1:])


def _slowdowns(run: RunReport) -> str:
    rows = [
        [
            str(rank.rank),
            row.name,
            row.shape,
            f"{row.alone_us:.0f}",
            f"{row.with_comm_us:.0f}",
            f"{row.ratio:.2f}",
            f"{row.count_alone}, {row.count_with_comm}",
        ]
        for rank in run.ranks
        for row in rank.slowdowns[:5]
    ]
    told = [
        f"rank {rank.rank}: {rank.slowdown:.2f} times as long, {rank.slowdown_ms:.2f} ms a step"
        for rank in run.ranks
        if rank.slowdown is not None and rank.slowdown_ms is not None
    ]
    note = "Medians of the same operator and shape. Over all of them, " + "; ".join(told) + "."
    head = ["rank", "operator", "shape", "alone, µs", "with communication, µs", "ratio", "samples"]
    return _table("Computation while communication runs", head, rows, [1, 2], note)


def _steps(run: RunReport) -> str:
    metrics = ["step_ms", "compute_only_ms", "overlapped_ms", "exposed_ms", "gap_ms"]
    rows = [
        [
            str(rank.rank),
            str(step.number),
            *(milliseconds(part(rank, step, metric)) for metric in metrics),
            percent(overlap_of(step)),
        ]
        for rank in run.ranks
        for step in rank.steps
    ]
    head = ["rank", "step", "step, ms", "compute only", "overlapped", "exposed", "gap", "overlap"]
    table = _table("", head, rows, [])
    note = "The four parts add up to the step."
    return f"<h3>Every step</h3><details><summary>{len(rows)} rows. {note}</summary>{table[9:]}</details>"


def _difference(before: RunReport, after: RunReport, differences: list[Difference]) -> str:
    rows = []
    for one in differences:
        if one.metric.startswith("idle_") and max(one.before, one.after) < 0.005:
            continue
        rows.append(
            [
                metric_words(one.metric),
                f"{one.before:.2f}",
                f"{one.after:.2f}",
                f"{one.delta:+.2f}",
                "n/a" if one.margin is None else f"{one.margin:.2f}",
                {None: "too few steps to tell", True: "clear", False: "within noise"}[one.is_clear],
            ]
        )
    overlap = [percent(run.ratio("overlap")) for run in (before, after)]
    rows.append(["overlap", *overlap, "", "", ""])
    title = f"From {before.name} to {after.name}"
    head = ["ms a step", before.name, after.name, "change", "± by chance (95 %)", ""]
    return _table(title, head, rows, [0, 5])


LIGHT = "--ground:#fff;--ink:#1c2127;--soft:#5b6570;--line:#d9dee4;--card:#f5f7f9;--on:#fff;"
DARK = "--ground:#14181d;--ink:#e6e9ed;--soft:#9aa5b1;--line:#303843;--card:#1c2229;--on:#14181d;"
STYLE = """
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1200px;margin:0 auto;padding:20px}
header{display:flex;justify-content:space-between;align-items:start;gap:20px}
h1{font-size:22px;margin:0 0 8px}h2{font-size:18px;margin:26px 0 8px}h3{font-size:16px;margin:24px 0 4px}
p{margin:6px 0;max-width:100ch}.headline{font-size:17px;font-weight:600}.subject,.how{color:var(--soft)}
.problem{border-left:4px solid var(--exposed);padding:6px 12px;background:var(--card)}
.legend{display:flex;flex-wrap:wrap;gap:6px 22px;list-style:none;padding:0;margin:10px 0}
.legend i{display:inline-block;width:14px;height:14px;border-radius:3px;margin-right:7px;vertical-align:-2px}
svg{display:block;width:100%;height:auto;font:13px system-ui,sans-serif}svg text{fill:var(--ink)}
svg svg{width:auto}.bars .on{fill:var(--on)}.bars .on.gap{fill:#14181d}
.timeline{cursor:crosshair;user-select:none;touch-action:pan-y;border:1px solid var(--line);border-radius:6px}
.timeline .edge{stroke:var(--soft);stroke-dasharray:3 3;vector-effect:non-scaling-stroke}
.timeline .ticks path{stroke:var(--soft)}.timeline .ticks text{fill:var(--soft);font-size:12px}
.select{fill:var(--ink);opacity:.15}
button{font:inherit;font-size:13px;color:var(--ink);background:var(--card);border:1px solid var(--line);
border-radius:5px;padding:2px 9px;cursor:pointer}
.tools{display:flex;flex-wrap:wrap;gap:5px;margin:6px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}.w{text-align:left;white-space:normal}
.advice li{margin:6px 0;padding:6px 12px;background:var(--card);border-radius:5px}
code{color:var(--soft)}summary{cursor:pointer;color:var(--soft)}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--ground);padding:6px 10px;border-radius:5px;
font-size:13px;max-width:420px;display:none;z-index:9}
"""
SCRIPT = """
const LABELS=%d,WIDTH=%d,root=document.documentElement;
const media=matchMedia('(prefers-color-scheme: dark)');
if(/^#(dark|light)$/.test(location.hash))root.dataset.theme=location.hash.slice(1);
document.getElementById('theme').onclick=()=>{
  const dark=(root.dataset.theme||(media.matches?'dark':'light'))==='dark';
  root.dataset.theme=dark?'light':'dark'};
const tip=document.createElement('div');tip.id='tip';document.body.append(tip);
const ms=us=>(us/1000).toFixed(us<1e5?3:2)+' ms';
RUNS.forEach((run,index)=>{
  const svg=document.getElementById('timeline'+index),data=svg.querySelector('.data');
  const select=svg.querySelector('.select'),ticks=svg.querySelector('.ticks');
  let lo=run.begin,hi=run.end,from=null;
  const show=(a,b)=>{
    const span=Math.min(Math.max(b-a,1),run.end-run.begin);
    a=Math.min(Math.max(a,run.begin),run.end-span);lo=a;hi=a+span;
    data.setAttribute('viewBox',`${lo} 0 ${span} ${run.height}`);
    let step=Math.pow(10,Math.floor(Math.log10(span/10)));
    while(span/step>10)step*=span/step>25?5:2;
    let out='';
    for(let i=Math.ceil((lo-run.begin)/step);run.begin+i*step<=hi;i++){
      const x=LABELS+(run.begin+i*step-lo)/span*(WIDTH-LABELS);
      const text=+(i*step/1000).toPrecision(9);
      out+=`<path d="M${x} ${run.bottom}v5"/>`+
        `<text x="${x}" y="${run.bottom+19}" text-anchor="middle">${text}${out?'':' ms'}</text>`}
    for(const[a,b,number]of run.steps){
      const left=Math.max(a,lo),shown=(Math.min(b,hi)-left)/span*(WIDTH-LABELS);
      if(shown>46)out+=`<text x="${LABELS+(left-lo)/span*(WIDTH-LABELS)+5}" y="15">step ${number}</text>`}
    ticks.innerHTML=out};
  const time=event=>{
    const box=svg.getBoundingClientRect(),x=(event.clientX-box.left)/box.width*WIDTH;
    return{x,y:(event.clientY-box.top)/box.width*WIDTH,t:lo+(x-LABELS)/(WIDTH-LABELS)*(hi-lo)}};
  const read=(rank,t,y)=>{
    const out=[];
    if(y>=rank.commY-2){
      for(const[a,b,row,told]of rank.comm){
        const top=rank.commY+row*rank.row;
        if(t>=a-(hi-lo)/900&&t<=b+(hi-lo)/900&&y>=top&&y<=top+rank.row)return told}
      out.push('no communication here');
    }
    for(const[a,b,told]of rank.holes)
      if(t>=a&&t<=b)return[`${ms(b-a)} without computation`,told];
    const c=rank.compute;
    for(let i=0;i<c.length;i+=2)
      if(t>=c[i]&&t<=c[i+1]){out.push(`computing for ${ms(c[i+1]-c[i])}`);return out}
    return out.concat('no computation')};
  svg.onpointermove=event=>{
    const{x,y,t}=time(event);
    if(from!==null){
      select.setAttribute('x',Math.min(from,t));select.setAttribute('width',Math.abs(t-from));return}
    const rank=run.ranks.find(r=>y>=r.y-4&&y<=r.commY+r.commHeight+6);
    if(x<LABELS||!rank){tip.style.display='none';return}
    const step=run.steps.find(s=>t>=s[0]&&t<s[1]);
    const where=step?`, step ${step[2]}, ${ms(t-step[0])} into it`:'';
    tip.textContent='';
    for(const line of[rank.name+where,...read(rank,t,y)]){
      const p=document.createElement('div');p.textContent=line;tip.append(p)}
    tip.style.display='block';
    tip.style.left=Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
    tip.style.top=Math.min(event.clientY+16,innerHeight-tip.offsetHeight-8)+'px'};
  svg.onpointerleave=()=>{if(from===null)tip.style.display='none'};
  svg.onpointerdown=event=>{
    const{x,t}=time(event);
    if(x<LABELS||event.button)return;
    from=t;svg.setPointerCapture(event.pointerId);tip.style.display='none'};
  svg.onpointerup=event=>{
    if(from===null)return;
    const{t}=time(event),a=Math.min(from,t),b=Math.max(from,t);
    from=null;select.setAttribute('width',0);
    if(b-a>(hi-lo)/200)show(a,b)};
  svg.onpointercancel=()=>{from=null;select.setAttribute('width',0)};
  svg.ondblclick=()=>show(run.begin,run.end);
  const zoom=factor=>{const mid=(lo+hi)/2,half=(hi-lo)*factor/2;show(mid-half,mid+half)};
  const pan=share=>show(lo+share*(hi-lo),hi+share*(hi-lo));
  svg.onkeydown=event=>{
    const act={'+':()=>zoom(.5),'=':()=>zoom(.5),'-':()=>zoom(2),ArrowLeft:()=>pan(-.25),ArrowRight:()=>pan(.25),
      Escape:()=>show(run.begin,run.end)}[event.key];
    if(act){act();event.preventDefault()}};
  document.querySelector(`.tools[data-run="${index}"]`).onclick=event=>{
    const d=event.target.dataset;
    if(d.zoom)zoom(+d.zoom);else if(d.pan)pan(+d.pan);else if(d.all)show(run.begin,run.end);
    else if(d.step){const s=run.steps[d.step];show(s[0],s[1])}};
  show(lo,hi);
});
""" % (LABELS, WIDTH)  # noqa: UP031
