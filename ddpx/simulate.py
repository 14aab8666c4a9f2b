"""Run any schedule on simulated ranks in one process, with numpy, and see who holds what after every step.

Nothing here knows an algorithm: a rank is a dict from chunk to array, a move is a lookup and at most a few additions. A
copy passes the array itself on, so a thousand ranks fit in memory; arrays are never changed in place.

    run = simulate(build("all_reduce", "ring", 4), inputs, keep=True)
    run.outputs[2]          # what rank 2 ends with
    run.history[1][3][0]    # chunk 0 at rank 3 after step 1 (history[0] is the start)
    print(show(run.schedule))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpx.algorithms import ALGORITHMS, build
from ddpx.cost import Fabric, timeline
from ddpx.schedule import Schedule, chunk_bounds
from ddpx.verify import Contract

Array = NDArray[Any]
State = list[dict[int, Array]]  # of each rank, what it holds by chunk

OPERATIONS: Mapping[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,  # divided at the end
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass(frozen=True)
class Run:
    """A schedule that has run. `outputs[r]` is None where the collective promises rank r nothing.

    `history[s]` is the state before step s and `history[-1]` the last one; empty unless asked for.
    """

    schedule: Schedule
    outputs: tuple[Array | None, ...]
    history: tuple[State, ...] = ()


def simulate(
    schedule: Schedule,
    inputs: Sequence[Array],
    operation: str = "sum",
    *,
    keep: bool = False,
    rounding: Callable[[Array], Array] | None = None,
) -> Run:
    """Run `schedule` on `inputs`, one array a rank, and give what each rank ends with.

    A rank brings its whole buffer, in all_gather its shard, in all_to_all its n pieces in a row; in broadcast only the
    root's counts. It gets its whole buffer, in reduce_scatter its shard, in all_to_all the pieces meant for it in the
    order of their senders. `rounding` is applied to the result of every move that adds, as a narrow dtype on the wire
    would. `keep` keeps the state after every step. Raises ValueError for inputs that differ in shape or dtype, for an
    unknown operation and for a schedule that reads what is not there.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; known: {', '.join(OPERATIONS)}.")
    combine = OPERATIONS[operation]
    contract = Contract(schedule)
    flats = _checked(schedule, inputs)
    state = _start(schedule, contract, flats)
    history = [[dict(held) for held in state]] if keep else []
    for step, moves in enumerate(schedule.by_step()):
        new = []
        for m in moves:
            sources = [state[src] for src in m.srcs]
            for chunk in range(m.lo, m.hi):
                try:
                    value = sources[0][chunk]
                    for source in sources[1:]:
                        value = combine(value, source[chunk])
                except KeyError:
                    lacking = [src for src in m.srcs if chunk not in state[src]]
                    problem = f"step {step}: rank {m.dst} reads chunk {chunk} of rank {lacking[0]}, which holds none."
                    raise ValueError(f"{schedule.algorithm} {schedule.collective}, {problem}") from None
                if rounding and len(sources) > 1:
                    value = rounding(value)
                new.append((m.dst, chunk, value))
        for dst, chunk, value in new:
            state[dst][chunk] = value
        if keep:
            history.append([dict(held) for held in state])
    outputs = _outputs(schedule, contract, state, np.shape(inputs[0]))
    if operation == "avg":
        outputs = [None if out is None else out / schedule.world_size for out in outputs]
    return Run(schedule, tuple(outputs), tuple(history))


def reference(collective: str, inputs: Sequence[Array], operation: str = "sum", root: int = 0) -> list[Array | None]:
    """What the collective promises, straight from its definition: the direct sum to check simulations against."""
    n = len(inputs)
    if collective == "broadcast":
        return [np.asarray(inputs[root])] * n
    if collective == "all_gather":
        return [np.concatenate(list(inputs))] * n
    if collective == "all_to_all":
        pieces = [[np.ravel(i)[lo:hi] for lo, hi in chunk_bounds(np.size(i), n)] for i in inputs]
        return [np.concatenate([pieces[src][dst] for src in range(n)]) for dst in range(n)]
    total = np.asarray(inputs[0])
    for other in inputs[1:]:
        total = OPERATIONS[operation](total, other)
    if operation == "avg":
        total = total / n
    if collective == "all_reduce":
        return [total] * n
    if collective == "reduce":
        return [total if rank == root else None for rank in range(n)]
    flat = total.ravel()
    return [flat[lo:hi] for lo, hi in chunk_bounds(flat.size, n)]


