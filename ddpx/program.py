"""What one rank does, step by step: a schedule seen from one place, with its waits worked out. Pure.

A schedule says what moves; a program adds when it may. On a mapped transport a rank reads its peers' memory, so two
hazards have to be kept apart by waiting for the peer's clock:

- read after write: what I read must have been written by its owner (or be there since the start);
- write after read: what I overwrite must have been read by all who need the old value, also after the last step.

Ticks within a plan: 1 = my input is ready; 2 + 2s = I have read what step s needs; 3 + 2s = step s is written. Only
ticks that somebody waits for are published.

A sum may also be *delivered*: the rank that computes it writes it into its peers' memory while it still is in its
cache, in place of their copying it in a later step. It has waited for all of them as sources, and they wait for it at
the end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from ddpx.schedule import Move, Schedule

READY = 1


def read_tick(step: int) -> int:
    return 2 + 2 * step


def write_tick(step: int) -> int:
    return 3 + 2 * step


@dataclass(frozen=True, slots=True)
class MappedStep:
    """One step of one rank. `staged[i]`: move i is computed aside and written only after `write_waits`."""

    step: int
    waits: tuple[tuple[int, int], ...]  # (peer, tick) before computing
    moves: tuple[Move, ...]  # those that write here
    staged: tuple[bool, ...]
    read_published: int | None
    write_waits: tuple[tuple[int, int], ...]  # (peer, tick) before the staged writes
    write_published: int | None
    deliveries: tuple[tuple[int, ...], ...] = ()  # by move: the peers that get its result, too


@dataclass(frozen=True, slots=True)
class MappedProgram:
    """All steps of one rank; `ticks` is how far the clock advances over a plan, the same on every rank."""

    ready_published: bool
    steps: tuple[MappedStep, ...]
    end_waits: tuple[tuple[int, int], ...]  # peers that may still read my memory
    ticks: int


@dataclass(frozen=True, slots=True)
class MessageStep:
    """One step of one rank: (peer, move) to send, (peer, move, into place or aside) to receive, then its moves."""

    sends: tuple[tuple[int, Move], ...]
    receives: tuple[tuple[int, Move, bool], ...]  # True: straight into place
    moves: tuple[Move, ...]


@lru_cache(maxsize=64)
def mapped_programs(schedule: Schedule, deliver: bool = False) -> tuple[MappedProgram, ...]:
    """Every rank's program on a mapped transport. Kept, since all buckets of a size share a schedule.

    `deliver`: sums may be written into peers' memory, where that saves every rank the same.
    """
    delivered = deliveries(schedule) if deliver else {}
    if delivered:
        schedule = replace(schedule, moves=tuple(delivered))
    drafts = [_draft(schedule, rank, delivered) for rank in range(schedule.world_size)]
    awaited: dict[int, set[int]] = defaultdict(set)
    for draft in drafts:
        for step in draft.steps:
            for peer, tick in (*step.waits, *step.write_waits):
                awaited[peer].add(tick)
        for peer, tick in draft.end_waits:
            awaited[peer].add(tick)
    return tuple(_publish_what_is_awaited(draft, awaited[rank]) for rank, draft in enumerate(drafts))


@lru_cache(maxsize=64)
def deliveries(schedule: Schedule) -> dict[Move, tuple[int, ...]]:
    """The sums of a schedule whose every copy hands a sum on to one of its sources: move -> the ranks it goes to.

    Empty where the schedule does anything else, or where one rank would deliver more than another: then copying, which
    all ranks do at once, is faster.
    """
    sums = [move for move in schedule.moves if len(move.srcs) > 1]
    made = {(move.dst, move.lo, move.hi): move for move in sums}
    delivered: dict[Move, list[int]] = {move: [] for move in sums}
    touched: set[tuple[int, int]] = set()  # (rank, chunk) that a sum has read or written: each once, so none can clash
    for move in sums:
        places = {(source, chunk) for source in {*move.srcs, move.dst} for chunk in range(move.lo, move.hi)}
        if touched & places:
            return {}
        touched |= places
    for copy in schedule.moves:
        if len(copy.srcs) == 1:
            source = made.get((copy.srcs[0], copy.lo, copy.hi))
            if source is None or source.step >= copy.step or copy.dst not in source.srcs:
                return {}
            delivered[source].append(copy.dst)
    work = [0] * schedule.world_size
    for move, ranks in delivered.items():
        work[move.dst] += len(ranks) * (move.hi - move.lo)
    even = len(set(work)) == 1 and work[0] > 0
    return {move: tuple(sorted(ranks)) for move, ranks in delivered.items()} if even else {}


def _draft(schedule: Schedule, rank: int, delivered: dict[Move, tuple[int, ...]]) -> MappedProgram:
    last_write: dict[tuple[int, int], int] = {}  # (owner, chunk) -> step
    readers: dict[int, dict[int, int]] = defaultdict(dict)  # my chunk -> reader -> last step it reads in
    seen: dict[int, int] = {}  # peer -> tick that I have already waited for

    def waits(needs: dict[int, int]) -> tuple[tuple[int, int], ...]:
        fresh = {peer: tick for peer, tick in needs.items() if tick > seen.get(peer, 0)}
        seen.update(fresh)
        return tuple(sorted(fresh.items()))

    steps = []
    for number, moves in enumerate(schedule.by_step()):
        mine = [move for move in moves if move.dst == rank]
        read_now = {
            (move.dst, chunk)
            for move in moves
            if move.dst != rank and rank in move.srcs
            for chunk in range(move.lo, move.hi)
        }
        read_chunks = {chunk for _, chunk in read_now}
        needs: dict[int, int] = {}
        for move in mine:
            for source in move.srcs:
                if source != rank:
                    for chunk in range(move.lo, move.hi):
                        written = last_write.get((source, chunk))
                        tick = READY if written is None else write_tick(written)
                        needs[source] = max(needs.get(source, 0), tick)
        staged = tuple(any(chunk in read_chunks for chunk in range(move.lo, move.hi)) for move in mine)
        late: dict[int, int] = {}
        for move, aside in zip(mine, staged, strict=True):
            into = late if aside else needs
            for chunk in range(move.lo, move.hi):
                for reader, step in readers[chunk].items():
                    into[reader] = max(into.get(reader, 0), read_tick(step))
        for reader, chunk in read_now:
            readers[chunk][reader] = number
            if any(a and m.lo <= chunk < m.hi for m, a in zip(mine, staged, strict=True)):
                late[reader] = max(late.get(reader, 0), read_tick(number))
        for move in moves:
            for chunk in range(move.lo, move.hi):
                last_write[(move.dst, chunk)] = number
        if mine:
            onward = tuple(delivered.get(move, ()) for move in mine)
            ticks = read_tick(number), write_tick(number)
            steps.append(MappedStep(number, waits(needs), tuple(mine), staged, ticks[0], waits(late), ticks[1], onward))
    end = {move.dst: write_tick(move.step) for move, ranks in delivered.items() if rank in ranks}
    for chunk_readers in readers.values():
        for reader, step in chunk_readers.items():
            end[reader] = max(end.get(reader, 0), read_tick(step))
    return MappedProgram(True, tuple(steps), waits(end), write_tick(schedule.steps))


def _publish_what_is_awaited(draft: MappedProgram, awaited: set[int]) -> MappedProgram:
    published = READY if READY in awaited else 0
    steps = []
    for step in draft.steps:
        ticks: list[int | None] = []
        two_phases = any(step.staged)
        for tick in (step.read_published if two_phases else None, step.write_published):
            wanted = tick is not None and any(published < other <= tick for other in awaited)
            ticks.append(tick if wanted else None)
            published = tick if wanted and tick is not None else published
        steps.append(replace(step, read_published=ticks[0], write_published=ticks[1]))
    return MappedProgram(READY in awaited, tuple(steps), draft.end_waits, draft.ticks)


@lru_cache(maxsize=256)
def message_program(schedule: Schedule, rank: int) -> tuple[MessageStep, ...]:
    """One rank's program on a message transport; steps in which it has nothing to do are left out.

    A copy lands in place unless the same step also sends or adds what stands there; everything else lands aside.
    """
    program = []
    for moves in schedule.by_step():
        mine = tuple(move for move in moves if move.dst == rank)
        sends = tuple((move.dst, move) for move in moves if move.dst != rank and rank in move.srcs)
        sent = {chunk for _, move in sends for chunk in range(move.lo, move.hi)}
        used = {chunk for move in mine if rank in move.srcs for chunk in range(move.lo, move.hi)}
        receives = []
        for move in mine:
            in_place = len(move.srcs) == 1 and not (sent | used) & set(range(move.lo, move.hi))
            receives += [(source, move, in_place) for source in move.srcs if source != rank]
        if mine or sends:
            program.append(MessageStep(sends, tuple(receives), mine))
    return tuple(program)


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive steps that stay within hosts (`schedule` is then this host's part, in local ranks) or do not."""

    local: bool
    schedule: Schedule


