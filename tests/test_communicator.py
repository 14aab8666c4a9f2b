"""The six collectives on real processes: right, counted, the same bits everywhere, and loud about mistakes."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
import torch.distributed as dist

from ddpx import Communicator, DeadlineExceeded, Error, Link, Mismatch
from ddpx.algorithms import ALGORITHMS, build
from ddpx.choice import CHOICES, MESSAGES, ranks_per_core
from ddpx.collectives import MAX_PLANS
from ddpx.cost import choose, closed_form, count
from ddpx.units import parse_bytes

TRANSPORTS = ("shared_memory", "sockets", "process_group")
SIZES = (0, 1, 7, 1000)

Body = Callable[[Communicator, int, int], None]


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, different on each rank, whose sums and products are exact."""
    return ((torch.arange(numel) * 7 + rank * 3) % 11 + 1).to(dtype)


# ---- Every algorithm of every collective -----------------------------------------------------------------------------


def call(communicator: Communicator, collective: str, algorithm: str, numel: int, root: int) -> tuple[bool, int]:
    """One collective on `numel` elements a rank, run and checked: (right, elements that its schedule cuts up)."""
    rank, n = communicator.group.rank, communicator.group.world_size
    mine, everyone = values(rank, numel), [values(r, numel) for r in range(n)]
    total = torch.stack(everyone).sum(0) if numel else mine
    if collective == "all_reduce":
        communicator.all_reduce(mine, algorithm=algorithm)
        return torch.equal(mine, total), numel
    if collective == "reduce":
        communicator.reduce(mine, group_dst=root, algorithm=algorithm)
        return torch.equal(mine, total if rank == root else everyone[rank]), numel
    if collective == "broadcast":
        communicator.broadcast(mine, group_src=root, algorithm=algorithm)
        return torch.equal(mine, everyone[root]), numel
    if collective == "all_gather":
        output = torch.full((n * numel,), -1.0)
        communicator.all_gather_into_tensor(output, mine, algorithm=algorithm)
        return torch.equal(output, torch.cat(everyone)), n * numel
    if collective == "reduce_scatter":
        wholes = [values(r, n * numel) for r in range(n)]
        output = torch.full((numel,), -1.0)
        communicator.reduce_scatter_tensor(output, wholes[rank], algorithm=algorithm)
        return torch.equal(output, torch.stack(wholes).sum(0)[rank * numel : (rank + 1) * numel]), n * numel
    wholes = [values(r, n * numel) for r in range(n)]
    output = torch.full((n * numel,), -1.0)
    communicator.all_to_all_single(output, wholes[rank], algorithm=algorithm)
    parts = [whole[rank * numel : (rank + 1) * numel] for whole in wholes]
    return torch.equal(output, torch.cat(parts)), n * n * numel


def every_algorithm(rank: int, n: int, transport: str) -> list[str]:
    communicator = Communicator(transport=transport)
    wrong = []
    for collective, algorithms in ALGORITHMS.items():
        for algorithm, numel in product(algorithms, SIZES):
            root = numel % n if collective in ("broadcast", "reduce") else 0
            for _ in range(2):
                before = communicator.bytes_received
                right, cut = call(communicator, collective, algorithm, numel, root)
                traffic = count(build(collective, algorithm, n, root=root), cut, 4)
                received = communicator.bytes_received - before
                if not right or received != traffic.received[rank]:
                    wrong.append(f"{collective} {algorithm} {numel}: {right=} {received=} {traffic.received[rank]}")
    if transport == "process_group" and n > 1:
        total = torch.tensor([communicator.transport.bytes_sent - communicator.bytes_received])
        dist.all_reduce(total)
        wrong += [f"{int(total)} bytes more sent than received"] * bool(total)
    communicator.close()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_algorithm_of_every_collective_is_right_and_moves_the_bytes_of_its_schedule(ranks, n, transport):
    assert ranks(n).run(every_algorithm, transport) == [[]] * n


