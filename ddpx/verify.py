"""A symbolic proof that a schedule keeps its collective's contract.

The idea: run the schedule on expressions instead of numbers. Each rank's part of a chunk is a leaf; a move that
copies passes an expression on, a move that adds makes a node. Equal expressions are made once (hash-consing), so
"every rank exactly once" and "the same bits on every rank" are questions about the expressions left at the end.
Chunks that the moves never tell apart are proved once for all.

What a collective promises, `part(r)` being what rank r held of a chunk at the start:

    collective      who holds a chunk at the start      who must hold what at the end
    all_reduce      every rank its part                 every rank the sum of all parts, as one expression
    reduce          every rank its part                 the root the sum of all parts
    reduce_scatter  every rank its part                 the chunk's owner the sum of all parts
    all_gather      its owner                           every rank the owner's part
    broadcast       the root                            every rank the root's part
    all_to_all      its sender                          its receiver the sender's part

Chunk c of C belongs to rank c * n // C. In all_to_all there are n * n chunks (or k to each): chunk s * n + d is what
rank s has for rank d. At the start, whoever does not hold a chunk holds nothing that may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter

from ddpx.schedule import COLLECTIVES, Move, Schedule, grid

Owner = Callable[[int], int]  # chunk -> rank


class ContractError(ValueError):
    """A schedule that does not do what its collective promises; the text ends with the step grid, bad row marked."""

    def __init__(self, schedule: Schedule, problem: str, step: int, rank: int, chunk: int) -> None:
        self.algorithm, self.world_size = schedule.algorithm, schedule.world_size
        self.step, self.rank, self.chunk = step, rank, chunk
        where = f"{schedule.algorithm} {schedule.collective}, n={schedule.world_size}"
        super().__init__(
            f"{where}, step {step}, rank {rank}, chunk {chunk}: {problem}\n{grid(schedule, mark=(step, rank))}"
        )


@dataclass(frozen=True, slots=True)
class Overwrite:
    """At `step`, `rank` overwrites chunks [lo, hi) while peers read the old value: keep a copy for them."""

    step: int
    rank: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Proof:
    """What `verify` found. A Proof exists only of a schedule that keeps its contract.

    `same_bits`: all ranks that end with a sum have it from the same expression, so the same bits (IEEE addition of two
    numbers commutes; NaN payloads aside). `overwrites`: where a step reads what it overwrites.
    """

    algorithm: str
    collective: str
    world_size: int
    same_bits: bool
    overwrites: tuple[Overwrite, ...]


def verify(schedule: Schedule, *, owner: Owner | None = None, same_bits: bool = True) -> Proof:
    """Prove that `schedule` keeps its collective's contract, or raise ContractError naming step, rank and chunk.

    `owner` replaces the map from chunk to owning rank, for halves of algorithms such as the textbook ring. With
    `same_bits=False`, an all-reduce whose ranks add in different orders passes and the Proof says so.
    """
    contract = Contract(schedule, owner)
    _check_form(schedule)
    all_same = True
    overwrites = []
    for lo, hi, moves in _by_chunk(schedule, contract.tells_chunks_apart):
        run = _Run(schedule, contract, lo, moves)
        all_same &= run.check(same_bits)
        overwrites += [Overwrite(step, rank, lo, hi) for step, rank in run.overwrites]
    return Proof(schedule.algorithm, schedule.collective, schedule.world_size, all_same, _joined(overwrites))


def expression(schedule: Schedule, rank: int, chunk: int, *, owner: Owner | None = None) -> str:
    """What `rank` holds of `chunk` at the end, written out: `((r0+r1)+r2)+r3`; `nothing` if it never got any."""
    contract = Contract(schedule, owner)
    moves = [m for m in schedule.moves if m.lo <= chunk < m.hi]
    run = _Run(schedule, contract, chunk, moves)
    return run.written_out(rank)


# ---- The contract ----------------------------------------------------------------------------------------------------


class Contract:
    """The table of the module docstring as code: `holders(chunk)` at the start, `receivers(chunk)` at the end.

    ValueError if the schedule's ranks, chunks or root make no sense for its collective.
    """

    def __init__(self, schedule: Schedule, owner: Owner | None = None) -> None:
        self.collective = schedule.collective
        n, chunks, root = schedule.world_size, schedule.chunks, schedule.root
        if self.collective not in COLLECTIVES:
            raise ValueError(f"unknown collective {self.collective!r}; known: {', '.join(COLLECTIVES)}.")
        if n < 1 or chunks < 1 or not 0 <= root < n:
            raise ValueError(f"a schedule needs ranks, chunks and a root of its own, got {n}, {chunks} and {root}.")
        multiple = {"reduce_scatter": n, "all_gather": n, "all_to_all": n * n}.get(self.collective, 1)
        if owner is None and chunks % multiple:
            raise ValueError(f"{self.collective} over {n} ranks needs a multiple of {multiple} chunks, got {chunks}.")
        self.sums = self.collective in ("all_reduce", "reduce", "reduce_scatter")
        self.tells_chunks_apart = self.collective in ("reduce_scatter", "all_gather", "all_to_all")
        own = owner or (lambda chunk: chunk * n // chunks)
        everyone = range(n)
        start: dict[str, Callable[[int], Iterable[int]]] = {
            "all_gather": lambda chunk: (own(chunk),),
            "broadcast": lambda chunk: (root,),
            "all_to_all": lambda chunk: (own(chunk),),
        }
        end: dict[str, Callable[[int], Iterable[int]]] = {
            "reduce": lambda chunk: (root,),
            "reduce_scatter": lambda chunk: (own(chunk),),
            "all_to_all": lambda chunk: (chunk * n * n // chunks % n,),
        }
        self.holders: Callable[[int], Iterable[int]] = start.get(self.collective, lambda chunk: everyone)
        self.receivers: Callable[[int], Iterable[int]] = end.get(self.collective, lambda chunk: everyone)


def _check_form(schedule: Schedule) -> None:
    """Every move makes sense on its own, and no step writes a chunk of a rank twice."""
    ranks = range(schedule.world_size)
    previous = Move(-1, 0, (), 0, 0)
    reach = 0
    # Moves are sorted by step, dst, srcs; ranges of one (step, dst) need their own order to find overlaps.
    for m in sorted(schedule.moves, key=attrgetter("step", "dst", "lo")):
        problem = None
        if m.step < 0:
            problem = "steps count from 0"
        elif not m.srcs or m.dst not in ranks or any(s not in ranks for s in m.srcs):
            problem = f"dst {m.dst} and srcs {m.srcs} must be ranks 0..{schedule.world_size - 1}"
        elif len(set(m.srcs)) != len(m.srcs):
            problem = f"srcs {m.srcs} name a rank twice"
        elif not 0 <= m.lo < m.hi <= schedule.chunks:
            problem = f"chunks [{m.lo}, {m.hi}) are not a range within [0, {schedule.chunks})"
        elif (m.step, m.dst) == (previous.step, previous.dst) and m.lo < reach:
            problem = f"written twice in one step, by {previous} and {m}"
        if problem:
            raise ContractError(schedule, problem, m.step, m.dst, m.lo)
        reach, previous = m.hi, m


def _by_chunk(schedule: Schedule, single: bool) -> Iterator[tuple[int, int, list[Move]]]:
    """Runs of chunks [lo, hi) that every move treats alike, each with its moves in order; `single`: one chunk a run."""
    if single:
        cuts = list(range(schedule.chunks + 1))
    else:
        cuts = sorted({0, schedule.chunks} | {m.lo for m in schedule.moves} | {m.hi for m in schedule.moves})
    place = {cut: index for index, cut in enumerate(cuts)}
    moves: list[list[Move]] = [[] for _ in cuts[1:]]
    for m in schedule.moves:
        for index in range(place[m.lo], place[m.hi]):
            moves[index].append(m)
    for (lo, hi), touching in zip(pairwise(cuts), moves, strict=True):
        yield lo, hi, touching


def _joined(overwrites: list[Overwrite]) -> tuple[Overwrite, ...]:
    """Sorted, with neighbouring ranges of one step and rank made one."""
    joined: list[Overwrite] = []
    for o in sorted(overwrites, key=attrgetter("step", "rank", "lo")):
        if joined and (joined[-1].step, joined[-1].rank, joined[-1].hi) == (o.step, o.rank, o.lo):
            joined[-1] = Overwrite(o.step, o.rank, joined[-1].lo, o.hi)
        else:
            joined.append(o)
    return tuple(joined)


# ---- The symbolic run of one chunk -----------------------------------------------------------------------------------


class _Run:
    """One chunk carried through all its moves. Node r < n is the part of rank r; the rest are sums, made once each."""

    def __init__(self, schedule: Schedule, contract: Contract, chunk: int, moves: list[Move]) -> None:
        n = schedule.world_size
        self.schedule, self.contract, self.chunk = schedule, contract, chunk
        self.terms: list[tuple[int, ...]] = [()] * n  # the nodes that a sum adds, in order
        self.has = [1 << rank for rank in range(n)]  # bit r: the part of rank r is in the node
        self.twice: dict[int, int] = {}  # node -> the step that first added a part a second time
        self.known: dict[tuple[int, ...], int] = {}
        self.held = {rank: rank for rank in contract.holders(chunk)}
        self.written: dict[int, int] = {}  # rank -> last step that wrote here
        self.overwrites: list[tuple[int, int]] = []
        for step, together in groupby(moves, attrgetter("step")):
            self.advance(step, list(together))

    def advance(self, step: int, moves: list[Move]) -> None:
        new = {m.dst: self.result(m) for m in moves}
        if len(moves) > 1:
            read = {src for m in moves for src in m.srcs if src != m.dst}
            self.overwrites += [(step, rank) for rank in sorted(read & new.keys())]
        self.held.update(new)
        for dst in new:
            self.written[dst] = step

    def result(self, m: Move) -> int:
        try:
            nodes = [self.held[src] for src in m.srcs]
        except KeyError as missing:
            problem = f"reads from rank {missing.args[0]}, which holds nothing there yet"
            raise ContractError(self.schedule, problem, m.step, m.dst, self.chunk) from None
        return nodes[0] if len(nodes) == 1 else self.add(nodes, m.step)

    def add(self, nodes: list[int], step: int) -> int:
        first, second, *rest = nodes
        key = (min(first, second), max(first, second), *rest)  # a + b == b + a, also where a third follows
        node = self.known.get(key)
        if node is None:
            node = self.known[key] = len(self.terms)
            has = 0
            for term in key:
                if has & self.has[term]:
                    self.twice.setdefault(node, step)
                if term in self.twice:
                    self.twice[node] = self.twice[term]
                has |= self.has[term]
            self.terms.append(tuple(nodes))
            self.has.append(has)
        return node

    def check(self, same_bits: bool) -> bool:
        """Compare with what is due; True if every receiver holds the same expression."""
        receivers = list(self.contract.receivers(self.chunk))
        nodes = {rank: self.held.get(rank) for rank in receivers}
        for rank, node in nodes.items():
            if problem := self.difference(node):
                step = self.twice.get(node, -1) if node is not None else -1
                step = self.written.get(rank, self.schedule.steps - 1) if step < 0 else step
                raise ContractError(self.schedule, problem, max(step, 0), rank, self.chunk)
        odd = next((rank for rank in receivers if nodes[rank] != nodes[receivers[0]]), None)
        if odd is not None and same_bits:
            problem = f"adds in another order than rank {receivers[0]}, so their bits may differ: "
            problem += f"{self.written_out(odd)} here, {self.written_out(receivers[0])} there"
            raise ContractError(self.schedule, problem, self.written.get(odd, 0), odd, self.chunk)
        return odd is None

    def difference(self, node: int | None) -> str | None:
        """What is wrong with this result, if anything."""
        if node is None:
            return "ends with nothing there"
        if not self.contract.sums:
            (due,) = self.contract.holders(self.chunk)
            return None if node == due else f"ends with {self.show(node)}, not with what rank {due} held at the start"
        n = self.schedule.world_size
        if missing := ~self.has[node] & ((1 << n) - 1):
            return f"ends without the part of {_ranks(missing)}: {self.show(node)}"
        if node in self.twice:
            return f"the sum that ends here has a part added twice: {self.show(node)}"
        return None

    def written_out(self, rank: int) -> str:
        return self.show(self.held[rank]) if rank in self.held else "nothing"

    def show(self, node: int, limit: int = 200) -> str:
        """The node as text, cut at `limit` characters: a damaged sum can be exponentially long."""
        text = ""
        stack: list[int | str] = [node]
        while stack and len(text) <= limit:
            top = stack.pop()
            if isinstance(top, str):
                text += top
            elif not self.terms[top]:
                text += f"r{top}"
            else:
                parts: list[int | str] = [")" if top != node else ""]
                for term in reversed(self.terms[top]):
                    parts += [term, "+"]
                parts[-1] = "(" if top != node else ""
                stack += parts
        return text if len(text) <= limit else text[:limit] + "..."


def _ranks(mask: int) -> str:
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