@lru_cache(maxsize=64)
def phases(schedule: Schedule, nodes: tuple[tuple[int, ...], ...], rank: int) -> tuple[Phase, ...]:
    """A schedule as phases for `rank`, where `nodes` are the ranks of each host.

    Raises ValueError for a step with moves of both kinds: then neither transport could run it alone.
    """
    node_of = {member: number for number, node in enumerate(nodes) for member in node}
    mine = nodes[node_of[rank]]
    found: list[tuple[bool, list[Move]]] = []
    for number, moves in enumerate(schedule.by_step()):
        kinds = {all(node_of[source] == node_of[move.dst] for source in move.srcs) for move in moves}
        if len(kinds) > 1:
            raise ValueError(f"step {number} of {schedule.algorithm} moves both within hosts and between them")
        for kind in kinds:
            if not found or found[-1][0] is not kind:
                found.append((kind, []))
            found[-1][1].extend(moves)
    result = []
    for local, moves in found:
        if local:
            inside = [move for move in moves if move.dst in mine]
            part = replace(
                schedule, world_size=len(mine), root=0, moves=tuple(_localised(move, mine) for move in inside)
            )
        else:
            part = replace(schedule, moves=tuple(moves))
        result.append(Phase(local, part))
    return tuple(result)


def _localised(move: Move, ranks: tuple[int, ...]) -> Move:
    return replace(move, dst=ranks.index(move.dst), srcs=tuple(ranks.index(source) for source in move.srcs))


