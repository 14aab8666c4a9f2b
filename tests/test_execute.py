"""Every algorithm on every transport gives the exact result, the bits of the schedule, and does so again and again.

Inputs are small integers where the result is to be exact: sums over five ranks stay exact even in bf16. Random reals
are compared, bit for bit, with the schedule run in one process (ddpx.simulate).
"""

import contextlib
import hashlib
import random
import time
import unittest.mock
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from processes import Ranks

from ddpx import native
from ddpx.algorithms import ALGORITHMS, build
from ddpx.communicator import Communicator
from ddpx.execute import bind_mapped, compile_plan, without_end_waits
from ddpx.group import Group
from ddpx.operations import Hold, Operation
from ddpx.program import MappedProgram, mapped_programs
from ddpx.schedule import Schedule
from ddpx.simulate import simulate
from ddpx.transport import Link
from ddpx.transport.connected import Connected
from ddpx.transport.process_group import ProcessGroup
from ddpx.transport.shared_memory import SharedMemory
from ddpx.transport.sockets import Sockets

CPU = torch.device("cpu")
# Two interpreters run plans: one in Python, and a compiled one where it could be built. Gloo knows the first alone.
INTERPRETED, COMPILED, MESSAGES = "shared_memory", "shared_memory compiled", "process_group"
SOCKETS, COMPILED_SOCKETS = "sockets", "sockets compiled"
needs_library = pytest.mark.skipif(native.LIBRARY is None, reason="ddpx._native was not built")
TRANSPORTS = [
    INTERPRETED,
    pytest.param(COMPILED, marks=needs_library),
    MESSAGES,
    pytest.param(SOCKETS, marks=needs_library),
    pytest.param(COMPILED_SOCKETS, marks=needs_library),
]
SIZES = (0, 1, 7, 1000)
FEW_SIZES = (3, 1000)
LARGE = 262_144
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


@contextlib.contextmanager
def opened(name: str) -> Iterator[SharedMemory | Connected]:
    """A transport of the whole world. A collective."""
    group = Group()
    kinds = {MESSAGES: partial(ProcessGroup, device=CPU), SOCKETS: Sockets, COMPILED_SOCKETS: Sockets}
    transport = kinds.get(name, SharedMemory)(group)
    compiled = name in (COMPILED, COMPILED_SOCKETS)
    with unittest.mock.patch.object(native, "LIBRARY", native.LIBRARY if compiled else None):
        yield transport
    group.gather("all have read", None)
    transport.close()


def integers(rank: int, numel: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-20, 21, (numel,), generator=generator).to(dtype)


def reals(rank: int, numel: int, turn: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * turn + rank))


# ---- Functions that run on ranks -------------------------------------------------------------------------------------


def sum_integers(rank: int, world_size: int, transport_name: str) -> int:
    """Every algorithm, dtype and size, each twice on the same plan. Returns how many sums were right."""
    right = 0
    with opened(transport_name) as transport:
        for dtype in DTYPES:
            sizes = (*SIZES, LARGE) if dtype is torch.float32 else FEW_SIZES
            arena = transport.empty(LARGE + 64, dtype, CPU)
            for algorithm in ALGORITHMS["all_reduce"]:
                schedule = build("all_reduce", algorithm, world_size)
                for size in sizes:
                    flat = arena[64 : 64 + size]
                    plan = compile_plan(schedule, transport, flat)
                    for turn in range(2):
                        expected = sum(integers(peer, size, dtype, turn) for peer in range(world_size))
                        flat.copy_(integers(rank, size, dtype, turn))
                        plan.run()
                        assert torch.equal(flat, expected), (algorithm, dtype, size, turn)
                        right += 1
    return right


