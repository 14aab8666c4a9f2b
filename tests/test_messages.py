"""A message plan's rounds, played without a network: every message meets its peer, nobody waits for ever, and whatever
the moment at which a message is carried over, the sums are right."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from ddpx import messages
from ddpx.algorithms import ALGORITHMS, build
from ddpx.compiled import LIBRARY
from ddpx.cost import count
from ddpx.execute import compile_plan
from ddpx.group import Group
from ddpx.messages import Round, bind_rounds
from ddpx.operations import action
from ddpx.schedule import Schedule, chunk_bounds
from ddpx.transport import Landings
from ddpx.transport.process_group import ProcessGroup
from ddpx.transport.sockets import Sockets

needs_library = pytest.mark.skipif(LIBRARY is None, reason="ddpx._native was not built")
ALL_REDUCES = [name for name in ALGORITHMS["all_reduce"] if name != "hierarchical"]


@dataclass
class Place:
    """As much of a transport as binding needs."""

    rank: int
    world_size: int
    pipelined: bool = True
    segment_bytes: int = 40
    segments: int = 4
    landings: Landings = field(default_factory=Landings)


@dataclass
class Line:
    """From one rank to another: the n-th send meets the n-th receive."""

    sends: list[torch.Tensor] = field(default_factory=list)
    receives: list[torch.Tensor] = field(default_factory=list)
    carried: set[int] = field(default_factory=set)

    def carry(self, place: int) -> None:
        if place not in self.carried:
            assert self.sends[place].numel() == self.receives[place].numel()
            self.receives[place].copy_(self.sends[place])
            self.carried.add(place)

    def met(self) -> int:
        return min(len(self.sends), len(self.receives))


def play(schedule: Schedule, rounds: list[list[Round]], early: bool) -> int:
    """Run all ranks' rounds; messages are carried as soon as both ends are posted, or when one end waits for it.

    Returns the number of bytes carried.
    """
    lines: dict[tuple[int, int], Line] = defaultdict(Line)

    def walk(rank: int) -> Iterator[None]:
        known: dict[int, tuple[tuple[int, int], int]] = {}

        def ended(number: int) -> Iterator[None]:
            pair, place = known.pop(number)
            while lines[pair].met() <= place:
                yield
            lines[pair].carry(place)

        for step in rounds[rank]:
            for number in step.settled:
                yield from ended(number)
            kinds = [((peer, rank), lines[peer, rank].receives, flat) for peer, flat in step.receives]
            kinds += [((rank, peer), lines[rank, peer].sends, flat) for peer, flat in step.sends]
            for number, (pair, end, flat) in zip(step.posted, kinds, strict=True):
                known[number] = (pair, len(end))
                end.append(flat)
                if early:
                    for place in range(lines[pair].met()):
                        lines[pair].carry(place)
            for number in step.awaited:
                yield from ended(number)
            for operation in step.actions:
                action(operation)()
        assert not known

    walks = {rank: walk(rank) for rank in range(schedule.world_size)}
    idle = 0
    while walks:
        before = [line.met() for line in lines.values()]
        for rank in list(walks):
            if next(walks[rank], walks) is walks:
                del walks[rank]
                idle = 0
        idle = idle + 1 if before == [line.met() for line in lines.values()] else 0
        assert idle < 3, f"ranks {list(walks)} wait for ever"
    assert all(len(line.sends) == len(line.receives) == len(line.carried) for line in lines.values())
    return sum(flat.nbytes for line in lines.values() for flat in line.sends)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_segments_meet_and_sum_rightly_whenever_they_are_carried(algorithm: str, early: bool, monkeypatch) -> None:
    for n in range(1, 6):
        schedule = build("all_reduce", algorithm, n)
        for numel, ahead, aside in [(1001, 3, 0), (1000, 0, 0), (37, 3, 64 << 10), (200, 9, 0), (1, 3, 0)]:
            monkeypatch.setattr(messages, "AHEAD", ahead)
            monkeypatch.setattr(messages, "ASIDE_BYTES", aside)
            bounds = chunk_bounds(numel, schedule.chunks)
            flats = [torch.arange(numel) * (rank + 1) for rank in range(n)]
            total = sum(flats)
            ranks = [bind_rounds(schedule, Place(rank, n), flats[rank], "sum", None, bounds) for rank in range(n)]
            carried = play(schedule, ranks, early)
            assert all(torch.equal(flat, total) for flat in flats), (n, numel, ahead, aside)
            assert carried == count(schedule, numel, 8).total


@pytest.mark.parametrize("hold_s", [None, {}])
def test_under_an_emulated_link_and_on_a_gpu_a_step_is_posted_and_ended_together(hold_s) -> None:
    schedule = build("all_reduce", "ring", 3)
    place = Place(0, 3, pipelined=hold_s is not None)
    rounds = bind_rounds(schedule, place, torch.zeros(1000), "sum", hold_s, chunk_bounds(1000, 3))
    assert len(rounds) == schedule.steps + 1  # and one that has nothing left to end
    for step in rounds[:-1]:
        assert sorted(step.awaited) == sorted(step.posted) and not step.settled
        assert len(step.sends) == len(step.receives) == 1


def test_large_chunks_are_cut_and_small_messages_are_awaited_from_the_start() -> None:
    schedule = build("all_reduce", "ring", 4)
    for of_chunk, segments in ((9, 1), (10, 1), (20, 2), (30, 3), (1000, 4)):
        numel = 4 * of_chunk
        rounds = bind_rounds(schedule, Place(0, 4), torch.zeros(numel), "sum", None, chunk_bounds(numel, 4))
        assert len(rounds) == schedule.steps * segments + 1
        assert len(rounds[0].receives) == 1 + messages.AHEAD


def all_reduce_in_segments(rank: int, n: int, kind: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "ASIDE_BYTES", 1 << 9)
        transport = Sockets(Group()) if kind == "sockets" else ProcessGroup(Group(), torch.device("cpu"))
        transport.segment_bytes, transport.segments = 1 << 10, 4
        for algorithm in ALL_REDUCES:
            schedule = build("all_reduce", algorithm, n)
            flat = torch.empty(10007)
            plan = compile_plan(schedule, transport, flat)
            for turn in range(3):
                flat.copy_(torch.arange(10007) % 97 + rank + turn)
                before = transport.bytes_received
                plan.run()
                assert torch.equal(flat, n * (torch.arange(10007) % 97 + turn) + n * (n - 1) / 2), (algorithm, turn)
                assert transport.bytes_received - before == count(schedule, 10007, 4).received[rank], algorithm
        transport.group.gather("end", None)
        transport.close()
    return transport.bytes_sent


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["process_group", pytest.param("sockets", marks=needs_library)])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_segments_sum_rightly_and_count_the_bytes_of_the_formula(n: int, kind: str, ranks) -> None:
    total = sum(count(build("all_reduce", algorithm, n), 10007, 4).total for algorithm in ALL_REDUCES)
    assert sum(ranks(n).run(all_reduce_in_segments, kind)) == 3 * total
