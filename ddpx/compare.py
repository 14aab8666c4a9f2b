"""Training steps of several modes side by side: what each cost, whether they agree, and what that says.

A `RankStep` is one step as one rank saw it; `summarise` joins all ranks' views of it. Times are in seconds.

    step           of the slowest rank
    communication  bytes move: for each bucket the least time that any rank's stream was busy with it, since a rank that
                   comes early only waits for the others in the rest
    peer wait      that rest, mean over ranks
    exposed        the computing side stands still: communication or peer wait after backward has ended, mean over ranks
    overlap        the share of communication before backward has ended, so hidden under it
"""

import contextlib
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx.data_parallel import DDPX
from ddpx.mfu import Peak, format_mfu, mfu

Network = Literal["none", "own", "emulated"]
ALIKE = 0.01  # losses that differ by more, relatively, are not the same training
UNSURE = 0.01  # a difference that chance makes more often than this is not called one


class Phase(NamedTuple):
    """What the computing side did from `start_s` to `end_s`, counted from the beginning of the step."""

    kind: Literal["forward", "backward", "wait", "optimizer"]
    start_s: float
    end_s: float


class BucketTimes(NamedTuple):
    """One bucket in one step, counted from the beginning of the step."""

    bucket: int
    nbytes: int
    ready_s: float
    launched_s: float
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step as one rank saw it."""

    loss: float
    seconds: float
    backward_ended_s: float
    phases: tuple[Phase, ...] = ()
    buckets: tuple[BucketTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A step of all ranks; see the module for what the times mean. `overlap` is None without communication."""

    seconds: float
    loss: float
    communication_s: float
    peer_wait_s: float
    exposed_s: float
    overlap: float | None


def transfer_s(ranks: Sequence[RankStep]) -> list[float]:
    """By bucket: the least time that any rank's communication stream was busy with it."""
    durations = [[bucket.ended_s - bucket.started_s for bucket in rank.buckets] for rank in ranks]
    return [min(of_ranks) for of_ranks in zip(*durations, strict=True)]


def summarise(ranks: Sequence[RankStep]) -> Step:
    """Join all ranks' views of one step."""
    transfers = transfer_s(ranks)
    communication_s = sum(transfers)
    busy_s = exposed_s = exposed_transfer_s = 0.0
    for rank in ranks:
        for bucket, transfer in zip(rank.buckets, transfers, strict=True):
            busy_s += bucket.ended_s - bucket.started_s
            exposed_s += max(0.0, bucket.ended_s - max(bucket.started_s, rank.backward_ended_s))
            exposed_transfer_s += max(0.0, min(transfer, bucket.ended_s - rank.backward_ended_s))
    n = len(ranks)
    return Step(
        max(rank.seconds for rank in ranks),
        sum(rank.loss for rank in ranks) / n,
        communication_s,
        busy_s / n - communication_s,
        exposed_s / n,
        1 - exposed_transfer_s / n / communication_s if communication_s > 0 else None,
    )


def communication_of(model: nn.Module, began_s: float) -> tuple[float, tuple[BucketTimes, ...]]:
    """When the last backward ended, without what it waited for, and the buckets; in seconds since the step began."""
    if isinstance(model, DDPX):
        stats = model.stats()
        assert stats is not None
        if model.reducer.communicator.transport is None:
            return 0.0, ()
        return stats.backward_ended_s - began_s, tuple(
            BucketTimes(b.index, b.nbytes, *(at - began_s for at in (b.ready_s, b.launched_s, b.started_s, b.ended_s)))
            for b in stats.buckets
            if b.started_s is not None and b.ended_s is not None
        )
    if not isinstance(model, DistributedDataParallel):
        return 0.0, ()
    try:  # torch's own figures: private, in nanoseconds of the wall clock, and for all buckets together
        assert model.logger is not None
        model.logger.set_runtime_stats_and_log()
        data = model._get_ddp_logging_data()
        zero_ns = time.time_ns() - (time.perf_counter() - began_s) * 1e9
        names = ("backward_compute_time_end", "backward_comm_time_start", "backward_comm_time_end")
        end_s, start_s, stop_s = ((data[name] - zero_ns) * 1e-9 for name in names)
    except (AttributeError, KeyError):
        return 0.0, ()
    return end_s, (BucketTimes(0, data["total_parameter_size_bytes"], start_s, start_s, start_s, stop_s),)