def sent_by_formula(rank: int, n: int, transport: str, algorithm: str, numel: int) -> tuple[int, int]:
    communicator = Communicator(transport=transport)
    communicator.all_reduce(torch.ones(numel), algorithm=algorithm)
    received = torch.tensor([communicator.bytes_received])
    everyone = [torch.zeros_like(received) for _ in range(n)]
    dist.all_gather(everyone, received)
    communicator.close()
    return int(received), int(torch.stack(everyone).sum())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS["all_reduce"]) - {"hierarchical"}))
def test_bytes_on_the_wire_are_those_of_the_closed_form(ranks, transport, algorithm):
    form = closed_form("all_reduce", algorithm, 4, 4 * 4096)
    received = ranks(4).run(sent_by_formula, transport, algorithm, 4096)
    assert received[0][1] == form.total
    assert max(of_rank for of_rank, _ in received) <= form.busiest


def test_ring_receives_two_n_minus_one_over_n_of_the_buffer_and_the_servers_hub_all(ranks):
    nbytes = 4 * 4096
    ring = ranks(4).run(sent_by_formula, "shared_memory", "ring", 4096)
    hub = ranks(4).run(sent_by_formula, "shared_memory", "parameter_server", 4096)
    doubling = ranks(4).run(sent_by_formula, "process_group", "doubling", 4096)
    assert [r for r, _ in ring] == [2 * 3 * nbytes // 4] * 4
    assert [r for r, _ in hub] == [3 * nbytes, nbytes, nbytes, nbytes]
    assert [r for r, _ in doubling] == [nbytes * int(math.log2(4))] * 4


# ---- Operations and types --------------------------------------------------------------------------------------------

NUMBERS = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def operations_and_types(rank: int, n: int, transport: str) -> list[str]:
    communicator = Communicator(transport=transport)
    wrong = []
    results: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda stack: stack.sum(0),
        "avg": lambda stack: stack.sum(0) / n,
        "max": lambda stack: stack.amax(0),
        "min": lambda stack: stack.amin(0),
        "product": lambda stack: stack.prod(0),
    }
    for dtype, op in product(NUMBERS, results):
        if op == "avg" and not dtype.is_floating_point:
            continue
        exact = torch.stack([values(r, 13, torch.float64) % 4 + 1 for r in range(n)])
        expected = results[op](exact).to(dtype)
        reduce_op = getattr(dist.ReduceOp, op.upper())
        for given in (op, reduce_op):
            tensor = (values(rank, 13, torch.float64) % 4 + 1).to(dtype)
            communicator.all_reduce(tensor, given)
            if not torch.equal(tensor, expected):
                wrong.append(f"{dtype} {given}: {tensor.tolist()} instead of {expected.tolist()}")
    flags = torch.tensor([rank == 0, rank >= 0, False])
    both = flags.clone()
    communicator.all_reduce(flags)  # or
    communicator.all_reduce(both, "product")  # and
    if flags.tolist() != [True, True, False] or both.tolist() != [n == 1, True, False]:
        wrong.append(f"bool: {flags.tolist()} {both.tolist()}")
    turn = torch.tensor([1 + 2j, 3j]) * (rank + 1)
    communicator.all_reduce(turn, "avg")
    if not torch.equal(turn, torch.tensor([1 + 2j, 3j]) * (n + 1) / 2):
        wrong.append(f"complex: {turn.tolist()}")
    for dtype in (*NUMBERS, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn):
        tensor = values(rank, 5).to(dtype)
        communicator.broadcast(tensor, src=n - 1)
        if tensor.float().tolist() != values(n - 1, 5).to(dtype).float().tolist():
            wrong.append(f"broadcast {dtype}: {tensor.tolist()}")
    communicator.close()
    return wrong


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_operations_on_all_types(ranks, transport):
    assert ranks(3).run(operations_and_types, transport) == [[]] * 3


