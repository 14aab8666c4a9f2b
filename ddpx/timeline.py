"""Draw a step of each mode on one time axis: what the processor did, and below it what the network did."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddpx.compare import RankStep, Run, transfer_s

# Colours are those of `python -m ddpx trace`: blue computes, green is hidden, red is waited for.
COLOURS = {
    "forward": "#9dbcd9",
    "backward": "#4f7cac",
    "optimizer": "#2e4a68",
    "wait": "#ffffff",
    "hidden": "#2a9d7f",
    "exposed": "#d1495b",
    "peer": "#cdbfe0",
    "span": "#b5dbd1",
}
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "wait": "stands still",
    "hidden": "communication hidden under backward",
    "exposed": "communication that the processor waits for",
    "peer": "waiting for a slower rank",
    "span": "torch: from its first launch on",
}
MODES = {
    "local": "no communication",
    "torch": "DistributedDataParallel",
    "naive": "each parameter, after backward",
    "bucketed": "buckets, after backward",
    "overlapped": "buckets, during backward",
}
INK, FAINT = "#1c2127", "#6b747e"
LANE = 0.8  # height of a bar; lanes are 1 apart
PAUSE = 0.7  # between modes
NARROW = 0.07  # of the axis: bars narrower than this carry no word


def bars(run: Run, ranks: Sequence[RankStep]) -> Iterator[tuple[str, float, float]]:
    """What rank 0's network did in a step, as (kind, start_s, end_s): see WORDS for the kinds."""
    rank = ranks[0]
    turn_s = rank.backward_ended_s
    if run.mode == "torch":  # it reports one span for all buckets
        (span,) = rank.buckets
        yield "span", span.started_s, min(span.ended_s, turn_s)
        yield "exposed", max(span.started_s, turn_s), max(span.ended_s, turn_s)
        return
    for bucket, transfer in zip(rank.buckets, transfer_s(ranks), strict=True):
        moving_s = bucket.ended_s - transfer
        for kind, start, end in (
            ("peer", bucket.started_s, moving_s),
            ("hidden", moving_s, min(bucket.ended_s, turn_s)),
            ("exposed", max(moving_s, turn_s), bucket.ended_s),
        ):
            if end > start:
                yield kind, start, end


def draw(runs: Sequence[Run], what: str, path: Path) -> None:
    """Write the picture of each run's typical step, as rank 0 saw it, as a PNG; `what` says what was trained."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    local = [run for run in runs if run.network == "none"]
    labels = list(dict.fromkeys(run.label for run in runs if run.network != "none"))
    labels.sort(key=lambda label: all(run.network != "emulated" for run in runs if run.label == label))
    panels = [(label, local + [run for run in runs if run.label == label]) for label in labels]
    panels = panels or [(local[0].label, local)]
    heights = [sum(_lanes(run) + PAUSE for run in members) for _, members in panels]
    reach_ms = 1e3 * max(run.typical()[0].seconds for run in runs)
    used: set[str] = set()
    with plt.rc_context({"font.size": 10, "font.family": "DejaVu Sans", "text.color": INK}):
        figure, axes = plt.subplots(
            len(panels),
            1,
            figsize=(12, 0.3 * sum(heights) + 0.7 * len(panels) + 1.5),
            height_ratios=heights,
            sharex=True,
            layout="constrained",
            squeeze=False,
        )
        title = "A training step in each mode: green communication hides under backward, red is waited for"
        figure.suptitle(title, x=0.01, ha="left", fontsize=13.5, fontweight="bold")
        for axis, (label, members), height in zip(axes[:, 0], panels, heights, strict=True):
            axis.set_xlim(0, 1.08 * reach_ms)
            axis.set_ylim(height - PAUSE / 2, -PAUSE)
            axis.set_title(f"{label[:1].upper()}{label[1:]}", loc="left", fontsize=11.5, fontweight="bold", color=INK)
            used |= _draw_panel(axis, members, local[0] if local else None)
        axes[-1, 0].set_xlabel(f"milliseconds since the step began ({what}; rank 0's step of median time)", color=INK)
        handles = [
            Patch(
                facecolor=COLOURS[kind], edgecolor=COLOURS["exposed"] if kind == "wait" else COLOURS[kind], label=text
            )
            for kind, text in WORDS.items()
            if kind in used
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, labelcolor=INK)
        figure.savefig(path, dpi=130, facecolor="white")
        plt.close(figure)


def _lanes(run: Run) -> int:
    return 2 if run.views[0][0].buckets else 1


def _draw_panel(axis: Any, members: Sequence[Run], local: Run | None) -> set[str]:
    """The modes of one network, one below the other. Returns the kinds of bars it drew."""
    used: set[str] = set()
    row = 0.0
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(colors=INK, length=3)
    ticks: list[tuple[float, str]] = []
    for run in members:
        ranks = run.typical()
        rank = ranks[0]
        for phase in rank.phases:
            used.add(phase.kind)
            _bar(axis, row, phase.kind, phase.start_s, phase.end_s)
        ticks.append((row, "processor"))
        if rank.buckets:
            for kind, start_s, end_s in bars(run, ranks):
                used.add(kind)
                _bar(axis, row + 1, kind, start_s, end_s)
            ticks.append((row + 1, "network"))
        middle = row + (_lanes(run) - 1) / 2
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "annotation_clip": False}
        axis.annotate(run.mode, (-0.085, middle), va="bottom", fontweight="bold", fontsize=11, **place)
        axis.annotate(MODES.get(run.mode, ""), (-0.085, middle), va="top", fontsize=8.5, color=FAINT, **place)
        axis.text(
            1e3 * rank.seconds + 0.006 * axis.get_xlim()[1],
            row,
            f"{1e3 * rank.seconds:.0f} ms",
            va="center",
            fontweight="bold",
        )
        row += _lanes(run) + PAUSE
    axis.set_yticks([at for at, _ in ticks], [word for _, word in ticks], fontsize=8.5)
    axis.tick_params(axis="y", length=0, colors=FAINT)
    if local is not None and len(members) > 1:
        at_ms = 1e3 * local.typical()[0].seconds
        axis.axvline(at_ms, ymax=0.97, color=INK, linewidth=1, linestyle=(0, (2, 2)), zorder=3)
        axis.annotate("without communication", (at_ms, -PAUSE), ha="right", va="top", fontsize=8.5, color=FAINT)
    return used


def _bar(axis: Any, row: float, kind: str, start_s: float, end_s: float) -> None:
    start, width = 1e3 * start_s, 1e3 * (end_s - start_s)
    whole = axis.get_xlim()[1]
    if kind == "wait":
        axis.broken_barh(
            [(start, width)],
            (row - LANE / 2, LANE),
            facecolors=COLOURS[kind],
            edgecolor=COLOURS["exposed"],
            linewidth=1,
            hatch="////",
        )
    else:
        axis.broken_barh(
            [(start, width)],
            (row - LANE / 2, LANE),
            facecolors=COLOURS[kind],
            edgecolor="white",
            linewidth=0.5 if width > 0.004 * whole else 0,
        )
    if kind in ("forward", "backward", "optimizer") and width > NARROW * whole:
        axis.text(
            start + width / 2,
            row,
            kind,
            ha="center",
            va="center",
            fontsize=8.5,
            color="white" if kind != "forward" else INK,
        )