def sum_past_caches(rank: int, world_size: int, cache_bytes: int) -> int:
    """Delivered sums of every compiled type at odd places, for a machine with such a cache; how many were right."""
    right = 0
    with opened(COMPILED) as transport, unittest.mock.patch.object(native, "CACHE_BYTES", cache_bytes):
        assert transport.delivers  # type: ignore[union-attr]
        schedule = build("all_reduce", "direct", world_size)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            arena = transport.empty(10_000, dtype, CPU)
            for begin, size in ((0, 10_000), (1, 9_001), (3, 5), (7, 4_100)):
                flat = arena[begin : begin + size]
                plan = compile_plan(schedule, transport, flat)
                for turn in range(2):
                    arena.fill_(99)
                    expected = sum(integers(peer, size, dtype, turn) for peer in range(world_size))
                    flat.copy_(integers(rank, size, dtype, turn))
                    plan.run()
                    assert torch.equal(flat, expected), (dtype, begin, size, turn)
                    assert (arena[:begin] == 99).all() and (arena[begin + size :] == 99).all()
                    right += 1
    return right


def sum_reals(rank: int, world_size: int, transport_name: str) -> dict[str, str]:
    """Digests of sums of random numbers, by algorithm and size, after comparing with the simulated schedule."""
    digests = {}
    with opened(transport_name) as transport:
        arena = transport.empty(LARGE, torch.float32, CPU)
        for algorithm in ALGORITHMS["all_reduce"]:
            schedule = build("all_reduce", algorithm, world_size)
            for size in (*SIZES, LARGE):
                flat = arena[:size]
                flat.copy_(reals(rank, size, 0))
                compile_plan(schedule, transport, flat).run()
                digests[f"{algorithm} {size}"] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
                if size <= 1000:
                    inputs = [reals(peer, size, 0).numpy() for peer in range(world_size)]
                    simulated = simulate(schedule, inputs).outputs[rank]
                    assert simulated is not None and flat.numpy().tobytes() == simulated.tobytes(), (algorithm, size)
    return digests


def sum_halves(rank: int, world_size: int, transport_name: str) -> list[tuple[str, float]]:
    """bf16 and fp16 sums against the fp32 sum in the schedule's order, rounded once. Returns what differed."""
    wrong = []
    with opened(transport_name) as transport:
        for dtype in (torch.bfloat16, torch.float16):
            flat = transport.empty(1000, dtype, CPU)
            inputs = [reals(peer, 1000, 1).to(dtype).float().numpy() for peer in range(world_size)]
            for algorithm in ALGORITHMS["all_reduce"]:
                schedule = build("all_reduce", algorithm, world_size)
                flat.copy_(reals(rank, 1000, 1))
                compile_plan(schedule, transport, flat).run()
                simulated = simulate(schedule, inputs).outputs[rank]
                expected = torch.from_numpy(simulated).to(dtype)
                if not torch.equal(flat, expected):
                    wrong.append((f"{algorithm} {dtype}", (flat - expected).abs().max().item()))
    return wrong


def other_collectives(rank: int, world_size: int, transport_name: str) -> int:
    """Broadcast and reduce from every root: what the root has, or gets, is exact."""
    right = 0
    with opened(transport_name) as transport:
        flat = transport.empty(1001, torch.int32, CPU)
        total = sum(integers(peer, 1001, torch.int32, 2) for peer in range(world_size))
        for root in range(world_size):
            for collective in ("broadcast", "reduce"):
                for algorithm in ALGORITHMS[collective]:
                    plan = compile_plan(build(collective, algorithm, world_size, root=root), transport, flat)
                    for _ in range(2):
                        flat.copy_(integers(rank, 1001, torch.int32, 2))
                        plan.run()
                        if collective == "broadcast":
                            assert torch.equal(flat, integers(root, 1001, torch.int32, 2)), (algorithm, root)
                        elif rank == root:
                            assert torch.equal(flat, total), (algorithm, root)
                        right += 1
    return right


def other_operations(rank: int, world_size: int, transport_name: str) -> None:
    with opened(transport_name) as transport:
        flat = transport.empty(100, torch.float32, CPU)
        stacked = torch.stack([integers(peer, 100, torch.float32, 3) for peer in range(world_size)])
        expected = {"max": stacked.amax(0), "min": stacked.amin(0), "product": stacked.prod(0)}
        for operation, result in expected.items():
            for algorithm in ("ring", "tree", "direct", "doubling"):
                flat.copy_(stacked[rank])
                compile_plan(build("all_reduce", algorithm, world_size), transport, flat, operation).run()
                assert torch.equal(flat, result), (operation, algorithm)