def halves(rank: int, n: int, transport: str, algorithm: str) -> tuple[float, float, float, bool]:
    """Errors of a bf16 sum, of bf16 additions and of one rounding; and whether an fp16 average is finite."""
    communicator = Communicator(transport=transport)
    torch.manual_seed(0)
    parts = [torch.randn(4096).bfloat16() for _ in range(n)]
    exact = torch.stack(parts).double().sum(0)
    tensor, narrow = parts[rank].clone(), parts[0].clone()
    communicator.all_reduce(tensor, algorithm=algorithm)
    for part in parts[1:]:
        narrow += part
    large = torch.full((100,), 60000.0, dtype=torch.float16)
    communicator.all_reduce(large, "avg", algorithm=algorithm)
    communicator.close()

    def rms(approximate: torch.Tensor) -> float:
        return float((approximate.double() - exact).square().mean().sqrt())

    return rms(tensor), rms(narrow), rms(exact.bfloat16()), bool((large == 60000.0).all())


@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "doubling"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halves_are_added_in_fp32_and_rounded_once(ranks, transport, algorithm):
    for ours, narrow, one_rounding, finite in ranks(4).run(halves, transport, algorithm):
        assert ours <= 1.001 * one_rounding
        # The control: with 3 roundings, to numbers that grow, of which the last is alike: sqrt((2 + 3 + 4) / 4) = 1.5.
        assert 1.3 * one_rounding < narrow < 1.7 * one_rounding
        assert finite


def means(rank: int, n: int) -> bool:
    numpy = pytest.importorskip("numpy")
    communicator = Communicator()
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    tensor = parts[rank].clone()
    communicator.all_reduce(tensor, dist.ReduceOp.AVG)
    communicator.close()
    return bool(numpy.array_equal(tensor.numpy(), numpy.mean([part.numpy() for part in parts], axis=0)))


def test_avg_is_numpys_mean_bit_for_bit(ranks):
    assert ranks(3).run(means) == [True] * 3


def nan_travels(rank: int, n: int) -> tuple[bool, bool]:
    communicator = Communicator()
    whole = torch.ones(2 * n)
    if rank == 1:
        whole[4] = math.nan  # in chunk 2
    part, gathered = torch.zeros(2), torch.zeros(2 * n)
    communicator.reduce_scatter_tensor(part, whole)
    communicator.all_gather_into_tensor(gathered, part)
    communicator.close()
    return bool(part.isnan().any()), bool(gathered.isnan().any())


def test_a_nan_in_chunk_2_is_at_rank_2_after_reduce_scatter_and_everywhere_after_all_gather(ranks):
    assert ranks(4).run(nan_travels) == [(rank == 2, True) for rank in range(4)]


# ---- Shapes, places, groups ------------------------------------------------------------------------------------------


def uneven(rank: int, n: int, transport: str) -> list[str]:
    communicator = Communicator(transport=transport)
    wrong = []
    for shift in range(3):  # other sizes each time, empty ones among them
        sizes = [[(src * 2 + dst + shift) % 4 for dst in range(n)] for src in range(n)]
        rows = [values(src, 3 * sum(sizes[src])).view(-1, 3) for src in range(n)]
        expects = [sizes[src][rank] for src in range(n)]
        begins = [[0, *accumulate(sizes[src])] for src in range(n)]
        expected = [rows[src][begins[src][rank] : begins[src][rank + 1]] for src in range(n)]
        output = torch.full((sum(expects), 3), -1.0)
        communicator.all_to_all_single(output, rows[rank], expects, sizes[rank])
        if not torch.equal(output, torch.cat(expected)):
            wrong.append(f"all_to_all_single {shift}: {output.tolist()}")
        outputs = [torch.full((size, 3), -1.0) for size in expects]
        work = communicator.all_to_all(outputs, list(torch.split(rows[rank], sizes[rank])), async_op=True)
        work.wait()
        if not all(map(torch.equal, outputs, expected)):
            wrong.append(f"all_to_all {shift}")
    everyone = [values(r, r) for r in range(n)]
    outputs = [torch.full((r,), -1.0) for r in range(n)]
    communicator.all_gather(outputs, everyone[rank], algorithm="ring")
    if not all(map(torch.equal, outputs, everyone)):
        wrong.append("all_gather")
    output = torch.full((rank,), -1.0)
    communicator.reduce_scatter(output, everyone, algorithm="ring")
    if not torch.equal(output, n * everyone[rank]):
        wrong.append("reduce_scatter")
    communicator.close()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pieces_may_differ_in_size(ranks, transport):
    assert ranks(3).run(uneven, transport) == [[]] * 3


