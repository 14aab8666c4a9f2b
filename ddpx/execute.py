"""A schedule bound to a buffer and a transport becomes a plan: views cut, waits known, nothing left to decide.

`compile_plan(schedule, transport, flat)` is called once a bucket; `Plan.run()` once a step, by one thread at a time,
with plans in the same order on every rank.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ddpx import native
from ddpx.group import Group
from ddpx.messages import MessagePlan, bind_rounds
from ddpx.native_messages import compile_rounds
from ddpx.operations import (
    HALVES,
    OPERATIONS,
    Claim,
    Combine,
    Copy,
    Hold,
    Operation,
    Publish,
    Release,
    Wait,
    action,
    compute,
    end_waits,
)
from ddpx.program import (
    READY,
    busiest_end,
    deliveries,
    mapped_programs,
    partial_sums_travel,
    phases,
)
from ddpx.schedule import Move, Schedule, chunk_bounds
from ddpx.transport import Link, MappedTransport, MessageTransport
from ddpx.transport.hosts import Hosts


class Plan(Protocol):
    """One all-reduce (or other collective) of one buffer, ready to run any number of times."""

    @property
    def peer_wait_s(self) -> float:
        """Seconds of the last run spent waiting for peers."""

    @property
    def last_peer(self) -> int:
        """The peer that the longest of these waits was for; this rank where it waited for nobody."""

    def run(self) -> None: ...


def without_end_waits(plan: Plan) -> Callable[[], None]:
    """`plan.run`, but waits at its end, for peers to have read or written here, are put off until `settle`.

    Its buffer belongs to the plan until then. Where peers' memory is not read there is nothing to put off.
    """
    run: Callable[[], None] = getattr(plan, "run_through", plan.run)
    return run


def compile_plan(
    schedule: Schedule,
    transport: MessageTransport | MappedTransport | Hosts,
    flat: torch.Tensor,  # (numel,), from transport.empty() where that is mapped; changed in place
    operation: str = "sum",
    link: Link | None = None,
    places: Sequence[tuple[int, int]] | None = None,  # [begin, end) of each chunk in `flat`; default chunk_bounds
    compiled: bool = True,  # use the compiled interpreter where it was built and knows all operations
) -> Plan:
    """The plan of this rank. On a mapped transport a half-precision ring allocates, and then this is a collective."""
    if schedule.world_size != transport.world_size:
        raise ValueError(f"a schedule for {schedule.world_size} ranks cannot run on {transport.world_size}")
    if operation not in OPERATIONS:
        raise ValueError(f"operation is one of {', '.join(OPERATIONS)}, not {operation!r}")
    bounds = list(places) if places is not None else chunk_bounds(flat.numel(), schedule.chunks)
    if flat.dtype in HALVES and schedule.world_size > 2 and partial_sums_travel(schedule):
        # Partial sums travel in fp32, so that each result is rounded once whatever the number of ranks.
        wide = _scratch(transport, flat)
        return _WidenedPlan(flat, wide, compile_plan(schedule, transport, wide, operation, link, bounds, compiled))
    if isinstance(transport, Hosts):
        parts: list[tuple[Plan, Group]] = []
        for phase in phases(schedule, tuple(map(tuple, transport.nodes)), transport.rank):
            part = transport.local if phase.local else transport.between
            plan = compile_plan(phase.schedule, part, flat, operation, link, bounds, compiled)
            parts.append((plan, part.group))
        return _PhasedPlan(parts, transport.rank)
    if isinstance(transport, MappedTransport):
        deliver = transport.delivers and compiled and link is None and native.knows(operation, flat.dtype)
        operations, ticks = bind_mapped(schedule, transport, flat, operation, link, bounds, deliver)
        native_plan = native.compile_operations(transport, operations, ticks) if compiled else None
        plan = native_plan or _MappedPlan(transport, operations, ticks)
        plan.bytes_read = _bytes_read(transport, flat, operations) + (
            _numel_delivered(schedule, transport.rank, bounds) * flat.element_size() if deliver else 0
        )
        return plan
    hold_s = None if link is None else _hold_s(link, schedule, transport.rank, bounds, flat.element_size())
    rounds = bind_rounds(schedule, transport, flat, operation, hold_s, bounds)
    return (compile_rounds(transport, rounds) if compiled else None) or MessagePlan(transport, rounds)


def _scratch(transport: MessageTransport | MappedTransport | Hosts, flat: torch.Tensor) -> torch.Tensor:
    """fp32 memory as long as `flat`. Plans run one at a time, so all of a transport share it."""
    scratch = transport.scratch
    if scratch is None or scratch.numel() < flat.numel():
        numel = max(flat.numel(), 2 * scratch.numel() if scratch is not None else 0)
        scratch = transport.scratch = transport.empty(numel, torch.float32, flat.device)
    return scratch[: flat.numel()]


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


# ---- Mapped ----------------------------------------------------------------------------------------------------------


def bind_mapped(
    schedule: Schedule,
    transport: MappedTransport,
    flat: torch.Tensor,
    operation: str,
    link: Link | None,
    bounds: Sequence[tuple[int, int]],
    deliver: bool = False,
) -> tuple[list[Operation], int]:
    """This rank's operations on a mapped transport, and the ticks its clock advances by."""
    program = mapped_programs(schedule, deliver)[transport.rank]
    past_caches = schedule.world_size * flat.nbytes > native.CACHE_BYTES
    hold_s = _hold_s(link, schedule, transport.rank, bounds, flat.element_size())
    ranks = transport.peers(flat)
    operations: list[Operation] = [Publish(READY)] if program.ready_published else []
    for step in program.steps:
        operations += [Wait(peer, tick) for peer, tick in step.waits]
        if step.step in hold_s:
            operations.append(Hold(hold_s[step.step]))
        writes: list[Operation] = []
        for move, staged, delivered in zip(step.moves, step.staged, step.deliveries, strict=True):
            begin, end = _span(bounds, move)
            if begin == end:
                continue
            place = flat[begin:end]
            sources = [ranks[source][begin:end] for source in move.srcs]
            if delivered:
                theirs = tuple(ranks[peer][begin:end] for peer in delivered)
                operations += [Claim(), Combine(place, tuple(sources), operation, theirs, past_caches), Release()]
                continue
            aside = torch.empty_like(place) if staged else place
            operations.append(compute(aside, sources, operation))
            if staged:
                writes.append(Copy(place, aside))
        if step.read_published is not None:
            operations.append(Publish(step.read_published))
        if writes:
            operations += [Wait(peer, tick) for peer, tick in step.write_waits]
            operations += writes
        if step.write_published is not None:
            operations.append(Publish(step.write_published))
    operations += [Wait(peer, tick) for peer, tick in program.end_waits]
    return operations, program.ticks


