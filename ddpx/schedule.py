"""A collective as data: who adds what, from whom, at which step.

A `Schedule` holds the moves of the whole group, seen from above. Every other part of ddpx (verifier, counters, cost
model, simulator, picture, executor) reads this one object; clocks, streams, flags and buffers stay out of it. A
schedule speaks of chunks, never of bytes: `chunk_bounds` says where a chunk lies once the size of a buffer is known.

This module is pure: it imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")

# Collectives in which a chunk's number says which rank owns it, so that a pipelined copy may only subdivide chunks.
_OWNED = ("reduce_scatter", "all_gather", "all_to_all")
_FUSED = {("reduce_scatter", "all_gather"): "all_reduce", ("reduce", "broadcast"): "all_reduce"}
_in_order = attrgetter("step", "dst", "srcs", "lo", "hi")


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """At `step`, chunks [lo, hi) at `dst` become the sum, in the order listed, of what `srcs` held before the step.

    `srcs == (s,)` copies, `(dst, s)` accumulates, `(0, 1, ..., n-1)` reduces in rank order at one go. Each source other
    than `dst` sends once. "Before the step" is meant literally: a rank that overwrites what a peer reads in the same
    step must keep the old value for that peer (`verify.verify` lists where).
    """

    step: int
    dst: int
    srcs: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True)
class Schedule:
    """All moves of one collective over `world_size` ranks, sorted; the buffer is cut in `chunks`.

    `root` matters to broadcast and reduce only. Nothing is checked here but the order: `verify.verify` proves a
    schedule.
    """

    algorithm: str
    collective: str
    world_size: int
    chunks: int
    moves: tuple[Move, ...]
    root: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "moves", tuple(sorted(self.moves, key=_in_order)))

    @property
    def steps(self) -> int:
        """Number of steps, counting from step 0 to the last one that moves anything."""
        return self.moves[-1].step + 1 if self.moves else 0

    def by_step(self) -> list[list[Move]]:
        """The moves of each step; a step in which nothing moves is an empty list."""
        steps: list[list[Move]] = [[] for _ in range(self.steps)]
        for move in self.moves:
            steps[move.step].append(move)
        return steps

    def for_rank(self, rank: int) -> tuple[Move, ...]:
        """The moves in which `rank` receives, sends or adds: all that this rank needs to know."""
        return tuple(move for move in self.moves if move.dst == rank or rank in move.srcs)

    def __str__(self) -> str:
        return grid(self)


def chunk_bounds(numel: int, chunks: int) -> list[tuple[int, int]]:
    """Where each of `chunks` chunks lies in a buffer of `numel` elements: contiguous, sizes differing by at most one.

    The cuts nest: cutting in n * k gives, at every k-th cut, the cuts of n. So a pipelined reduce-scatter leaves each
    rank exactly the piece that the plain one leaves it.
    """
    cuts = [index * numel // chunks for index in range(chunks + 1)]
    return list(pairwise(cuts))


# ---- Functions from schedules to schedules ---------------------------------------------------------------------------


def then(a: Schedule, b: Schedule, *, algorithm: str | None = None, collective: str | None = None) -> Schedule:
    """First `a`, then `b`: reduce-scatter then all-gather is an all-reduce. Chunks are subdivided until both agree."""
    if a.world_size != b.world_size:
        raise ValueError(f"cannot run {b.algorithm} over {b.world_size} ranks after {a.algorithm} over {a.world_size}.")
    collective = collective or _FUSED.get((a.collective, b.collective))
    if collective is None:
        raise ValueError(f"{a.collective} then {b.collective} is none of {', '.join(COLLECTIVES)}; pass collective=.")
    chunks = math.lcm(a.chunks, b.chunks)
    a, b = refine(a, chunks // a.chunks), refine(b, chunks // b.chunks)
    name = algorithm or (a.algorithm if a.algorithm == b.algorithm else f"{a.algorithm}+{b.algorithm}")
    return Schedule(name, collective, a.world_size, chunks, a.moves + _later(b.moves, a.steps), a.root)


def together(*schedules: Schedule) -> Schedule:
    """All of `schedules` at once on the same buffer, for example one in each node; named after the first."""
    first = schedules[0]
    if any(schedule.world_size != first.world_size for schedule in schedules):
        raise ValueError("schedules that run together must be of one world; remap them to it first.")
    chunks = math.lcm(*(schedule.chunks for schedule in schedules))
    alike = [refine(schedule, chunks // schedule.chunks) for schedule in schedules]
    return replace(first, chunks=chunks, moves=tuple(move for schedule in alike for move in schedule.moves))


def beside(a: Schedule, b: Schedule) -> Schedule:
    """Both at once, `a` on the first chunks of the buffer and `b` on the rest; named after `a`."""
    chunks = a.chunks + b.chunks
    return together(within(a, 0, chunks), within(b, a.chunks, chunks))


def remap(schedule: Schedule, ranks: Sequence[int], world_size: int) -> Schedule:
    """Let rank i of `schedule` be `ranks[i]` of a world of `world_size`; chunks keep their numbers."""
    if len(ranks) != schedule.world_size or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size)):
        raise ValueError(
            f"remap needs {schedule.world_size} different ranks below world_size {world_size}, got {list(ranks)}."
        )
    moves = tuple(Move(m.step, ranks[m.dst], tuple([ranks[s] for s in m.srcs]), m.lo, m.hi) for m in schedule.moves)
    return replace(schedule, moves=moves, world_size=world_size, root=ranks[schedule.root])


def refine(schedule: Schedule, k: int) -> Schedule:
    """Cut every chunk in `k`; the same bytes move."""
    if k == 1:
        return schedule
    moves = tuple(Move(m.step, m.dst, m.srcs, m.lo * k, m.hi * k) for m in schedule.moves)
    return replace(schedule, moves=moves, chunks=schedule.chunks * k)


def within(schedule: Schedule, lo: int, chunks: int) -> Schedule:
    """The same moves on chunks [lo, lo + schedule.chunks) of a buffer of `chunks`."""
    moves = tuple(Move(m.step, m.dst, m.srcs, m.lo + lo, m.hi + lo) for m in schedule.moves)
    return replace(schedule, moves=moves, chunks=chunks)


def delay(schedule: Schedule, steps: int) -> Schedule:
    """The same moves, `steps` later."""
    return replace(schedule, moves=_later(schedule.moves, steps))


def _later(moves: Iterable[Move], steps: int) -> tuple[Move, ...]:
    return tuple([Move(m.step + steps, m.dst, m.srcs, m.lo, m.hi) for m in moves])


def interleave(schedule: Schedule, k: int, *, shift: int = 1) -> Schedule:
    """Pipeline: `k` copies of the schedule, each on its own k-th of the data, copy j starting `shift * j` steps later.

    Steps grow from t to t + shift * (k - 1), messages shrink to 1/k. A copy works on a contiguous segment of the
    buffer, except in collectives whose chunks have owners: there it works on the j-th part of every chunk.
    """
    if k < 1:
        raise ValueError(f"interleave needs at least one copy, got k={k}.")
    if k == 1:
        return schedule
    n = schedule.chunks
    moves = []
    for j in range(k):
        for m in schedule.moves:
            if schedule.collective not in _OWNED:
                moves.append(Move(m.step + shift * j, m.dst, m.srcs, j * n + m.lo, j * n + m.hi))
            else:
                parts = range(m.lo * k + j, m.hi * k + j, k)
                moves.extend(Move(m.step + shift * j, m.dst, m.srcs, part, part + 1) for part in parts)
    return replace(schedule, moves=tuple(moves), chunks=n * k)


def reverse(schedule: Schedule) -> Schedule:
    """Run a schedule of copies backwards, adding where it copied: broadcast becomes reduce, all-gather reduce-scatter.

    Backwards, the paths by which a chunk spread from its owner are a tree of additions that ends at the owner. Ranks
    that are added in one step are added in rank order.
    """
    collective = {"broadcast": "reduce", "all_gather": "reduce_scatter"}.get(schedule.collective)
    if collective is None or any(len(m.srcs) != 1 for m in schedule.moves):
        raise ValueError(f"only a broadcast or an all_gather made of copies runs backwards, not {schedule.collective}.")
    last = schedule.steps - 1
    moves = []
    for step, forward in enumerate(schedule.by_step()):
        copies: dict[int, list[Move]] = defaultdict(list)
        for m in forward:
            copies[m.srcs[0]].append(m)
        for owner, sent in copies.items():
            cuts = sorted({m.lo for m in sent} | {m.hi for m in sent})
            for lo, hi in pairwise(cuts):
                peers = [m.dst for m in sent if m.lo <= lo and hi <= m.hi]
                if peers:
                    moves.append(Move(last - step, owner, tuple(sorted([owner, *peers])), lo, hi))
    return replace(schedule, collective=collective, moves=tuple(moves))


# ---- The picture -----------------------------------------------------------------------------------------------------


def grid(schedule: Schedule, mark: tuple[int, int] | None = None, max_ranks: int = 12, max_steps: int = 40) -> str:
    """Draw the schedule: a row a step, a column a rank, in each cell what that rank receives.

    `c2 += 1` adds rank 1's chunk 2 to the rank's own, `c2 = 1` copies it, `c2 = 0+1+3` sums those ranks in that
    order. `mark = (step, rank)` points at one cell. What exceeds `max_ranks` or `max_steps` is left out, the marked
    cell never.
    """
    title = f"{schedule.algorithm} {schedule.collective}: {schedule.world_size} ranks, "
    title += f"{schedule.chunks} chunks, {schedule.steps} steps"
    marked_step, marked_rank = mark if mark else (0, 0)
    ranks = _window(schedule.world_size, marked_rank, max_ranks)
    steps = _window(schedule.steps, marked_step, max_steps)
    cells: dict[tuple[int, int], list[str]] = defaultdict(list)
    for m in schedule.moves:
        if m.step in steps and m.dst in ranks:
            cells[m.step, m.dst].append(_cell(m))
    rows = [["step", *(f"rank {r}" for r in ranks)]]
    rows += [[str(step), *(", ".join(cells.get((step, r), ["."])) for r in ranks)] for step in steps]
    marked_row = 0
    if mark and marked_step in steps and marked_rank in ranks:
        marked_row, column = steps.index(marked_step) + 1, ranks.index(marked_rank) + 1
        rows[marked_row][column] = f"[{rows[marked_row][column]}]"
    widths = [max(len(row[column]) for row in rows) for column in range(len(ranks) + 1)]
    lines = []
    for index, row in enumerate(rows):
        text = "  ".join([row[0].rjust(widths[0]), *(c.ljust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        lines.append(f"{'>' if index and index == marked_row else ' '} {text}".rstrip())
    left_out = []
    if len(ranks) < schedule.world_size:
        left_out.append(f"ranks {ranks.start}..{ranks.stop - 1} of {schedule.world_size}")
    if len(steps) < schedule.steps:
        left_out.append(f"steps {steps.start}..{steps.stop - 1} of {schedule.steps}")
    if left_out:
        lines.append(f"  (only {' and '.join(left_out)} shown)")
    return "\n".join([title, *lines])


def _cell(move: Move) -> str:
    chunks = f"c{move.lo}" if move.hi == move.lo + 1 else f"c{move.lo}-{move.hi - 1}"
    if len(move.srcs) == 2 and move.dst in move.srcs:
        return f"{chunks} += {move.srcs[0] if move.srcs[1] == move.dst else move.srcs[1]}"
    if len(move.srcs) > 8:
        return f"{chunks} = {move.srcs[0]}+{move.srcs[1]}+..+{move.srcs[-1]}"
    return f"{chunks} = {'+'.join(map(str, move.srcs))}"


def _window(length: int, centre: int, size: int) -> range:
    """At most `size` consecutive indices below `length` that contain `centre` where it exists."""
    start = max(0, min(centre - size // 2, length - size))
    return range(start, min(length, start + size))