def wrong_splits(rank: int, n: int) -> str:
    communicator = Communicator()
    source, sends = torch.zeros(n + rank), [1] * (n - 1) + [1 + rank]
    try:
        communicator.all_to_all_single(torch.zeros(n), source, [1] * n, sends)
    except Mismatch as error:
        return str(error)
    return ""


def test_splits_that_do_not_fit_are_an_error_on_every_rank(ranks):
    (text,) = set(ranks(2).run(wrong_splits))
    assert "rank 1 has 2 elements for rank 1, which expects 1" in text


def odd_places(rank: int, n: int) -> list[bool]:
    communicator = Communicator()
    scalar = torch.tensor(float(rank), requires_grad=True)
    communicator.all_reduce(scalar)
    wide = torch.zeros(6, 4)
    column = wide.t()[1:3]  # not contiguous
    column += rank + 1
    communicator.all_reduce(column)
    arena = communicator.empty(100, torch.float32)
    part = arena[10:20].view(2, 5)
    part.fill_(rank + 1)
    communicator.all_reduce(part, "avg")  # where it lies
    staged = communicator._calls._staging.data_ptr()
    in_place = not any(
        ready.staged and ready.flat.data_ptr() != staged for ready in communicator._calls._plans.values()
    ) and any(not ready.staged for ready in communicator._calls._plans.values())
    arena[10:20].fill_(rank)
    communicator.broadcast(part, src=1)
    right = arena.tolist() == [0.0] * 10 + [1.0] * 10 + [0.0] * 80
    communicator.release(arena)
    communicator.close()
    total = n * (n + 1) / 2
    return [
        scalar.item() == total - n,
        wide.tolist() == [[0, total, total, 0]] * 6,
        in_place,
        right,
    ]


def test_tensors_may_lie_anywhere_and_those_in_shared_memory_are_not_staged(ranks):
    assert ranks(2).run(odd_places) == [[True] * 4] * 2


def many_under_way(rank: int, n: int, transport: str) -> bool:
    communicator = Communicator(transport=transport)
    tensors = [values(rank, size) for size in (5, 3000, 1, 100_000, 7)]
    works = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
    late = values(rank, 9)
    communicator.all_reduce(late)  # not before the others
    completed = all(work.is_completed() for work in works)
    results = [work.wait() for work in works]
    communicator.close()
    right = [torch.equal(t, sum(values(r, t.numel()) for r in range(n))) for t in [*tensors, late]]
    return completed and all(results) and all(right)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_works_end_in_order_however_many_are_under_way(ranks, transport):
    assert ranks(2).run(many_under_way, transport) == [True] * 2