def partial_sums_travel(schedule: Schedule) -> bool:
    """Whether a sum is read again by another sum. If not (direct), rounding once per result is free."""
    summed: set[tuple[int, int]] = set()
    for moves in schedule.by_step():
        for move in moves:
            for chunk in range(move.lo, move.hi):
                if len(move.srcs) > 1 and any((source, chunk) in summed for source in move.srcs):
                    return True
        for move in moves:
            for chunk in range(move.lo, move.hi):
                if len(move.srcs) > 1 or (move.srcs[0], chunk) in summed:
                    summed.add((move.dst, chunk))
                else:
                    summed.discard((move.dst, chunk))
    return False


def busiest_end(schedule: Schedule, rank: int) -> dict[int, tuple[tuple[Move, ...], ...]]:
    """By step: the ends that limit what enters `rank` on a network, each as the moves that pass it.

    The first end is the rank's own, where everything arrives; the others are those of its sources, which may serve
    several ranks in the same step. A move passes a source's end once for each rank it goes to.
    """
    ends: dict[int, tuple[tuple[Move, ...], ...]] = {}
    for number, moves in enumerate(schedule.by_step()):
        arriving = [move for move in moves if move.dst == rank for source in move.srcs if source != rank]
        if arriving:
            sources = sorted({source for move in arriving for source in move.srcs if source != rank})
            leaving = [tuple(m for m in moves if source in m.srcs and m.dst != source) for source in sources]
            ends[number] = (tuple(arriving), *leaving)
    return ends
