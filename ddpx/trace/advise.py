"""At most five things to change, each with the number it rests on and the number it should move.

A sentence appears only where it promises at least 1 % of a step. What a collective costs is a line fitted to the run's
own collectives, `alpha + bytes * beta`, so predictions about bucket sizes carry the spread around that line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from ddpx.trace.result import Placed, RunReport

WORTH = 0.01  # of a step
LAST_BUCKET_BYTES = 4 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class Advice:
    sentence: str
    change: str  # the flag or variable to change
    saves_ms: float  # per step, as predicted
    error_ms: float | None  # standard error of the prediction; None where saves_ms is an upper bound


@dataclass(frozen=True, slots=True)
class Line:
    """Time of a collective: alpha_ms + size * beta (ms a byte), with the spread around it."""

    alpha_ms: float
    beta: float
    spread_ms: float
    alpha_error_ms: float  # standard error of alpha

    def at(self, size: float) -> float:
        return self.alpha_ms + size * self.beta


def fit(points: list[tuple[int, float]]) -> Line | None:
    """Fit (bytes, ms); None where the sizes are too alike to tell alpha from beta."""
    sizes = [size for size, _ in points]
    if len(points) < 4 or max(sizes) < 2 * min(sizes):
        return None
    x0, y0 = fmean(sizes), fmean(ms for _, ms in points)
    spread = sum((x - x0) ** 2 for x in sizes)
    beta = max(0.0, sum((x - x0) * (y - y0) for x, y in points) / spread)
    alpha = y0 - beta * x0
    if alpha < 0:  # a line through the origin
        alpha, beta = 0.0, sum(x * y for x, y in points) / sum(x * x for x in sizes)
    residual = sum((y - alpha - beta * x) ** 2 for x, y in points)
    sigma = math.sqrt(residual / max(1, len(points) - 2))
    return Line(alpha, beta, sigma, sigma * math.sqrt(1 / len(points) + x0 * x0 / spread))


def size_text(size: float) -> str:
    """Bytes in words: decimal units, as bandwidths are."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def _cost_line(run: RunReport, kind: str) -> Line | None:
    points = []
    for rank in run.ranks:
        for item in rank.collectives:
            if item.event.kind == kind and item.event.size:
                points.append((item.event.size, (item.transfer if item.transfer is not None else item.duration) / 1e6))
    return fit(points)


def advise(run: RunReport) -> list[Advice]:
    """The run's most rewarding changes, best first."""
    if run.blind:
        return []
    step = run.mean("step_ms")
    found: list[Advice] = []
    for look in (_last_bucket, _many_small, _not_overlapped, _bound_by_communication):
        found += look(run, step)
    found += _idle(run, step)
    if run.straggler is not None:
        worst = max(run.arrivals, key=lambda arrival: arrival.cost_ms)
        found.append(Advice(run.straggler, f"rank {worst.rank}'s input, host or device", worst.cost_ms, None))
    found = [advice for advice in found if advice.saves_ms >= WORTH * step]
    return sorted(found, key=lambda advice: -advice.saves_ms)[:5]


def _last_bucket(run: RunReport, step_ms: float) -> list[Advice]:
    """The collective that ends last can hide only under what is still computed when it starts.

    What a smaller one would leave is played out for each step: the rest of its bytes go ahead as a bucket of their
    own, launched when the gradients have come so far, and the small bucket follows when both it and the link are
    ready. A last bucket that had to queue behind others is left alone: there the link is what takes the time.
    """
    lasts: list[Placed] = []
    before: list[Placed] = []
    for rank in run.ranks:
        for step in rank.steps:
            mine = sorted(
                (item for item in rank.collectives if item.step == step.number and item.event.size),
                key=lambda item: item.event.end,
            )
            if len(mine) < 2:
                return []
            lasts.append(mine[-1])
            before.append(mine[-2])
    event = lasts[0].event
    if not event.size or len({(item.event.kind, item.event.size) for item in lasts}) != 1:
        return []
    line = _cost_line(run, event.kind)
    if line is None or event.size <= 1.5 * LAST_BUCKET_BYTES:
        return []
    if fmean(one.event.start - other.event.end for one, other in zip(lasts, before, strict=True)) < 0:
        return []
    rest = event.size - LAST_BUCKET_BYTES
    tails, left = [], []
    for last, other in zip(lasts, before, strict=True):
        ready, previous = last.event.start / 1e6, other.event.start / 1e6
        launched = max(previous + (ready - previous) * rest / event.size, other.event.end / 1e6)
        ended = max(ready, launched + line.at(rest)) + line.at(LAST_BUCKET_BYTES)
        tails.append(last.exposed_total / 1e6)
        left.append(max(0.0, ended - (last.event.end / 1e6 - tails[-1])))
    tail, remains = fmean(tails), fmean(left)
    error = 2 * line.spread_ms
    name = f"bucket {event.bucket}" if event.bucket is not None else f"the last {event.kind}"
    return [
        Advice(
            f"{name} ({size_text(event.size)}) leaves {tail:.1f} ms a step exposed at the end of backward; a "
            f"{size_text(LAST_BUCKET_BYTES)} last bucket would leave about {remains:.1f} ms (± {error:.1f}, if its "
            f"gradients come evenly)",
            f"bucket_cap_mb={LAST_BUCKET_BYTES >> 20}",
            tail - remains,
            error,
        )
    ]