def axes_of_a_mesh(rank: int, n: int) -> tuple[float, float, float, list[str]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    rows, columns, world = Communicator(mesh["rows"]), Communicator(mesh["columns"]), Communicator()
    tensors = [torch.full((1000,), float(rank)) for _ in range(3)]
    works = [c.all_reduce(t, async_op=True) for c, t in zip((rows, columns, world), tensors)]
    for work in reversed(works):
        work.wait()
    errors = []
    for group in (mesh, "columns"):
        try:
            Communicator(group)
        except (ValueError, TypeError) as error:
            errors.append(str(error))
    first_of_column = torch.full((3,), float(rank))
    columns.broadcast(first_of_column, src=columns.group.ranks[1])  # a global rank
    for communicator in (rows, columns, world):
        communicator.close()
    return tensors[0][0].item(), tensors[1][0].item(), tensors[2][0].item() + 0.1 * first_of_column[0].item(), errors


def test_groups_are_axes_of_a_mesh_and_several_run_at_once(ranks):
    results = ranks(4).run(axes_of_a_mesh)
    assert [r[0] for r in results] == [2, 4, 2, 4]
    assert [r[1] for r in results] == [1, 1, 5, 5]
    assert [r[2] for r in results] == pytest.approx([6.1, 6.1, 6.3, 6.3])
    assert all("pass one dimension of it" in r[3][0] and "not str" in r[3][1] for r in results)


def subset(rank: int, n: int) -> float | str:
    members = [2, 0]
    group = dist.new_group(members)
    if rank not in members:
        try:
            Communicator(group)
        except (ValueError, TypeError) as error:
            return str(error)
    communicator = Communicator(group)
    tensor = torch.tensor([float(rank + 1)])
    communicator.all_reduce(tensor)
    try:
        communicator.broadcast(tensor, src=1)
    except ValueError as error:
        assert "src=1 is not in the group" in str(error)
    communicator.close()
    return tensor.item()


def test_a_group_may_be_a_subset_of_the_world(ranks):
    first, outside, last = ranks(3).run(subset)
    assert first == last == 4.0
    assert "not" in outside


def on_two_hosts(rank: int, n: int) -> tuple[str, list[bool]]:
    os.environ["DDPX_HOST_ID"] = f"host {rank // 2}"
    try:
        communicator = Communicator()
    finally:
        del os.environ["DDPX_HOST_ID"]
    right = []
    for collective, algorithm in [("all_reduce", "ring"), ("broadcast", "tree"), ("all_to_all", "pairwise")]:
        right += [call(communicator, collective, algorithm, 1000, 0)[0] for _ in range(2)]
    mine = values(rank, 1000)
    communicator.all_reduce(mine)  # hierarchical
    right.append(torch.equal(mine, sum(values(r, 1000) for r in range(n))))
    name = communicator.transport_name
    communicator.close()
    return name, right


def test_ranks_of_several_hosts_have_all_collectives(ranks):
    assert ranks(4).run(on_two_hosts) == [("hierarchical", [True] * 7)] * 4


def memory(rank: int, n: int) -> tuple[int, int]:
    communicator = Communicator()
    for size in range(3 * MAX_PLANS):
        communicator.all_reduce(torch.ones(1 + 1000 * size))
    plans, staging = len(communicator._calls._plans), communicator._calls._staging.nbytes
    communicator.close()
    return plans, staging


def test_memory_is_bounded_by_the_largest_call_and_a_number_of_plans(ranks):
    largest = 4 * 1000 * 3 * MAX_PLANS
    for plans, staging in ranks(2).run(memory):
        assert plans <= MAX_PLANS and staging < 2 * largest


# ---- Choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, fastest",
    [
        (2, {"1KiB": "tree", "256KiB": "tree", "1MiB": "tree", "8MiB": "ring", "25MiB": "ring", "100MiB": "ring"}),
        (3, {"1KiB": "tree", "256KiB": "tree", "1MiB": "tree", "4MiB": "ring", "25MiB": "ring", "100MiB": "ring"}),
        (4, {"1KiB": "tree", "256KiB": "tree", "1MiB": "tree", "4MiB": "ring", "25MiB": "ring", "100MiB": "ring"}),
    ],
)
def test_over_messages_auto_takes_what_was_measured_to_be_the_fastest_on_two_processors(n, fastest):
    fabric = replace(MESSAGES, ranks_per_core=n / 2)
    for size, algorithm in fastest.items():
        assert choose(n, parse_bytes(size), fabric, "all_reduce", CHOICES["all_reduce"]).algorithm == algorithm


def test_where_each_rank_has_processors_of_its_own_no_algorithm_is_chosen_for_its_few_messages():
    fabric = replace(MESSAGES, ranks_per_core=1 / 16)
    names = [
        choose(8, nbytes, fabric, "all_reduce", CHOICES["all_reduce"]).algorithm for nbytes in (1 << 10, 100 << 20)
    ]
    assert names == ["direct", "direct"]