def with_stops(seed: int, longest_s: float) -> Callable[..., tuple[list[Operation], int]]:
    """`bind_mapped`, with stops of random length between a plan's operations: after waits, before publications."""
    generator = random.Random(seed)

    def bind(*arguments: Any) -> tuple[list[Operation], int]:
        operations, ticks = bind_mapped(*arguments)
        stopping: list[Operation] = []
        for operation in operations:
            if generator.random() < 0.3:
                stopping.append(Hold(generator.random() * longest_s))
            stopping.append(operation)
        return stopping, ticks

    return bind


def dawdle_between_plans(rank: int, world_size: int, transport_name: str, rounds: int) -> int:
    """Many small all-reduces back to back with random stops, over two buffers; returns the number of wrong sums."""
    wrong = 0
    generator = random.Random(rank)
    with (
        opened(transport_name) as transport,
        unittest.mock.patch("ddpx.execute.bind_mapped", with_stops(rank, longest_s=0.0005)),
    ):
        flats = [transport.empty(numel, torch.float32, CPU) for numel in (3, 500)]
        plans = [
            (flat, compile_plan(build("all_reduce", algorithm, world_size), transport, flat))
            for algorithm in ALGORITHMS["all_reduce"]
            for flat in flats
        ]
        for turn in range(rounds):
            for flat, plan in plans:
                flat.copy_(integers(rank, flat.numel(), torch.float32, turn))
                if generator.random() < 0.1:
                    time.sleep(generator.random() * 0.001)
                plan.run()
                expected = sum(integers(peer, flat.numel(), torch.float32, turn) for peer in range(world_size))
                wrong += not torch.equal(flat, expected)
    return wrong


class LateReader(SharedMemory):
    """A transport whose rank takes its time between a wait and the reading that follows."""

    def wait(self, peer: int, clock: int) -> None:
        super().wait(peer, clock)
        time.sleep(0.05)


def overwrite_at_once(rank: int, world_size: int, wait_at_the_end: bool) -> bool:
    """Rank 0 broadcasts and then overwrites its buffer at once. Whether this rank has what was broadcast."""

    def altered(schedule: Schedule, deliver: bool) -> tuple[MappedProgram, ...]:
        programs = mapped_programs(schedule, deliver)
        return programs if wait_at_the_end else tuple(_without_end_waits(program) for program in programs)

    with opened(INTERPRETED) as transport, unittest.mock.patch("ddpx.execute.mapped_programs", altered):
        transport = (LateReader if rank else SharedMemory)(transport.group)
        flat = transport.empty(10, torch.float32, CPU)
        plan = compile_plan(build("broadcast", "direct", world_size), transport, flat)
        flat.fill_(7.0 if rank == 0 else 0.0)
        plan.run()
        right = bool((flat == 7).all())
        if rank == 0:
            flat.fill_(-1.0)
    return right


def go_on_before_it_is_read(rank: int, world_size: int, name: str) -> bool:
    """Rank 0 broadcasts, goes on before anybody has come to read, and overwrites its buffer once it has settled."""
    with opened(name) as transport:
        if rank and name == INTERPRETED:
            transport = LateReader(transport.group)
        elif name == INTERPRETED:
            transport = SharedMemory(transport.group)
        flat = transport.empty(10, torch.float32, CPU)
        plan = compile_plan(build("broadcast", "direct", world_size), transport, flat)
        right = True
        for turn in range(1, 4):
            if rank == 0:
                flat.fill_(turn)
                without_end_waits(plan)()
            transport.group.gather("rank 0 has gone on", turn)
            if rank:
                plan.run()
            transport.settle()
            right &= bool((flat == turn).all())
        return right


def _without_end_waits(program: MappedProgram) -> MappedProgram:
    return MappedProgram(program.ready_published, program.steps, (), program.ticks)


def last_waits(rank: int, world_size: int, transport_name: str) -> tuple[float, int]:
    """How long, and for whom, this rank waited in an all-reduce to which rank 1 came late."""
    with opened(transport_name) as transport:
        flat = transport.empty(10, torch.float32, CPU)
        plan = compile_plan(build("all_reduce", "direct", world_size), transport, flat)
        plan.run()
        if rank == 1:
            time.sleep(0.3)
        plan.run()
        return plan.peer_wait_s, plan.last_peer


