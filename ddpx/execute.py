"""A schedule bound to a buffer and a transport becomes a plan: views cut, waits known, nothing left to decide.

`compile_plan(schedule, transport, flat)` is called once a bucket; `Plan.run()` once a step, by one thread at a time, with
plans in the same order on every rank. Reductions add in the order the schedule lists, in blocks that stay in the
second-level cache; bf16 and fp16 add in fp32 and round once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ddpx.program import (
    READY,
    busiest_end,
    mapped_programs,
    message_program,
    partial_sums_travel,
)
from ddpx.schedule import Move, Schedule, chunk_bounds
from ddpx.transport import Link, MappedTransport, MessageTransport, Transport

BLOCK_BYTES = 256 << 10
HALVES = (torch.bfloat16, torch.float16)
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Plan(Protocol):
    """One all-reduce (or other collective) of one buffer, ready to run any number of times."""

    peer_wait_s: float  # of the last run: seconds spent waiting for peers
    last_peer: int  # the peer that the longest of these waits was for

    def run(self) -> None: ...


def compile_plan(
    schedule: Schedule,
    transport: Transport,
    flat: torch.Tensor,  # (numel,), from transport.empty() where that is mapped; changed in place
    operation: str = "sum",
    link: Link | None = None,
    places: Sequence[tuple[int, int]] | None = None,  # [begin, end) of each chunk in `flat`; default chunk_bounds
) -> Plan:
    """The plan of this rank. On a mapped transport a half-precision ring allocates, and then this is a collective."""
    if schedule.world_size != transport.world_size:
        raise ValueError(f"a schedule for {schedule.world_size} ranks cannot run on {transport.world_size}")
    if operation not in OPERATIONS:
        raise ValueError(f"operation is one of {', '.join(OPERATIONS)}, not {operation!r}")
    bounds = list(places) if places is not None else chunk_bounds(flat.numel(), schedule.chunks)
    if flat.dtype in HALVES and schedule.world_size > 2 and partial_sums_travel(schedule):
        # Partial sums travel in fp32, so that each result is rounded once whatever the number of ranks.
        wide = transport.empty(flat.numel(), torch.float32, flat.device)
        return _WidenedPlan(flat, wide, compile_plan(schedule, transport, wide, operation, link, bounds))
    if isinstance(transport, MappedTransport):
        return _MappedPlan(schedule, transport, flat, operation, link, bounds)
    return _MessagePlan(schedule, transport, flat, operation, link, bounds)


def _span(bounds: Sequence[tuple[int, int]], move: Move) -> tuple[int, int]:
    return bounds[move.lo][0], bounds[move.hi - 1][1]


def _numel(bounds: Sequence[tuple[int, int]], move: Move) -> int:
    begin, end = _span(bounds, move)
    return end - begin


def _hold_s(
    link: Link | None, schedule: Schedule, rank: int, bounds: Sequence[tuple[int, int]], itemsize: int
) -> dict[int, float]:
    """By step: how long an emulated link holds this rank back, which is what its busiest end takes."""
    if link is None:
        return {}
    return {
        step: link.seconds(max(sum(_numel(bounds, move) for move in end) for end in ends) * itemsize)
        for step, ends in busiest_end(schedule, rank).items()
    }


# ---- Reduction in blocks ---------------------------------------------------------------------------------------------


class _Sum:
    """out = sources[0] + sources[1] + ..., in that order; `out` may be one of the sources. Views are cut once."""

    def __init__(self, out: torch.Tensor, sources: Sequence[torch.Tensor], operation: str) -> None:
        self._combine = OPERATIONS[operation]
        numel, dtype = out.numel(), out.dtype
        self._wide = dtype in HALVES
        block = max(1, BLOCK_BYTES // (4 if self._wide else out.element_size()))
        length = min(block, numel)
        accumulator_dtype = torch.float32 if self._wide else dtype
        needs_accumulator = self._wide or len(sources) > 2
        accumulator = torch.empty(length if needs_accumulator else 0, dtype=accumulator_dtype, device=out.device)
        operand = torch.empty(length if self._wide else 0, dtype=torch.float32, device=out.device)
        self._blocks = []
        for begin in range(0, numel, block):
            end = min(begin + block, numel)
            views = [source[begin:end] for source in sources]
            self._blocks.append((out[begin:end], views, accumulator[: end - begin], operand[: end - begin]))

    def __call__(self) -> None:
        combine = self._combine
        if self._wide:
            for out, views, accumulator, operand in self._blocks:
                accumulator.copy_(views[0])
                for view in views[1:]:
                    operand.copy_(view)  # a mixed-dtype add is 20 times slower than converting first
                    combine(accumulator, operand, out=accumulator)
                out.copy_(accumulator)
            return
        for out, views, accumulator, _ in self._blocks:
            if len(views) == 2:
                combine(views[0], views[1], out=out)
                continue
            combine(views[0], views[1], out=accumulator)
            for view in views[2:-1]:
                combine(accumulator, view, out=accumulator)
            combine(accumulator, views[-1], out=out)


def _copy(out: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        out.copy_(source)

    return copy


def _action(out: torch.Tensor, sources: Sequence[torch.Tensor], operation: str) -> Callable[[], None]:
    return _copy(out, sources[0]) if len(sources) == 1 else _Sum(out, sources, operation)


# ---- Mapped ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _BoundStep:
    waits: tuple[tuple[int, int], ...]
    hold_s: float
    actions: list[Callable[[], None]]
    read_published: int | None
    write_waits: tuple[tuple[int, int], ...]
    writes: list[Callable[[], None]]
    write_published: int | None


class _MappedPlan:
    """Reads peers' memory in place, writes its own alone; see ddpx.program for the waits."""

    def __init__(
        self,
        schedule: Schedule,
        transport: MappedTransport,
        flat: torch.Tensor,
        operation: str,
        link: Link | None,
        bounds: Sequence[tuple[int, int]],
    ) -> None:
        self._transport = transport
        self.peer_wait_s = 0.0
        self.last_peer = transport.rank
        program = mapped_programs(schedule)[transport.rank]
        hold_s = _hold_s(link, schedule, transport.rank, bounds, flat.element_size())
        ranks = transport.peers(flat)
        self._ready_published = program.ready_published
        self._end_waits = program.end_waits
        self._ticks = program.ticks
        self._steps = []
        for step in program.steps:
            actions, writes = [], []
            for move, staged in zip(step.moves, step.staged, strict=True):
                begin, end = _span(bounds, move)
                if begin == end:
                    continue
                place = flat[begin:end]
                sources = [ranks[source][begin:end] for source in move.srcs]
                if staged:
                    aside = torch.empty_like(place)
                    actions.append(_action(aside, sources, operation))
                    writes.append(_copy(place, aside))
                else:
                    actions.append(_action(place, sources, operation))
            self._steps.append(
                _BoundStep(
                    step.waits,
                    hold_s.get(step.step, 0.0),
                    actions,
                    step.read_published,
                    step.write_waits,
                    writes,
                    step.write_published,
                )
            )

    def run(self) -> None:
        transport = self._transport
        base = transport.clock
        self.peer_wait_s, self._longest_s, self.last_peer = 0.0, 0.0, transport.rank
        if self._ready_published:
            transport.publish(base + READY)
        for step in self._steps:
            self._wait(base, step.waits)
            if step.hold_s:
                time.sleep(step.hold_s)
            for action in step.actions:
                action()
            if step.read_published is not None:
                transport.publish(base + step.read_published)
            if step.writes:
                self._wait(base, step.write_waits)
                for write in step.writes:
                    write()
            if step.write_published is not None:
                transport.publish(base + step.write_published)
        self._wait(base, self._end_waits)
        transport.clock = base + self._ticks

    def _wait(self, base: int, waits: tuple[tuple[int, int], ...]) -> None:
        for peer, tick in waits:
            before = time.perf_counter()
            self._transport.wait(peer, base + tick)
            waited_s = time.perf_counter() - before
            self.peer_wait_s += waited_s
            if waited_s > self._longest_s:
                self._longest_s, self.last_peer = waited_s, peer