def choices(rank: int, n: int, transport: str, link: Link | None) -> list[str]:
    communicator = Communicator(transport=transport, link=link)
    chosen = [communicator.choose(nbytes) for nbytes in (1 << 10, 100 << 20)]
    communicator.close()
    return chosen


def test_auto_is_direct_in_shared_memory_and_by_the_cost_model_elsewhere(ranks):
    assert ranks(4).run(choices, "shared_memory", None)[0] == ["direct", "direct"]
    fabric = replace(MESSAGES, ranks_per_core=4 / len(os.sched_getaffinity(0)))
    predicted = [
        choose(4, nbytes, fabric, algorithms=CHOICES["all_reduce"]).algorithm for nbytes in (1 << 10, 100 << 20)
    ]
    assert ranks(4).run(choices, "process_group", None) == [predicted] * 4


def test_the_most_crowded_host_counts_and_every_rank_knows_it():
    class Told:
        def gather(self, topic, mine):
            return [("one", 8), ("two", 4), ("two", 4), ("two", 4), ("one", 8)]

    assert ranks_per_core(Told()) == 3 / 4


# ---- Mistakes --------------------------------------------------------------------------------------------------------


def caught(body: Callable[[], object]) -> tuple[str, str]:
    try:
        body()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def different_first_calls(rank: int, n: int, transport: str) -> list[tuple[str, str]]:
    communicator = Communicator(transport=transport)
    one = rank == 1
    errors = [
        caught(lambda: communicator.all_reduce(torch.ones(3 if one else 4))),
        caught(lambda: communicator.all_reduce(torch.ones(4, dtype=torch.float64 if one else torch.float32))),
        caught(lambda: communicator.all_reduce(torch.ones(4), "max" if one else "sum")),
        caught(lambda: communicator.broadcast(torch.ones(4), src=rank)),
        caught(lambda: communicator.all_reduce(torch.ones(5)) if one else communicator.broadcast(torch.ones(5), 0)),
    ]
    tensor = torch.ones(6)
    communicator.all_reduce(tensor)  # and life goes on
    communicator.close()
    assert tensor.tolist() == [n] * 6
    return errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_calls_are_told_on_every_rank_with_everybodys(ranks, transport):
    results = ranks(3).run(different_first_calls, transport)
    assert results[0] == results[1] == results[2]
    shape, dtype, op, root, kind = (text for name, text in results[0] if name == "Mismatch")
    assert "ranks 0 and 2: call 1: all_reduce(float32[4], op=sum)" in shape
    assert "rank 1: call 1: all_reduce(float32[3], op=sum)" in shape
    assert "float64[4]" in dtype and "float32[4]" in dtype
    assert "op=max" in op and "op=sum" in op
    assert "src=0" in root and "src=2" in root
    assert "all_reduce(float32[5], op=sum)" in kind and "broadcast(float32[5], src=0)" in kind


def different_known_calls(rank: int, n: int, transport: str, check: bool) -> tuple[str, str]:
    told_at_once = check or transport == "shared_memory"
    communicator = Communicator(transport=transport, timeout_s=20 if told_at_once else 1, check=check)
    small, large = torch.ones(10), torch.ones(20)
    for _ in range(2):
        communicator.all_reduce(small)
        communicator.all_reduce(large)
    error = caught(lambda: communicator.all_reduce(large if rank == 1 else small))
    again = caught(lambda: communicator.all_reduce(small))
    communicator.close()
    assert check or (again[0] == "Error" and "failed before" in again[1])
    return error


@pytest.mark.parametrize(
    ("transport", "check"),
    [("shared_memory", False), ("sockets", False), ("process_group", True), ("process_group", False)],
)
def test_known_calls_in_another_order_are_told_too(ranks, transport, check):
    began = time.monotonic()
    for name, text in ranks(3).run(different_known_calls, transport, check):
        assert name == "Mismatch"
        assert "ranks 0 and 2: call 5: all_reduce(float32[10], op=sum)" in text
        assert "rank 1: call 5: all_reduce(float32[20], op=sum)" in text
    assert time.monotonic() - began < 10