def seconds_on_a_link(rank: int, world_size: int, transport_name: str, algorithm: str, link: Link | None) -> float:
    with opened(transport_name) as transport:
        flat = transport.empty(1_000_000, torch.float32, CPU)
        plan = compile_plan(build("all_reduce", algorithm, world_size), transport, flat, link=link)
        plan.run()
        flat.fill_(1.0)
        transport.group.gather("start", None)
        before = time.perf_counter()
        plan.run()
        assert bool((flat == world_size).all())
        return time.perf_counter() - before


def processor_seconds_while_held(rank: int, world_size: int, transport_name: str) -> tuple[float, float]:
    """Wall and processor time of an all-reduce over a link with half a second of latency."""
    with opened(transport_name) as transport:
        flat = transport.empty(10, torch.float32, CPU)
        plan = compile_plan(build("all_reduce", "ring", world_size), transport, flat, link=Link(0.5, 0.0))
        wall, processor = time.perf_counter(), time.process_time()
        plan.run()
        return time.perf_counter() - wall, time.process_time() - processor


# ---- Tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_of_integers_are_exact(ranks, transport: str, world_size: int) -> None:
    cases = len(SIZES) + 1 + (len(DTYPES) - 1) * len(FEW_SIZES)
    expected = 2 * len(ALGORITHMS["all_reduce"]) * cases
    assert ranks(world_size).run(sum_integers, transport, timeout_s=120) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_every_rank_on_every_transport_has_the_bits_of_the_schedule(ranks, world_size: int) -> None:
    names = [INTERPRETED, MESSAGES] + [COMPILED, SOCKETS, COMPILED_SOCKETS] * (native.LIBRARY is not None)
    digests = [digest for name in names for digest in ranks(world_size).run(sum_reals, name, timeout_s=120)]
    assert all(digest == digests[0] for digest in digests)


def test_orders_of_addition_do_differ_between_algorithms(ranks) -> None:
    """The control of the test above: were all sums the same whatever the order, it would prove nothing."""
    digests = ranks(4).run(sum_reals, INTERPRETED, timeout_s=120)[0]
    assert len({digests[f"{algorithm} 1000"] for algorithm in ("ring", "tree", "direct")}) == 3
    assert len({digests[f"{algorithm} 0"] for algorithm in ALGORITHMS["all_reduce"]}) == 1


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_precision_is_added_in_fp32_and_rounded_once(ranks, transport: str, world_size: int) -> None:
    assert ranks(world_size).run(sum_halves, transport) == [[]] * world_size


@pytest.mark.skipif(native.LIBRARY is None, reason="ddpx._native was not built")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sums_are_exact_whether_they_go_past_the_caches_or_not(ranks, world_size: int, cache_bytes: int) -> None:
    assert ranks(world_size).run(sum_past_caches, cache_bytes) == [4 * 4 * 2] * world_size


def test_plans_on_halves_share_one_scratch(ranks) -> None:
    assert ranks(3).run(scratch_sizes) == [[64, 300, 600, 600]] * 3


def scratch_sizes(rank: int, world_size: int) -> list[int]:
    """Elements of the scratch after plans on buffers of several sizes, all of which still run."""
    sizes, plans = [], []
    schedule = build("all_reduce", "ring", world_size)
    with opened(INTERPRETED) as transport:
        for numel in (64, 300, 310, 20):
            flat = transport.empty(numel, torch.bfloat16, CPU)
            plans.append((flat, compile_plan(schedule, transport, flat)))
            sizes.append(transport.scratch.numel())
        for turn in range(3):
            for flat, plan in plans:
                flat.copy_(integers(rank, flat.numel(), torch.bfloat16, turn))
                plan.run()
                expected = sum(integers(peer, flat.numel(), torch.bfloat16, turn) for peer in range(world_size))
                assert torch.equal(flat, expected), turn
    return sizes


@pytest.mark.parametrize("transport", [INTERPRETED, MESSAGES])
def test_broadcast_and_reduce_work_for_every_root(ranks, transport: str) -> None:
    cases = 2 * 3 * sum(len(ALGORITHMS[collective]) for collective in ("broadcast", "reduce"))
    assert ranks(3).run(other_collectives, transport) == [cases] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_products_maxima_and_minima(ranks, transport: str) -> None:
    ranks(3).run(other_operations, transport)