@dataclass(slots=True)
class Run:
    """One mode on one network: its timed steps in order, and the losses of all its steps, warm-up included."""

    mode: str
    network: Network
    label: str  # the network, in words
    steps: list[Step] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    views: list[list[RankStep]] = field(default_factory=list)  # of timed steps, in full: all, or those kept
    validation_loss: float = math.nan
    algorithm: str = ""

    @property
    def step_s(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def spread_s(self) -> tuple[float, float]:
        """First and last decile of the step times; least and greatest where there are few."""
        times = sorted(step.seconds for step in self.steps)
        return (times[round(0.1 * (len(times) - 1))], times[round(0.9 * (len(times) - 1))])

    def median(self, name: str) -> float | None:
        """Median over the timed steps of a field of `Step`; None where there was no communication."""
        steps = [step for step in self.steps if step.overlap is not None]
        return statistics.median(getattr(step, name) for step in steps) if steps else None

    def typical(self) -> list[RankStep]:
        """All ranks' views of the kept step whose times, taken together, are nearest the medians."""
        names = ("seconds", "communication_s", "peer_wait_s", "exposed_s")
        middle = [statistics.median(getattr(step, name) for step in self.steps) for name in names]

        def distance(ranks: list[RankStep]) -> float:
            step = summarise(ranks)
            return sum(abs(getattr(step, name) - value) for name, value in zip(names, middle, strict=True))

        return min(self.views, key=distance)


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What step times are held against: work in a global step, and the peak of all ranks' devices together."""

    items: int  # in a global step
    item: str  # token or image
    flops: float  # of a global step
    convention: str
    peak: Peak | None
    warning: str | None = None


# ---- A step at a time ------------------------------------------------------------------------------------------------


def console_line(number: int, runs: Sequence[Run], step: Step) -> str:
    """Step `number` for people: `step` is that of the last of the runs, which have all made it."""
    line = f"step {number}  loss {step.loss:.3f}"
    if len(runs) == 1:
        line += f"  {1e3 * step.seconds:.1f} ms"
        if step.overlap is not None:
            line += f"  exposed {1e3 * step.exposed_s:.1f} ms  overlap {step.overlap:.2f}"
        return line
    if not runs[0].steps:
        return f"{line}  warm-up"
    for network in dict.fromkeys(run.network for run in runs):
        line += "  | emulated:" * (network == "emulated")
        line += "".join(f"  {run.mode} {1e3 * run.steps[-1].seconds:.0f}" for run in runs if run.network == network)
    return f"{line} ms"


def log_line(number: int, run: Run, step: Step, ranks: Sequence[RankStep]) -> dict[str, Any]:
    """A step as JSON: of all ranks together, then as each saw it. Times in seconds, from the beginning of the step."""
    return {
        "step": number,
        "mode": run.mode,
        "network": run.label,
        "emulated": run.network == "emulated",
        **asdict(step),
        "ranks": [
            {
                "loss": rank.loss,
                "seconds": rank.seconds,
                "backward_ended_s": rank.backward_ended_s,
                "phases": [phase._asdict() for phase in rank.phases],
                "buckets": [bucket._asdict() for bucket in rank.buckets],
            }
            for rank in ranks
        ],
    }


# ---- Statements ------------------------------------------------------------------------------------------------------


def is_faster(a: Run, b: Run) -> bool:
    """Whether `a` beat `b` in the steps they made in turns by more than chance would (Wilcoxon's signed-rank test)."""
    pairs = zip(a.steps, b.steps, strict=True)
    differences = sorted((y.seconds - x.seconds for x, y in pairs if x.seconds != y.seconds), key=abs)
    lost = sum(rank for rank, difference in enumerate(differences, 1) if difference < 0)
    return a.step_s < b.step_s and _chance(len(differences), lost) < UNSURE


def _chance(n: int, most: int) -> float:
    """The share of the 2^n ways to pick from 1, 2, ..., n whose sum is at most `most`."""
    if n > 60:  # the sum is as good as normal
        mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
        return 0.5 * math.erfc((mean - most - 0.5) / math.sqrt(2 * variance))
    ways = [1] + [0] * most
    for rank in range(1, n + 1):
        for total in range(most, rank - 1, -1):
            ways[total] += ways[total - rank]
    return sum(ways) / 2**n


def mfu_text(yardstick: Yardstick) -> str:
    """Numerator, convention and denominator of the MFUs, and a warning where the peak moved."""
    if yardstick.peak is None:
        return "MFU n/a: the peak of this device is not known; give it with --peak-tflops."
    text = (
        f"MFU: {yardstick.flops / 1e9:.2f} GFLOP a step ({yardstick.convention}) against "
        f"{yardstick.peak.flops / 1e9:.0f} GFLOP/s of all ranks together ({yardstick.peak.source})."
    )
    return text + (f"\nWarning: {yardstick.warning}." if yardstick.warning else "")


def loss_text(runs: Sequence[Run]) -> str:
    """Whether losses agree, and where training got to."""
    shared = [run for run in runs if run.network != "none"] or list(runs)
    last = shared[-1]
    lines = [
        agreement(runs)[0],
        f"Loss after {len(last.losses)} steps: training {last.losses[-1]:.3f} (first {last.losses[0]:.3f}), "
        f"validation {last.validation_loss:.3f} ({last.mode}).",
    ]
    return "\n".join(lines)


def finding(runs: Sequence[Run], world_size: int) -> str:
    """One plain sentence: what overlap bought on each network. A difference that may be chance is not claimed."""
    if world_size == 1:
        return "One process has nobody to communicate with, so all modes do the same; start two ranks to compare them."
    local = next((run for run in runs if run.network == "none"), None)
    clauses = []
    for network in ("emulated", "own"):
        others = [run for run in runs if run.network == network]
        best = next((run for run in others if run.mode == "overlapped"), None)
        if best is None or len(others) < 2:
            continue
        others.remove(best)
        clauses.append(f"on {'an ' if network == 'emulated' else ''}{best.label} {_standing(best, others, local)}")
    text = "; ".join(clauses) or "nothing to compare: name overlapped and another mode in --modes"
    return f"{text[0].upper()}{text[1:]}."


def _standing(best: Run, others: Sequence[Run], local: Run | None) -> str:
    """Where `best`, the overlapped run, stands among the others on its network."""
    beaten = [run for run in others if is_faster(best, run)]
    ahead = [run for run in others if is_faster(run, best)]
    even = [run for run in others if run not in beaten and run not in ahead]
    if not beaten and not ahead:
        times = ", ".join(f"{run.mode} {_ms(run.step_s)}" for run in (best, *others))
        n = len(best.steps)
        verdict = (
            f"{n} steps are too few to tell" if 0.5**n >= UNSURE else "the modes differ no more than chance explains"
        )
        return f"{verdict} ({times})"
    text = f"a step takes {_ms(best.step_s)} overlapped"
    if beaten:
        text += " instead of " + " and ".join(
            f"{_ms(run.step_s)} {run.mode} ({1 - best.step_s / run.step_s:.0%} less)" for run in beaten
        )
    if ahead:
        text += ", more than " + " and ".join(f"{_ms(run.step_s)} {run.mode}" for run in ahead)
    if even:
        text += ", no clear difference to " + " and ".join(f"{_ms(run.step_s)} {run.mode}" for run in even)
    overlap = best.median("overlap")
    if beaten and overlap is not None:
        text += f", since {overlap:.0%} of its communication hides under backward"
    if local is not None:
        text += f" ({_ms(local.step_s)} without any)"
    return text


def agreement(runs: Sequence[Run]) -> tuple[str, float]:
    """Whether the modes that share gradients had the same losses, in words and as the greatest relative difference."""
    shared = [run for run in runs if run.network != "none"]
    if len(shared) < 2:
        return "One mode alone: no losses to compare.", 0.0
    names = ", ".join(dict.fromkeys(run.mode for run in shared))
    count = len(shared[0].losses)
    worst, at = 0.0, 0
    for run in shared[1:]:
        for step, (a, b) in enumerate(zip(shared[0].losses, run.losses, strict=True)):
            difference = abs(a - b) / max(abs(a), 1e-30)
            if not difference <= worst and not math.isnan(worst):  # a NaN is the worst
                worst, at = difference, step
    if worst == 0:
        return f"Losses of {names} are the same to the last bit at all {count} steps.", worst
    verb = "agree to" if worst <= ALIKE else "DISAGREE, which rounding does not explain, by"
    return f"Losses of {names} {verb} {worst:.1e} (worst of {count} steps: step {at}).", worst


# ---- Table and report ------------------------------------------------------------------------------------------------

HEAD = ("", "step ms", "p10-p90", "{item}s/s", "MFU", "of local", "comm. ms", "peer wait", "exposed ms", "overlap")
NOTE = (
    "step: slowest rank, median; from a barrier through forward, backward and optimizer. comm.: bytes move; peer wait:",
    "a rank that came early waits for the others; exposed: the computing side stands still; overlap: share of comm.",
    "that hides under backward. All are medians over the timed steps.",
)
TORCH_NOTE = "torch tells only when its communication began and ended, so its share that is not exposed is not known."
NO_TORCH_NOTE = "torch is left out here: its gloo messages are real and cannot be slowed down"


def table(runs: Sequence[Run], yardstick: Yardstick) -> str:
    """The comparison as text, a section for each network."""
    local = next((run for run in runs if run.network == "none"), None)
    head = [name.format(item=yardstick.item) for name in HEAD]
    lines: list[list[str] | str] = [head]
    for label in dict.fromkeys(run.label for run in runs):
        section = [run for run in runs if run.label == label]
        lines.append(label)
        lines += [_cells(run, local, yardstick) for run in section]
        if section[0].network == "emulated" and any(run.mode == "torch" for run in runs):
            lines.append(f"  {NO_TORCH_NOTE}")
    rows = [line for line in lines if not isinstance(line, str)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    text = [
        line
        if isinstance(line, str)
        else "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    notes = [*NOTE, *([TORCH_NOTE] if any(run.mode == "torch" for run in runs) else [])]
    return "\n".join([*text, "", *notes])


def _cells(run: Run, local: Run | None, yardstick: Yardstick) -> list[str]:
    low_s, high_s = run.spread_s
    names = ("communication_s", "peer_wait_s", "exposed_s", "overlap")
    times = [None if run.mode == "torch" and name != "exposed_s" else run.median(name) for name in names]
    overlap = times.pop()
    return [
        f"  {run.mode}",
        f"{1e3 * run.step_s:.1f}",
        f"{1e3 * low_s:.1f}-{1e3 * high_s:.1f}",
        f"{yardstick.items / run.step_s:.0f}",
        format_mfu(mfu(yardstick.flops, run.step_s, yardstick.peak)),
        f"{local.step_s / run.step_s:.2f}" if local else "-",
        *("-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in times),
        "-" if overlap is None else f"{overlap:.0%}",
    ]


def report(runs: Sequence[Run], yardstick: Yardstick, world_size: int) -> dict[str, Any]:
    """Everything measured, for machines."""
    local = next((run for run in runs if run.network == "none"), None)
    return {
        "finding": finding(runs, world_size),
        "losses_agree": dict(zip(("text", "worst_relative_difference"), agreement(runs), strict=True)),
        "definitions": list(NOTE),
        f"{yardstick.item}s_per_step": yardstick.items,
        "flops_per_step": yardstick.flops,
        "flops_convention": yardstick.convention,
        "peak_flops": yardstick.peak.flops if yardstick.peak else None,
        "peak_source": yardstick.peak.source if yardstick.peak else None,
        "peak_warning": yardstick.warning,
        "runs": [_run_dict(run, local, yardstick) for run in runs],
    }


def _run_dict(run: Run, local: Run | None, yardstick: Yardstick) -> dict[str, Any]:
    known = ("communication_s", "peer_wait_s", "exposed_s", "overlap") if run.mode != "torch" else ("exposed_s",)
    return {
        "mode": run.mode,
        "network": run.label,
        "emulated": run.network == "emulated",
        "algorithm": run.algorithm,
        "step_s": run.step_s,
        "step_s_p10_p90": run.spread_s,
        f"{yardstick.item}s_per_s": yardstick.items / run.step_s,
        "mfu": mfu(yardstick.flops, run.step_s, yardstick.peak),
        "mfu_of_local": local.step_s / run.step_s if local else None,
        **{name: run.median(name) for name in known},
        "validation_loss": run.validation_loss,
        "losses": run.losses,
        "steps_s": [step.seconds for step in run.steps],
        "buckets": _bucket_dicts(run),
    }


def _bucket_dicts(run: Run) -> list[dict[str, Any]]:
    """Medians over the kept steps, for each bucket; rank 0's view, but for the transfer."""
    if not run.views or not run.views[0][0].buckets or run.mode == "torch":
        return []
    transfers = [transfer_s(ranks) for ranks in run.views]
    dicts = []
    for index, first in enumerate(run.views[0][0].buckets):
        rows = [(ranks[0].buckets[index], ranks[0].backward_ended_s) for ranks in run.views]
        median = statistics.median
        dicts.append(
            {
                "bucket": index,
                "bytes": first.nbytes,
                "ready_to_launched_s": median(b.launched_s - b.ready_s for b, _ in rows),
                "launched_to_started_s": median(b.started_s - b.launched_s for b, _ in rows),
                "busy_s": median(b.ended_s - b.started_s for b, _ in rows),
                "transfer_s": median(row[index] for row in transfers),
                "exposed_s": median(max(0.0, b.ended_s - max(b.started_s, end_s)) for b, end_s in rows),
            }
        )
    return dicts


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def processor() -> str:
    """The processor's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