def a_known_call_against_a_new_one(rank: int, n: int) -> tuple[str, str]:
    communicator = Communicator(timeout_s=20)
    known, new = torch.ones(10), torch.ones(20)
    communicator.all_reduce(known)
    error = caught(lambda: communicator.all_reduce(new if rank == 1 else known))
    communicator.close()
    return error


def test_a_known_call_that_meets_a_new_one_is_told(ranks):
    for name, text in ranks(3).run(a_known_call_against_a_new_one):
        assert name == "Mismatch"
        assert "all_reduce(float32[20], op=sum)" in text and "all_reduce(float32[10], op=sum)" in text


def one_does_not_come(rank: int, n: int, transport: str, known: bool) -> tuple[str, str]:
    communicator = Communicator(transport=transport, timeout_s=1)
    tensor = torch.ones(10)
    if known:
        communicator.all_reduce(tensor, algorithm="ring")
    if rank == 1:
        time.sleep(2.5)
        return "nothing", ""
    error = caught(lambda: communicator.all_reduce(tensor, algorithm="ring"))
    communicator.close()
    return error


@pytest.mark.parametrize(
    ("transport", "known"),
    [("shared_memory", True), ("sockets", True), ("process_group", True), ("shared_memory", False)],
)
def test_a_deadline_names_the_rank_that_did_not_come(ranks, transport, known):
    first, _, last = ranks(3).run(one_does_not_come, transport, known)
    for name, text in (first, last):
        assert name in ("DeadlineExceeded", "PeerFailed")
        assert "all_reduce(float32[10], op=sum)" in text
        assert "rank 1 did not come" in text.lower() or "for rank 1 at" in text
    assert "DeadlineExceeded" in (first[0], last[0])


def wrong_arguments(rank: int, n: int) -> list[tuple[str, str]]:
    communicator = Communicator()
    four = torch.ones(4)
    errors = [
        caught(lambda: communicator.all_reduce(four, "median")),
        caught(lambda: communicator.all_reduce(four, algorithm="star")),
        caught(lambda: communicator.all_reduce(torch.ones(4, dtype=torch.int32), "avg")),
        caught(lambda: communicator.all_reduce(four.to_sparse())),
        caught(lambda: communicator.all_gather_into_tensor(torch.ones(5), four)),
        caught(lambda: communicator.reduce_scatter_tensor(four, torch.ones(5))),
        caught(lambda: communicator.all_to_all_single(torch.ones(3), torch.ones(3))),
        caught(lambda: communicator.all_to_all_single(four, four, None, [1, 1])),
        caught(lambda: communicator.all_gather([four], four)),
        caught(lambda: communicator.broadcast(four)),
        caught(lambda: communicator.all_reduce(four.to("meta"))),
    ]
    communicator.close()
    return errors


def test_wrong_arguments_are_told_before_anything_is_sent(ranks):
    texts = [
        "op is one of sum, avg, max, min, product, not 'median'",
        "unknown algorithm 'star' for all_reduce",
        "avg of int32 is not a whole number",
        "dense tensors",
        "2 ranks bring 4 elements each, but the output has 5",
        "2 ranks get 4 elements each, but the input has 5",
        "not divisible by 2 ranks",
        "input splits [1, 1] do not cut 4 rows",
        "a list of 1 tensors for 2 ranks",
        "give one of src",
        "a tensor on meta",
    ]
    for errors in ranks(2).run(wrong_arguments):
        for (name, text), expected in zip(errors, texts, strict=True):
            assert name in ("ValueError", "TypeError") and expected in text


def test_a_mesh_of_two_dimensions_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown algorithm 'star'"):
        Communicator(algorithm="star")
    with pytest.raises(ValueError, match="unknown transport 'pigeon'"):
        Communicator(transport="pigeon")
    assert issubclass(DeadlineExceeded, Error)
