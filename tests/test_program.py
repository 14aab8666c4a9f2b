"""Programs are safe in every order in which ranks may run: played out step by step, with the ranks in random turns.

The player knows nothing of time: any rank that does not wait may go next, and reading and writing are turns of their
own, so a missing wait shows as a wrong value in some order. Values are symbols, so a wrong one is not right by chance.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from ddpx.algorithms import ALGORITHMS, build
from ddpx.program import (
    READY,
    MappedProgram,
    MessageStep,
    busiest_end,
    deliveries,
    mapped_programs,
    message_program,
    partial_sums_travel,
    read_tick,
    write_tick,
)
from ddpx.schedule import Move, Schedule

Value = object  # ("input", run, rank, chunk), or a tuple of the values added, in order
Memory = list[list[Value]]  # by rank and chunk

NAMES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]


class Deadlock(AssertionError):
    """Every rank waits."""


def combined(values: Sequence[Value]) -> Value:
    return values[0] if len(values) == 1 else ("sum", *values)


def inputs(run: int, rank: int, chunks: int) -> list[Value]:
    return [("input", run, rank, chunk) for chunk in range(chunks)]


def in_lockstep(schedule: Schedule, run: int) -> Memory:
    """What the schedule says, taken literally: all reads of a step come before all its writes."""
    memory = [inputs(run, rank, schedule.chunks) for rank in range(schedule.world_size)]
    for moves in schedule.by_step():
        new = [
            (move.dst, chunk, combined([memory[source][chunk] for source in move.srcs]))
            for move in moves
            for chunk in range(move.lo, move.hi)
        ]
        for rank, chunk, value in new:
            memory[rank][chunk] = value
    return memory


# ---- A player for mapped programs ------------------------------------------------------------------------------------

Turn = tuple[int, int] | None  # (peer, clock) to wait for, or None: may go on


def mapped_rank(
    rank: int, program: MappedProgram, memory: Memory, clocks: list[int], results: list[Memory], runs: int
) -> Iterator[Turn]:
    """One rank as ddpx.execute runs it; yields before everything that others could notice."""
    base = 0
    for run in range(runs):
        memory[rank][:] = inputs(run, rank, len(memory[rank]))
        yield None
        if program.ready_published:
            clocks[rank] = base + READY
            yield None
        for step in program.steps:
            for peer, tick in step.waits:
                yield peer, base + tick
            aside = []
            for move, staged, delivered in zip(step.moves, step.staged, step.deliveries, strict=True):
                for chunk in range(move.lo, move.hi):
                    values = []
                    for source in move.srcs:
                        values.append(memory[source][chunk])
                        if source != rank:
                            yield None
                    if staged:
                        aside.append((chunk, combined(values)))
                    else:
                        memory[rank][chunk] = combined(values)
                        yield None
                    for peer in delivered:
                        memory[peer][chunk] = combined(values)
                        yield None
            if step.read_published is not None:
                clocks[rank] = base + step.read_published
                yield None
            for peer, tick in step.write_waits:
                yield peer, base + tick
            for chunk, value in aside:
                memory[rank][chunk] = value
                yield None
            if step.write_published is not None:
                clocks[rank] = base + step.write_published
                yield None
        for peer, tick in program.end_waits:
            yield peer, base + tick
        results[run][rank] = list(memory[rank])
        base += program.ticks


def play(programs: Sequence[MappedProgram], chunks: int, seed: int, runs: int = 2) -> list[Memory]:
    """Run all ranks in random turns, some far more often than others; what each rank holds after each run."""
    generator = random.Random(seed)
    n = len(programs)
    memory: Memory = [[None] * chunks for _ in range(n)]
    clocks = [0] * n
    results: list[Memory] = [[[] for _ in range(n)] for _ in range(runs)]
    ranks = {rank: mapped_rank(rank, programs[rank], memory, clocks, results, runs) for rank in range(n)}
    waiting: dict[int, Turn] = dict.fromkeys(ranks)
    pace = [generator.choice((1, 1, 5, 100)) for _ in range(n)]
    while ranks:
        ready = [rank for rank in ranks if (turn := waiting[rank]) is None or clocks[turn[0]] >= turn[1]]
        if not ready:
            raise Deadlock(f"every rank waits: {waiting}, clocks {clocks}")
        rank = generator.choices(ready, [pace[rank] for rank in ready])[0]
        try:
            waiting[rank] = next(ranks[rank])
        except StopIteration:
            del ranks[rank]
    return results


def outcome(schedule: Schedule, programs: Sequence[MappedProgram], seed: int) -> bool:
    """Whether a play gives on every rank what the schedule says, in two runs back to back."""
    try:
        return play(programs, schedule.chunks, seed) == [in_lockstep(schedule, run) for run in range(2)]
    except Deadlock:
        return False


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_every_order_of_ranks_gives_what_the_schedule_says(collective: str, algorithm: str) -> None:
    for n in (1, 2, 3, 4, 5, 6, 8, 9):
        schedule = build(collective, algorithm, n)
        programs = mapped_programs(schedule)
        for seed in range(12 if n < 6 else 4):
            assert play(programs, schedule.chunks, seed) == [in_lockstep(schedule, run) for run in range(2)], seed


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_delivered_sums_are_those_of_the_schedule_in_every_order(collective: str, algorithm: str) -> None:
    for n in (2, 3, 4, 5):
        schedule = build(collective, algorithm, n)
        programs = mapped_programs(schedule, deliver=True)
        for seed in range(12):
            results = play(programs, schedule.chunks, seed)
            assert results == [in_lockstep(schedule, run) for run in range(2)], seed


def test_sums_are_delivered_where_every_rank_delivers_the_same() -> None:
    found = {
        (collective, algorithm, n)
        for collective, algorithm in NAMES
        for n in (2, 3, 4, 5, 8)
        if deliveries(build(collective, algorithm, n))
    }
    of_two = ("ring", "halving_doubling", "circulant")  # then the same as direct; so is hierarchical on one host
    direct = {("all_reduce", name, n) for name in ("direct", "hierarchical") for n in (2, 3, 4, 5, 8)}
    assert found == direct | {("all_reduce", name, 2) for name in of_two}
    assert deliveries(build("all_reduce", "direct", 3)) == {
        Move(0, rank, (0, 1, 2), rank, rank + 1): tuple(peer for peer in range(3) if peer != rank) for rank in range(3)
    }


def test_a_delivered_program_meets_twice() -> None:
    for program in mapped_programs(build("all_reduce", "direct", 4), deliver=True):
        assert program.ready_published and len(program.steps) == 1
        assert len(program.steps[0].waits) == len(program.end_waits) == 3


def test_a_step_may_swap_two_ranks_and_reuse_a_chunk() -> None:
    schedule = Schedule(
        "by_hand",
        "all_reduce",
        3,
        2,
        (
            Move(0, 0, (1,), 0, 1),  # swap chunk 0 of ranks 0 and 1,
            Move(0, 1, (0,), 0, 1),
            Move(0, 2, (0, 2), 1, 2),  # while rank 2 reads another one of rank 0,
            Move(1, 0, (0, 2), 1, 2),  # which is written next
            Move(1, 2, (1,), 0, 1),
            Move(2, 1, (2, 0, 1), 0, 2),
        ),
    )
    for seed in range(200):
        assert outcome(schedule, mapped_programs(schedule), seed), seed


def without_end_waits(program: MappedProgram) -> MappedProgram:
    return dataclasses.replace(program, end_waits=())


def without_staging(program: MappedProgram) -> MappedProgram:
    steps = [dataclasses.replace(step, staged=(False,) * len(step.moves), write_waits=()) for step in program.steps]
    return dataclasses.replace(program, steps=tuple(steps))


def without_write_waits(program: MappedProgram) -> MappedProgram:
    return dataclasses.replace(
        program, steps=tuple(dataclasses.replace(step, write_waits=()) for step in program.steps)
    )


def without_the_last_wait(program: MappedProgram) -> MappedProgram:
    steps = list(program.steps)
    last = max((number for number, step in enumerate(steps) if step.waits), default=None)
    if last is not None:
        steps[last] = dataclasses.replace(steps[last], waits=steps[last].waits[:-1])
    return dataclasses.replace(program, steps=tuple(steps))


def without_one_end_wait(program: MappedProgram) -> MappedProgram:
    return dataclasses.replace(program, end_waits=program.end_waits[1:])


@pytest.mark.parametrize("damage", [without_one_end_wait, without_the_last_wait])
def test_the_player_finds_a_missing_wait_for_a_delivery(damage: Callable[[MappedProgram], MappedProgram]) -> None:
    schedule = build("all_reduce", "direct", 4)
    damaged = [damage(program) for program in mapped_programs(schedule, deliver=True)]
    assert not all(outcome(schedule, damaged, seed) for seed in range(50))


@pytest.mark.parametrize(
    ("algorithm", "damage"),
    [
        ("ring", without_end_waits),
        ("tree", without_end_waits),
        ("direct", without_end_waits),
        ("ring", without_the_last_wait),
        ("tree", without_the_last_wait),
        ("direct", without_the_last_wait),
        ("doubling", without_staging),
        ("doubling", without_write_waits),
    ],
)
def test_the_player_finds_a_missing_wait(algorithm: str, damage: Callable[[MappedProgram], MappedProgram]) -> None:
    schedule = build("all_reduce", algorithm, 4)
    damaged = [damage(program) for program in mapped_programs(schedule)]
    assert not all(outcome(schedule, damaged, seed) for seed in range(50))


def test_a_rank_that_is_not_waited_for_publishes_nothing() -> None:
    schedule = build("broadcast", "tree", 2)
    root, leaf = mapped_programs(schedule)
    assert root.ready_published and not root.steps
    assert root.end_waits == ((1, read_tick(0)),)
    assert not leaf.ready_published and leaf.steps[0].waits == ((0, READY),)
    assert leaf.steps[0].write_published == write_tick(0)  # says that it has read, too


def test_all_ranks_advance_their_clocks_alike() -> None:
    for collective, algorithm in NAMES:
        programs = mapped_programs(build(collective, algorithm, 5))
        assert len({program.ticks for program in programs}) == 1


def test_no_program_waits_beyond_its_own_plan() -> None:
    for collective, algorithm in NAMES:
        for program in mapped_programs(build(collective, algorithm, 6)):
            waits = [*program.end_waits, *(wait for step in program.steps for wait in (*step.waits, *step.write_waits))]
            assert all(0 < tick < program.ticks for _, tick in waits)


# ---- Messages --------------------------------------------------------------------------------------------------------


def play_messages(schedule: Schedule, programs: Sequence[Sequence[MessageStep]]) -> Memory:
    """Each rank runs its steps in order and sends without waiting; a message is matched by its place in line."""
    n = schedule.world_size
    memory = [inputs(0, rank, schedule.chunks) for rank in range(n)]
    lines: dict[tuple[int, int], list[dict[int, Value]]] = {}
    position = [0] * n
    posted = [False] * n
    while any(position[rank] < len(programs[rank]) for rank in range(n)):
        moved = False
        for rank in range(n):
            if position[rank] == len(programs[rank]):
                continue
            step = programs[rank][position[rank]]
            if not posted[rank]:
                posted[rank] = moved = True
                for peer, move in step.sends:
                    cargo = {chunk: memory[rank][chunk] for chunk in range(move.lo, move.hi)}
                    lines.setdefault((rank, peer), []).append(cargo)
            sources = [peer for peer, _, _ in step.receives]
            if any(len(lines.get((peer, rank), [])) < sources.count(peer) for peer in sources):
                continue
            arrived: dict[tuple[int, int], dict[int, Value]] = {}
            for peer, move, in_place in step.receives:
                cargo = lines[peer, rank].pop(0)
                assert sorted(cargo) == list(range(move.lo, move.hi))
                arrived[peer, move.lo] = cargo
                if in_place:
                    for chunk, value in cargo.items():
                        memory[rank][chunk] = value
            new = []
            for move in step.moves:
                for chunk in range(move.lo, move.hi):
                    values = [
                        memory[rank][chunk] if source == rank else arrived[source, move.lo][chunk]
                        for source in move.srcs
                    ]
                    new.append((chunk, combined(values)))
            for chunk, value in new:
                memory[rank][chunk] = value
            position[rank] += 1
            posted[rank], moved = False, True
        if not moved:
            raise Deadlock(f"at {position}")
    assert not any(lines.values())
    return memory


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_messages_meet_in_order_and_give_what_the_schedule_says(collective: str, algorithm: str) -> None:
    for n in range(1, 10):
        schedule = build(collective, algorithm, n)
        programs = [message_program(schedule, rank) for rank in range(n)]
        assert play_messages(schedule, programs) == in_lockstep(schedule, 0)


def test_a_message_lands_in_place_only_where_nothing_is_read() -> None:
    exchange = Schedule("by_hand", "all_reduce", 2, 1, (Move(0, 0, (1,), 0, 1), Move(0, 1, (0,), 0, 1)))
    assert not message_program(exchange, 0)[0].receives[0][2]  # still sends what stands there
    gather = build("all_gather", "ring", 3)
    assert all(in_place for step in message_program(gather, 0) for _, _, in_place in step.receives)


def test_only_direct_sums_are_never_added_again() -> None:
    for n in (3, 4, 5):
        assert not partial_sums_travel(build("all_reduce", "direct", n))
        for algorithm in ("ring", "tree", "doubling", "halving_doubling"):
            assert partial_sums_travel(build("all_reduce", algorithm, n)), algorithm
    assert not partial_sums_travel(build("all_reduce", "ring", 2))
    assert not partial_sums_travel(build("broadcast", "tree", 8))


def test_the_busiest_end_counts_what_a_source_sends_to_everybody() -> None:
    star = Schedule("by_hand", "broadcast", 4, 1, tuple(Move(0, rank, (0,), 0, 1) for rank in (1, 2, 3)))
    own, source = busiest_end(star, 1)[0]
    assert [move.dst for move in own] == [1]
    assert [move.dst for move in source] == [1, 2, 3]  # rank 0's cable carries the message three times
    assert busiest_end(star, 0) == {}
