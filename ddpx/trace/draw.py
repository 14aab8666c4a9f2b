"""Draw a run's steps as a PNG: what a step is made of, and when its parts run."""

from __future__ import annotations

from pathlib import Path

from ddpx.trace.intervals import Interval, intersect, subtract, union
from ddpx.trace.report import percent
from ddpx.trace.result import RankReport, RunReport, StepReport

# The classes of time, and their colours on light and dark grounds; told apart by lightness too, for the colour-blind.
CLASSES = ("compute", "hidden", "exposed", "peer", "gap")
CLASS_WORDS = {
    "compute": "computing only",
    "hidden": "computing, communication hidden under it",
    "exposed": "exposed communication, less waits for a peer",
    "peer": "waiting for a peer",
    "gap": "nothing runs",
}
COLOURS = {
    False: {"compute": "#4f7cac", "hidden": "#2a9d7f", "exposed": "#d1495b", "peer": "#7b4fa3", "gap": "#e2c877"},
    True: {"compute": "#6f9ccc", "hidden": "#3fbf9b", "exposed": "#f0697b", "peer": "#b48ae0", "gap": "#8f7d43"},
}
DRAWN_RANKS = 8


def make_up(run: RunReport, ranks: list[RankReport]) -> dict[str, float]:
    """Mean ms a step in each class, over some of the run's ranks; sums to their mean step."""
    steps = [step for rank in ranks for step in rank.steps]
    if run.blind:
        return {"compute": sum(step.split.compute_only for step in steps) / 1e6 / len(steps)}
    peer = sum(step.idle.get("peer", 0) for step in steps)
    whole = {
        "compute": sum(step.split.compute_only for step in steps),
        "hidden": sum(step.split.overlapped for step in steps),
        "exposed": sum(step.split.exposed for step in steps) - peer,
        "peer": peer,
        "gap": sum(step.split.gap for step in steps),
    }
    return {name: ns / 1e6 / len(steps) for name, ns in whole.items()}


def drawn_steps(rank: RankReport) -> list[StepReport]:
    """The steps whose intervals were kept for pictures."""
    return [step for step in rank.steps if step.compute or step.exposed]


def typical_step(run: RunReport) -> int:
    """The number of the drawn step of median length."""
    steps = sorted(drawn_steps(run.ranks[0]) or run.ranks[0].steps, key=lambda step: step.end - step.start)
    return steps[len(steps) // 2].number


def step_lanes(rank: RankReport, step: StepReport) -> dict[str, list[Interval]]:
    """The step's time in each class, as coarse intervals of trace time, for pictures."""
    window = [(step.start, step.end)]
    comm = list(
        intersect(
            union((item.event.start, item.event.end) for item in rank.collectives if item.event.end > item.event.start),
            window,
        )
    )
    waits = union(
        (item.event.start, item.event.start + item.wait) for item in rank.collectives if item.wait is not None
    )
    peer = list(intersect(step.exposed, waits))
    return {
        "compute": step.compute,
        "hidden": list(subtract(comm, step.exposed)),
        "exposed": list(subtract(step.exposed, peer)),
        "peer": peer,
        "gap": list(subtract(subtract(window, step.compute), comm)),
    }


def draw(runs: list[RunReport], path: Path, dark: bool = False) -> None:
    """Write the picture; several runs share one scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    colours = COLOURS[dark]
    ground, ink, faint = ("#14181d", "#e6e9ed", "#59626d") if dark else ("#ffffff", "#1c2127", "#b4bcc6")
    shown = [(run, run.ranks[:DRAWN_RANKS]) for run in runs]
    bars = sum(len(ranks) for _, ranks in shown)
    heights = [0.34 * bars + 0.5, *(0.4 * 2 * len(ranks) + 0.7 for _, ranks in shown)]
    with plt.rc_context({"font.size": 9, "font.family": "DejaVu Sans", "text.color": ink}):
        figure, axes = plt.subplots(
            1 + len(runs),
            1,
            figsize=(11, sum(heights) + 1.1),
            height_ratios=heights,
            layout="constrained",
            squeeze=False,
        )
        figure.patch.set_facecolor(ground)
        for axis in axes[:, 0]:
            axis.set_facecolor(ground)
            axis.tick_params(colors=ink, length=3)
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
            axis.spines["bottom"].set_color(faint)
        top = axes[0, 0]
        longest = max(run.mean("step_ms") for run in runs)
        labels = []
        for row, (run, rank) in enumerate((run, rank) for run, ranks in shown for rank in ranks):
            labels.append(f"rank {rank.rank}" if len(runs) == 1 else f"{run.name}, rank {rank.rank}")
            left = 0.0
            for name, ms in make_up(run, [rank]).items():
                top.barh(row, ms, left=left, height=0.66, color=colours[name])
                if ms > 0.04 * longest:
                    on = "#14181d" if dark or name == "gap" else "#ffffff"
                    top.text(left + ms / 2, row, f"{ms:.1f}", ha="center", va="center", color=on)
                left += ms
            top.text(left * 1.008, row, f"{left:.1f} ms", va="center")
        top.set_yticks(range(bars), labels)
        top.invert_yaxis()
        top.set_xlim(0, top.get_xlim()[1] * 1.08)
        top.set_title("What a step is made of: ms, mean over steps", loc="left", color=ink, fontweight="bold")
        reach = 0.0
        for axis, (run, ranks) in zip(axes[1:, 0], shown, strict=True):
            number = typical_step(run)
            names: list[str] = []
            for rank in ranks:
                step = next((step for step in rank.steps if step.number == number), None)
                if step is None:
                    continue
                reach = max(reach, (step.end - step.start) / 1e6)
                for name, intervals in step_lanes(rank, step).items():
                    row = len(names) + (0 if name in ("compute", "gap") else 1)
                    height = 0.3 if name == "gap" else 0.74
                    spans = [((lo - step.start) / 1e6, (hi - lo) / 1e6) for lo, hi in intervals]
                    axis.broken_barh(spans, (row - height / 2, height), facecolors=colours[name], linewidth=0)
                names += [f"rank {rank.rank}: computation", "communication"]
            axis.set_yticks(range(len(names)), names)
            axis.invert_yaxis()
            axis.set_xlabel("ms since the step began", color=ink)
            overlap = run.ratio("overlap")
            axis.set_title(
                f"{run.name}: step {number}"
                + ("" if overlap is None else f"; overlap of all steps {percent(overlap)}"),
                loc="left",
                color=ink,
                fontweight="bold",
            )
        for axis in axes[1:, 0]:
            axis.set_xlim(0, reach * 1.01)
        present = [name for name in CLASSES if any(make_up(run, run.ranks).get(name) for run in runs)]
        handles = [Patch(color=colours[name], label=CLASS_WORDS[name]) for name in present]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, labelcolor=ink, fontsize=9
        )
        figure.savefig(path, dpi=130, facecolor=ground)
        plt.close(figure)