def _many_small(run: RunReport, step_ms: float) -> list[Advice]:
    """Collectives so small that starting them costs more than their bytes."""
    rows = [row for row in run.rows if row.kind == "all_reduce" and row.size]
    count = sum(row.per_step for row in rows)
    size = sum((row.size or 0) * row.per_step for row in rows)
    line = _cost_line(run, "all_reduce")
    if line is None or count < 4 or line.alpha_ms < 2 * line.alpha_error_ms:
        return []
    if any(row.kind in ("all_gather", "reduce_scatter") for row in run.rows):
        return []  # sharded training: its collectives follow the layers, not buckets
    fewer = max(1, math.ceil(size / BUCKET_BYTES))
    exposed = sum(row.exposed_ms for row in rows)
    saved = (count - fewer) * line.alpha_ms
    if fewer > count / 2 or saved <= 0:
        return []
    hidden = min(saved, exposed)
    return [
        Advice(
            f"{count:.0f} all-reduces of {size_text(size / count)} on average cost {line.alpha_ms:.2f} ms each before "
            f"their first byte; the same bytes in buckets of {size_text(BUCKET_BYTES)} need {fewer}, about "
            f"{saved:.1f} ms less communication and up to {hidden:.1f} ms off the step",
            f"bucket_cap_mb={BUCKET_BYTES >> 20} (mode bucketed or overlapped)",
            hidden,
            (count - fewer) * line.alpha_error_ms,
        )
    ]


def _not_overlapped(run: RunReport, step_ms: float) -> list[Advice]:
    overlap = run.ratio("overlap")
    if overlap is None or overlap > 0.2:
        return []
    exposed, room = run.mean("exposed_ms"), run.mean("compute_only_ms")
    best = run.mean("ideal_ms")
    return [
        Advice(
            f"{100 - 100 * overlap:.0f} % of communication ({exposed:.1f} ms a step) runs while nothing computes, "
            f"beside {room:.1f} ms of computation with none; hidden as far as possible, a step would take "
            f"{best:.1f} ms instead of {step_ms:.1f}",
            "launch buckets during backward (mode overlapped)",
            step_ms - best,
            None,
        )
    ]


def _bound_by_communication(run: RunReport, step_ms: float) -> list[Advice]:
    comm, compute = run.mean("comm_ms"), run.mean("compute_ms")
    if comm <= compute or compute == 0:
        return []
    rows = [row for row in run.rows if row.size and row.dtype.lower() in ("float", "float32")]
    halved = sum(row.bandwidth_ms * row.per_step for row in rows) / 2
    if not halved:
        return []
    return [
        Advice(
            f"communication takes {comm:.1f} ms a step and computation {compute:.1f} ms, so at least "
            f"{comm - compute:.1f} ms stay exposed; 16-bit gradients on the wire would halve its bytes, up to "
            f"{min(halved, run.mean('exposed_ms')):.1f} ms off the step",
            "register_comm_hook(None, bf16_compress_hook), or fewer synchronised backwards (no_sync)",
            min(halved, run.mean("exposed_ms")),
            None,
        )
    ]


def _idle(run: RunReport, step_ms: float) -> list[Advice]:
    """Time in which nothing runs, by its cause, and compute that communication slows down."""
    found = []
    gpu = run.ranks[0].device == "gpu"
    loading, host = run.mean("idle_data_loading_ms"), run.mean("idle_host_ms")
    if loading >= 0.02 * step_ms:
        found.append(
            Advice(
                f"{loading:.1f} ms a step ({100 * loading / step_ms:.0f} %) go by waiting for the data loader",
                "DataLoader(num_workers=…, prefetch_factor=…)",
                loading,
                None,
            )
        )
    if host >= 0.1 * step_ms:
        what = "the GPU idles because the host has launched nothing" if gpu else "no operator runs: Python in between"
        change = "torch.compile or CUDA graphs, or a larger batch" if gpu else "torch.compile, or a larger batch"
        found.append(Advice(f"{host:.1f} ms a step ({100 * host / step_ms:.0f} %) {what}", change, host, None))
    measured = [rank for rank in run.ranks if rank.slowdown is not None and rank.slowdown_ms is not None]
    if measured:
        ratio = fmean(rank.slowdown for rank in measured if rank.slowdown is not None)
        cost = fmean(rank.slowdown_ms for rank in measured if rank.slowdown_ms is not None)
        if ratio >= 1.1:
            change = "NCCL_MAX_CTAS" if gpu else "torch.set_num_threads: leave a core to communication"
            found.append(
                Advice(
                    f"operators take {ratio:.2f} times as long while communication runs, {cost:.1f} ms a step",
                    change,
                    cost,
                    None,
                )
            )
    return found