@pytest.mark.parametrize("world_size", [3, 4, 5])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_stop_at_random_get_the_same_sums(ranks, transport: str, world_size: int) -> None:
    assert ranks(world_size).run(dawdle_between_plans, transport, 10, timeout_s=120) == [0] * world_size


def test_a_rank_waits_until_its_memory_has_been_read(ranks) -> None:
    assert ranks(3).run(overwrite_at_once, True) == [True, True, True]


def test_without_that_wait_peers_read_what_came_later(ranks) -> None:
    assert ranks(3).run(overwrite_at_once, False) == [True, False, False]


@pytest.mark.parametrize("transport", TRANSPORTS[:2])
def test_that_wait_may_be_put_off(ranks, transport: str) -> None:
    assert ranks(3).run(go_on_before_it_is_read, transport) == [True] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_plan_tells_whom_it_waited_for(ranks, transport: str) -> None:
    waits = ranks(3).run(last_waits, transport)
    for rank in (0, 2):
        seconds, peer = waits[rank]
        assert seconds > 0.25 and peer == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_link_holds_back_every_step_and_every_byte(ranks, transport: str) -> None:
    """Ring on 3 ranks: four steps, each a third of 4 MB. Bounds are wide below what a busy machine may add."""
    latency, bandwidth = Link(0.05, 0.0), Link(0.0, 1 / 20e6)
    for link, least_s in ((latency, 4 * 0.05), (bandwidth, 4 * (4e6 / 3) / 20e6)):
        for seconds in ranks(3).run(seconds_on_a_link, transport, "ring", link):
            assert least_s * 0.99 < seconds < least_s + 2


def test_on_a_link_ring_outruns_a_tree_for_large_buffers(ranks) -> None:
    """4 MB at 40 MB/s on 4 ranks: ring sends 1.5 buffers (0.15 s), the tree four (0.4 s)."""
    link = Link(0.0, 1 / 40e6)
    ring = max(ranks(4).run(seconds_on_a_link, INTERPRETED, "ring", link))
    tree = max(ranks(4).run(seconds_on_a_link, INTERPRETED, "tree", link))
    assert 0.14 < ring < tree and tree > 0.39


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_link_does_not_use_the_processor(ranks, transport: str) -> None:
    for wall, processor in ranks(2).run(processor_seconds_while_held, transport):
        assert wall >= 1.0  # two steps
        assert processor < 0.5 * wall


def test_wrong_arguments_are_refused_before_anything_moves(ranks: type[Ranks]) -> None:
    ranks(2).run(_refusals)


def _refusals(rank: int, world_size: int) -> None:
    with opened(INTERPRETED) as transport:
        flat = transport.empty(8, torch.float32, CPU)
        with pytest.raises(ValueError, match="a schedule for 3 ranks cannot run on 2"):
            compile_plan(build("all_reduce", "ring", 3), transport, flat)
        with pytest.raises(ValueError, match="operation is one of sum, product, max, min, not 'mean'"):
            compile_plan(build("all_reduce", "ring", 2), transport, flat, "mean")
        with pytest.raises(ValueError, match="does not lie in memory of this transport: allocate it with empty()"):
            compile_plan(build("all_reduce", "ring", 2), transport, torch.zeros(8))


def test_a_group_of_one_has_nothing_to_do() -> None:
    communicator = Communicator(Group(), CPU)
    flat = communicator.empty(1000, torch.float32)
    flat.copy_(reals(0, 1000, 0))
    for plan in (communicator.plan_all_reduce(flat), communicator.plan_broadcast(flat)):
        communicator.wait(communicator.start(plan.run))
    assert torch.equal(flat, reals(0, 1000, 0))
    assert communicator.transport_name == "none"
    communicator.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "rings"}, "unknown algorithm 'rings'; known: auto, ring, tree"),
        ({"transport": "smoke"}, "unknown transport 'smoke'; known: auto, shared_memory, sockets, process_group"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communicator(Group(), CPU, **arguments)