def _bytes_read(transport: MappedTransport, flat: torch.Tensor, operations: Sequence[Operation]) -> int:
    """What the operations read of peers' memory, going by the addresses they are bound to."""
    peers = transport.peers(flat)
    theirs = {peer.untyped_storage().data_ptr() for rank, peer in enumerate(peers) if rank != transport.rank}
    nbytes = 0
    for operation in operations:
        if isinstance(operation, Copy | Combine):
            sources = operation.sources if isinstance(operation, Combine) else (operation.source,)
            nbytes += sum(source.nbytes for source in sources if source.untyped_storage().data_ptr() in theirs)
    return nbytes


def _numel_delivered(schedule: Schedule, rank: int, bounds: Sequence[tuple[int, int]]) -> int:
    """Elements that peers write into this rank's memory."""
    return sum(_numel(bounds, move) for move, ranks in deliveries(schedule).items() if rank in ranks)


class _MappedPlan:
    """Reads peers' memory in place, writes its own alone; see ddpx.program for the waits. In Python, call by call."""

    def __init__(self, transport: MappedTransport, operations: Sequence[Operation], ticks: int) -> None:
        self._transport = transport
        self._ticks = ticks
        self.bytes_read = 0  # from peers, in a run
        self.peer_wait_s = 0.0
        self.last_peer = transport.rank
        self._calls: list[Callable[[int], object]] = [self._call(operation) for operation in operations]
        self._ends = end_waits(operations)

    def _call(self, operation: Operation) -> Callable[[int], object]:
        match operation:
            case Wait(peer, tick):
                return lambda base: self._wait(peer, base + tick)
            case Publish(tick):
                return lambda base: self._transport.publish(base + tick)
            case Hold(seconds):
                return lambda base: time.sleep(seconds)
            case Copy() | Combine():
                call = action(operation)
                return lambda base: call()
            case _:
                raise ValueError(f"only a compiled plan delivers: {operation}")

    def run(self) -> None:
        self._run_first(len(self._calls))

    def run_through(self) -> None:
        base = self._run_first(len(self._calls) - len(self._ends))
        for wait in self._ends:
            self._transport.owe(wait.peer, base + wait.tick)

    def _run_first(self, count: int) -> int:
        """Run the first `count` operations. Returns the clock at the start."""
        base = self._transport.start()
        self.peer_wait_s, self._longest_s, self.last_peer = 0.0, 0.0, self._transport.rank
        for call in self._calls[:count]:
            call(base)
        self._transport.bytes_read += self.bytes_read
        self._transport.clock = base + self._ticks
        return base

    def _wait(self, peer: int, clock: int) -> None:
        before = time.perf_counter()
        self._transport.wait(peer, clock)
        waited_s = time.perf_counter() - before
        self.peer_wait_s += waited_s
        if waited_s > self._longest_s:
            self._longest_s, self.last_peer = waited_s, peer


class _PhasedPlan:
    """One plan after the other, on the same memory."""

    def __init__(self, parts: Sequence[tuple[Plan, Group]], rank: int) -> None:  # each with the ranks it counts among
        self._parts = parts
        self._rank = rank

    def run(self) -> None:
        for part, _ in self._parts:
            part.run()

    @property
    def peer_wait_s(self) -> float:
        return sum(part.peer_wait_s for part, _ in self._parts)

    @property
    def last_peer(self) -> int:
        if not self._parts:
            return self._rank
        part, group = max(self._parts, key=lambda part: part[0].peer_wait_s)
        return group.known_as(part.last_peer)


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