def bfloat16(values: Array) -> Array:
    """float32 rounded to what bfloat16 can hold, to nearest, ties to even; still float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32)).astype(np.float32)


# ---- Who holds what --------------------------------------------------------------------------------------------------


def holdings(schedule: Schedule) -> Iterator[list[dict[int, tuple[int, ...]]]]:
    """Before step 0 and after every step: of each rank, whose parts it holds of each chunk, sorted.

    A part that was added twice is listed twice.
    """
    contract = Contract(schedule)
    state: list[dict[int, tuple[int, ...]]] = [{} for _ in range(schedule.world_size)]
    for chunk in range(schedule.chunks):
        for rank in contract.holders(chunk):
            state[rank][chunk] = (rank,)
    yield [dict(held) for held in state]
    for moves in schedule.by_step():
        new = [
            (m.dst, chunk, tuple(sorted(part for src in m.srcs for part in state[src].get(chunk, ()))))
            for m in moves
            for chunk in range(m.lo, m.hi)
        ]
        for dst, chunk, parts in new:
            state[dst][chunk] = parts
        yield [dict(held) for held in state]


def show(schedule: Schedule) -> str:
    """The holdings step by step: a line a rank, a column a chunk; `0+3` are the ranks summed there, `*` marks news."""
    n = schedule.world_size
    everyone = tuple(range(n))
    sections = []
    before: list[dict[int, tuple[int, ...]]] | None = None
    for index, state in enumerate(holdings(schedule)):
        rows = [["", *(f"c{chunk}" for chunk in range(schedule.chunks))]]
        for rank, held in enumerate(state):
            row = [f"rank {rank}"]
            for chunk in range(schedule.chunks):
                parts = held.get(chunk, ())
                text = "all" if parts == everyone and n > 2 else "+".join(map(str, parts)) or "-"
                new = before is not None and before[rank].get(chunk) != held.get(chunk)
                row.append(text + "*" * new)
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        title = "at the start" if before is None else f"after step {index - 1}"
        sections.append("\n".join([title, *("  " + line for line in lines)]))
        before = state
    return "\n".join(sections)


# ---- Slow ranks and links --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect:
    """What slow ranks or links do to one algorithm."""

    algorithm: str
    healthy_s: float
    slow_s: float

    @property
    def factor(self) -> float:
        return self.slow_s / self.healthy_s if self.healthy_s else 1.0


def effects(
    world_size: int,
    nbytes: int,
    fabric: Fabric,
    slow_ranks: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
    collective: str = "all_reduce",
    algorithms: Iterable[str] | None = None,
) -> list[Effect]:
    """The same slow ranks (`{3: 5.0}`: rank 3 is 5 times slower) and links under every algorithm, least hurt first."""
    found = []
    for algorithm in algorithms or ALGORITHMS[collective]:
        options = {}
        if algorithm == "hierarchical" and fabric.local_size > 1:
            options["local_size"] = fabric.local_size
        schedule = build(collective, algorithm, world_size, **options)
        numel = nbytes * world_size if collective == "all_to_all" else nbytes
        healthy = max(timeline(schedule, numel, 1, fabric))
        slow = max(timeline(schedule, numel, 1, fabric, slow_ranks, slow_links))
        found.append(Effect(algorithm, healthy, slow))
    return sorted(found, key=lambda effect: effect.factor)


# ---- In and out ------------------------------------------------------------------------------------------------------


def _checked(schedule: Schedule, inputs: Sequence[Array]) -> list[Array]:
    n = schedule.world_size
    if len(inputs) != n:
        raise ValueError(f"{n} ranks need {n} inputs, got {len(inputs)}.")
    arrays = [np.asarray(i) for i in inputs]
    for rank, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise ValueError(
                f"inputs differ in dtype: rank {rank} has {array.dtype}, rank 0 has {arrays[0].dtype}. "
                "Every rank must bring the same."
            )
    if schedule.collective == "all_gather":
        sizes = [hi - lo for lo, hi in chunk_bounds(sum(a.size for a in arrays), n)]
        got = [a.size for a in arrays]
        if got != sizes:
            raise ValueError(f"all_gather of {sum(got)} elements needs shards of sizes {sizes}, got {got}.")
    else:
        for rank, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise ValueError(
                    f"inputs differ in shape: rank {rank} has {array.shape}, rank 0 has {arrays[0].shape}. "
                    "Every rank must bring the same."
                )
    return [array.ravel() for array in arrays]


def _start(schedule: Schedule, contract: Contract, flats: list[Array]) -> State:
    """What each rank holds before the first step, cut in chunks."""
    n, chunks = schedule.world_size, schedule.chunks
    state: State = [{} for _ in range(n)]
    if schedule.collective == "all_to_all":
        bounds = chunk_bounds(flats[0].size, chunks // n)  # of each rank's own pieces
        places = [bounds[chunk % len(bounds)] for chunk in range(chunks)]
    elif schedule.collective == "all_gather":
        everywhere = chunk_bounds(sum(flat.size for flat in flats), chunks)
        first = [everywhere[rank * chunks // n][0] for rank in range(n)]  # where each rank's shard begins
        places = [(lo - first[c * n // chunks], hi - first[c * n // chunks]) for c, (lo, hi) in enumerate(everywhere)]
    else:
        places = chunk_bounds(flats[0].size, chunks)
    for chunk, (lo, hi) in enumerate(places):
        for rank in contract.holders(chunk):
            state[rank][chunk] = flats[rank][lo:hi]
    return state


def _outputs(schedule: Schedule, contract: Contract, state: State, shape: tuple[int, ...]) -> list[Array | None]:
    due: list[list[Array]] = [[] for _ in range(schedule.world_size)]
    for chunk in range(schedule.chunks):
        for rank in contract.receivers(chunk):
            if chunk not in state[rank]:
                raise ValueError(
                    f"{schedule.algorithm} {schedule.collective} leaves rank {rank} without chunk {chunk}."
                )
            due[rank].append(state[rank][chunk])
    whole = schedule.collective in ("all_reduce", "reduce", "broadcast")
    joined = [np.concatenate(parts) if parts else None for parts in due]
    return [out.reshape(shape) if whole and out is not None else out for out in joined]