# ---- Messages --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _BoundMessages:
    sends: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    receives: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    hold_s: float = 0.0
    actions: list[Callable[[], None]] = field(default_factory=list)


class _MessagePlan:
    """Sends and receives a whole step at once, then adds what came."""

    def __init__(
        self,
        schedule: Schedule,
        transport: MessageTransport,
        flat: torch.Tensor,
        operation: str,
        link: Link | None,
        bounds: Sequence[tuple[int, int]],
    ) -> None:
        self._transport = transport
        self.peer_wait_s = 0.0
        self.last_peer = transport.rank
        hold_s = _hold_s(link, schedule, transport.rank, bounds, flat.element_size())
        self._steps = []
        landings = transport.landings
        for step in message_program(schedule, transport.rank):
            bound = _BoundMessages(hold_s=hold_s.get((step.moves or [m for _, m in step.sends])[0].step, 0.0))
            for peer, move in step.sends:
                begin, end = _span(bounds, move)
                if begin < end:
                    bound.sends.append((peer, flat[begin:end]))
            arrived: dict[tuple[int, int], torch.Tensor] = {}  # (source, lo) -> where it lands
            for peer, move, in_place in step.receives:
                begin, end = _span(bounds, move)
                landing = flat[begin:end] if in_place else landings.take(len(arrived), flat[begin:end])
                if begin < end:
                    bound.receives.append((peer, landing))
                arrived[peer, move.lo] = landing
            for move in step.moves:
                begin, end = _span(bounds, move)
                place = flat[begin:end]
                sources = [place if source == transport.rank else arrived[source, move.lo] for source in move.srcs]
                landed = len(sources) == 1 and sources[0].data_ptr() == place.data_ptr()
                if begin < end and not landed:
                    bound.actions.append(_action(place, sources, operation))
            self._steps.append(bound)

    def run(self) -> None:
        self.peer_wait_s = 0.0
        for step in self._steps:
            before = time.perf_counter()
            self._transport.exchange(step.sends, step.receives)
            if step.hold_s:
                time.sleep(max(0.0, step.hold_s - (time.perf_counter() - before)))
            self.peer_wait_s += time.perf_counter() - before
            for action in step.actions:
                action()


class _WidenedPlan:
    """Runs a plan on an fp32 copy of a half-precision buffer."""

    def __init__(self, flat: torch.Tensor, wide: torch.Tensor, plan: Plan) -> None:
        self._flat, self._wide, self._plan = flat, wide, plan

    def run(self) -> None:
        self._wide.copy_(self._flat)
        self._plan.run()
        self._flat.copy_(self._wide)

    @property
    def peer_wait_s(self) -> float:
        return self._plan.peer_wait_s

    @property
    def last_peer(self) -> int:
        return self._plan.last_peer
