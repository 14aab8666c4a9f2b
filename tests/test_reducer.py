"""Gradients: exact means, the same bits on all ranks, whatever the mode, the buckets, the transport or the model.

Gradients of the models here are integers and multiples of the world size, so that means are exact in every type.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpx import DDPX

MODES = ("naive", "bucketed", "overlapped")
TRANSPORTS = ("shared_memory", "sockets", "process_group")
TINY_MB = 200 / 2**20  # 256 bytes after alignment: a small model makes many buckets, and parameters straddle them


def integers(*shape: int, seed: int, times: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (times * torch.randint(-3, 4, shape, generator=generator)).to(dtype)


class Chain(nn.Module):
    """Linear layers without anything between them; widths that leave uneven ends in buckets."""

    def __init__(self, *widths: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(widths))
        for number, param in enumerate(self.parameters()):
            param.data = integers(*param.shape, seed=number, dtype=dtype).sign()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(output: Tensor, world_size: int) -> Tensor:
    """Its gradient is the world size everywhere."""
    return output.sum() * world_size


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in module.parameters()]


def expected_means(
    make: Callable[[], nn.Module], batches: Sequence[Sequence[Tensor]], loss: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """By parameter: the mean over ranks of the gradients summed over a rank's batches, on one process."""
    model = make()
    for batch in itertools.chain.from_iterable(batches):
        loss(model(batch)).backward()
    return [param.grad / len(batches) for param in model.parameters() if param.grad is not None]


def assert_equal(actual: Iterable[Tensor | None], expected: Iterable[Tensor], *context: object) -> None:
    for number, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert mine is not None and torch.equal(mine, theirs), (*context, f"parameter {number}", mine, theirs)


def digest(tensors: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


# ---- Exact means -----------------------------------------------------------------------------------------------------


def exact_means(rank: int, world_size: int, transport: str, algorithms: Sequence[str]) -> int:
    """Three steps in each mode with each algorithm; returns how many gradients were compared."""
    compared = 0
    for algorithm, mode in itertools.product(algorithms, MODES):
        torch.manual_seed(rank)  # weights that differ until rank 0's are everybody's
        model = DDPX(Chain(5, 17, 33, 1), bucket_cap_mb=TINY_MB, mode=mode, algorithm=algorithm, transport=transport)
        for step in range(3):
            batches = [[integers(4, 5, seed=100 * step + peer)] for peer in range(world_size)]
            model.zero_grad(set_to_none=step != 1)
            loss_of(model(batches[rank][0]), world_size).backward()
            expected = expected_means(lambda: Chain(5, 17, 33, 1), batches, lambda out: loss_of(out, world_size))
            assert_equal(gradients(model), expected, algorithm, mode, step)
            compared += len(expected)
        assert len(model.reducer.buckets) > (6 if mode == "naive" else 10) - 1
        assert all(bucket.algorithm == algorithm for bucket in model.reducer.buckets)
    return compared


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world_size", "algorithms"), [(2, ("direct", "ring", "tree")), (3, ("ring", "doubling")), (4, ("direct", "tree"))]
)
def test_gradients_are_the_exact_mean(ranks, transport: str, world_size: int, algorithms: tuple[str, ...]) -> None:
    compared = ranks(world_size).run(exact_means, transport, algorithms, timeout_s=120)
    assert compared == [len(algorithms) * len(MODES) * 3 * 6] * world_size


def without_reduction(rank: int, world_size: int) -> list[str]:
    """Digests of local gradients, and of reduced ones."""
    digests = []
    model = DDPX(Chain(5, 17, 1))
    for synchronise in (False, True):
        model.require_backward_grad_sync = synchronise
        model.zero_grad()
        loss_of(model(integers(4, 5, seed=rank)), world_size).backward()
        digests.append(digest(gradients(model)))
    return digests


def test_without_reduction_ranks_do_differ(ranks) -> None:
    """The control: the batches above give every rank its own gradients."""
    local, reduced = zip(*ranks(3).run(without_reduction))
    assert len(set(local)) == 3 and len(set(reduced)) == 1


def random_gradients(rank: int, world_size: int, transport: str) -> dict[str, str]:
    digests = {}
    for algorithm, dtype in itertools.product(("direct", "ring", "tree", "doubling"), (torch.float32, torch.bfloat16)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 50), nn.Tanh(), nn.Linear(50, 3)).to(dtype)
        model = DDPX(model, bucket_cap_mb=0.001, algorithm=algorithm, transport=transport)
        for step in range(2):
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(8, 7, dtype=dtype)).square().sum().backward()
            digests[f"{algorithm} {dtype} {step}"] = digest(gradients(model))
    return digests


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_hold_the_same_bits(ranks, transport: str) -> None:
    digests = ranks(4).run(random_gradients, transport)
    assert all(theirs == digests[0] for theirs in digests)
    assert len({value for key, value in digests[0].items() if key.endswith("float32 1")}) > 2  # the order matters


# ---- Buckets and modes -----------------------------------------------------------------------------------------------


def launches(rank: int, world_size: int) -> dict[str, dict[str, object]]:
    found = {}
    for mode in MODES:
        model = DDPX(Chain(50, 50, 50, 1), bucket_cap_mb=0.005, mode=mode)
        for _ in range(2):
            loss_of(model(integers(4, 50, seed=rank)), world_size).backward()
        stats = model.stats()
        buckets = stats.buckets
        found[mode] = {
            "buckets": len(buckets),
            "during backward": sum(bucket.launched_s < stats.backward_ended_s for bucket in buckets),
            "in order": all(
                a.launched_s <= b.launched_s and a.ended_s <= b.started_s for a, b in zip(buckets, buckets[1:])
            ),
            "one at a time": all(a.wait_ended_s <= b.launched_s for a, b in zip(buckets, buckets[1:])),
            "round": stats.round,
            "bytes": sum(bucket.nbytes for bucket in buckets),
            "one algorithm": {bucket.algorithm for bucket in buckets} == {"direct"},
        }
    return found


def ends_in_another_order(rank: int, world_size: int) -> None:
    """Two wrappers in one backward, in another order on each rank."""
    models = [DDPX(Chain(5, 5, 1), timeout_s=10) for _ in range(2)]
    for turn in range(4):
        batches = [[integers(4, 5, seed=10 * turn + peer)] for peer in range(world_size)]
        outputs = [model(batches[rank][0]) for model in (models if rank or turn == 0 else models[::-1])]
        loss_of(outputs[0] + outputs[1], world_size).backward()
        means = expected_means(lambda: Chain(5, 5, 1), batches, lambda output: loss_of(output, world_size))
        for model in models:
            assert_equal(gradients(model), means, turn)
            model.zero_grad()


def test_two_wrappers_may_end_in_another_order_on_another_rank(ranks) -> None:
    ranks(2).run(ends_in_another_order)


def test_modes_differ_in_buckets_and_in_when_they_launch(ranks) -> None:
    for found in ranks(2).run(launches):
        naive, bucketed, overlapped = (found[mode] for mode in MODES)
        assert naive["buckets"] == 6  # one a parameter
        assert bucketed["buckets"] == overlapped["buckets"] > 3
        assert naive["during backward"] == bucketed["during backward"] == 0
        assert overlapped["during backward"] >= overlapped["buckets"] - 2
        assert naive["one at a time"] and not bucketed["one at a time"]
        assert all(mode["in order"] and mode["round"] == 2 and mode["one algorithm"] for mode in found.values())
        assert bucketed["bytes"] == overlapped["bytes"] >= 4 * (2 * 50 * 51 + 51)


def first_round(rank: int, world_size: int) -> tuple[bool, list[bool]]:
    """Whether gradients are views of the arena after the first backward, and whether they stay where they are."""
    model = DDPX(Chain(5, 9, 1), bucket_cap_mb=TINY_MB)
    x = integers(4, 5, seed=rank)
    loss_of(model(x), world_size).backward()
    (arena,) = model.reducer.arenas.values()
    inside = [arena.data_ptr() <= p.grad.data_ptr() < arena.data_ptr() + arena.nbytes for p in model.parameters()]
    places = [param.grad.data_ptr() for param in model.parameters()]
    stays = []
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        loss_of(model(x), world_size).backward()
        stays.append(places == [param.grad.data_ptr() for param in model.parameters()])
    return all(inside), stays


def test_gradients_are_views_into_one_arena(ranks) -> None:
    assert ranks(2).run(first_round) == [(True, [True, True])] * 2


def own_gradients(rank: int, world_size: int) -> None:
    model = DDPX(Chain(5, 9, 1), gradient_as_bucket_view=False)
    kept: list[Tensor | None] = []
    before: list[Tensor] = []
    for step in range(3):
        batches = [[integers(4, 5, seed=10 * step + peer)] for peer in range(world_size)]
        model.zero_grad()
        loss_of(model(batches[rank][0]), world_size).backward()
        expected = expected_means(lambda: Chain(5, 9, 1), batches, lambda out: loss_of(out, world_size))
        assert_equal(gradients(model), expected)
        assert_equal(kept, before)  # what was kept is not overwritten
        kept, before = [param.grad for param in model.parameters()], expected


def test_gradients_may_stay_the_tensors_that_autograd_made(ranks) -> None:
    ranks(2).run(own_gradients)


class Branches(nn.Module):
    """Two branches; `flip` turns round which gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Chain(5, 40), Chain(5, 40)

    def forward(self, x: Tensor, flip: bool) -> Tensor:
        first, second = (self.b, self.a) if flip else (self.a, self.b)
        before = first(x)
        return before + second(x)


def layout(rank: int, world_size: int, flips: Sequence[bool]) -> tuple[list[str], list[str]]:
    """The order of parameters in the buckets, and the one in which this rank's gradients came."""
    model = DDPX(Branches(), bucket_cap_mb=TINY_MB)
    for step in range(3):
        model.zero_grad()
        batches = [integers(4, 5, seed=10 * step + peer) for peer in range(world_size)]
        loss_of(model(batches[rank], flips[rank]), world_size).backward()
        reference = Branches()
        for batch in batches:
            loss_of(reference(batch, False), 1).backward()
        assert_equal(gradients(model), [param.grad for param in reference.parameters()])
    names = [slot.name for slot in model.reducer.slots]
    order = list(dict.fromkeys(slot.name for bucket in model.reducer.buckets for slot in bucket.slots))
    return order, [names[index] for index in model.reducer.last_arrivals]


def test_buckets_follow_the_order_in_which_gradients_came_on_rank_0(ranks) -> None:
    for flips in ([False, True, True], [True, False, False]):
        found = ranks(3).run(layout, flips)
        orders, arrivals = zip(*found)
        assert orders[0] == orders[1] == orders[2] == arrivals[0]
        assert arrivals[1] == arrivals[2] != arrivals[0]


def straddling(rank: int, world_size: int) -> tuple[int, int]:
    """One parameter of 10,000 elements over many buckets. Returns buckets of it, and parameters of one bucket."""
    model = DDPX(Chain(3, 2, 100, 100), bucket_cap_mb=0.002)
    for step in range(2):
        batches = [[integers(4, 3, seed=10 * step + peer)] for peer in range(world_size)]
        model.zero_grad()
        loss_of(model(batches[rank][0]), world_size).backward()
        expected = expected_means(lambda: Chain(3, 2, 100, 100), batches, lambda out: loss_of(out, world_size))
        assert_equal(gradients(model), expected)
    return (
        max(len(slot.buckets) for slot in model.reducer.slots),
        max(len(bucket.slots) for bucket in model.reducer.buckets),
    )


def test_a_parameter_may_lie_in_many_buckets_and_a_bucket_hold_many_parameters(ranks) -> None:
    for buckets, parameters in ranks(2).run(straddling):
        assert buckets > 15 and parameters > 2


# ---- Models, each aimed at one bug -----------------------------------------------------------------------------------


class Types(nn.Module):
    """A parameter of every type that has gradients, one transposed, one with nothing in it, one scalar."""

    DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)

    def __init__(self) -> None:
        super().__init__()
        self.of_type = nn.ParameterList(nn.Parameter(integers(33, seed=1, dtype=dtype)) for dtype in self.DTYPES)
        self.transposed = nn.Parameter(integers(6, 10, seed=2).t())
        self.channels_last = nn.Parameter(integers(2, 3, 4, 5, seed=3).to(memory_format=torch.channels_last))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        total = self.scalar * x.sum() + self.empty.sum() + (self.transposed * x[:10, None]).sum()
        total = total + (self.channels_last * x[:5]).sum()
        for param in self.of_type:
            term = (param * x.to(param.dtype)).sum()
            total = total + (term.real if param.dtype.is_complex else term).float()
        return total


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(33, 33, bias=False), nn.Linear(33, 33, bias=False)
        self.first.weight.data = integers(33, 33, seed=5)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Chain(33, 10), Chain(10, 3)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = Chain(33, 20), Chain(20, 20, 20), Chain(20, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Chain(33, 5), Chain(33, 5)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"both": [self.a(x), self.b(x)]}


class CalledTwice(nn.Module):
    """One layer used three times in a forward: its hook fires once, with the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Chain(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(2 * x) - self.layer(5 * x)


def total(output: object) -> Tensor:
    return sum(tensor.sum() for tensor in output["both"]) if isinstance(output, dict) else output.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "types": Types,
    "tied": Tied,
    "frozen": Frozen,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "several outputs": SeveralOutputs,
    "called twice": CalledTwice,
}


def toy_model(rank: int, world_size: int, name: str, transport: str) -> None:
    make = MODELS[name]
    for mode in MODES:
        model = DDPX(make(), bucket_cap_mb=TINY_MB, mode=mode, transport=transport)
        for step in range(3):
            batches = [[integers(33, seed=10 * step + peer, times=world_size)] for peer in range(world_size)]
            model.zero_grad()
            (total(model(batches[rank][0])) * world_size).backward()
            expected = expected_means(make, batches, lambda output: total(output) * world_size)
            assert_equal([grad for grad in gradients(model) if grad is not None], expected, name, mode, step)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", MODELS)
def test_toy_models_get_exact_means(ranks, name: str, transport: str) -> None:
    ranks(2).run(toy_model, name, transport)


def strides(rank: int, world_size: int) -> None:
    model = DDPX(Types())
    model(integers(33, seed=rank)).backward()
    for param in model.module.parameters():
        assert param.grad.shape == param.shape and param.grad.dtype is param.dtype
        assert param.grad.stride() == param.stride() or not param.numel()


def test_gradients_have_the_strides_of_their_parameters(ranks) -> None:
    ranks(2).run(strides)


# ---- Steps in other orders -------------------------------------------------------------------------------------------


def accumulation(rank: int, world_size: int, way: str, transport: str) -> None:
    """Three micro-batches on each rank, reduced with the last, twice; then a plain step."""
    model = DDPX(Chain(5, 17, 1), bucket_cap_mb=TINY_MB, transport=transport)
    for step in range(2):
        batches = [[integers(4, 5, seed=100 * step + 10 * peer + k) for k in range(3)] for peer in range(world_size)]
        model.zero_grad()
        if way == "context":
            with model.no_sync():
                for batch in batches[rank][:2]:
                    loss_of(model(batch), world_size).backward()
            loss_of(model(batches[rank][2]), world_size).backward()
        elif way == "assignment":
            for number, batch in enumerate(batches[rank]):
                model.require_backward_grad_sync = number == 2
                loss_of(model(batch), world_size).backward()
        else:  # forward inside, backward outside: the forward decides, as in DDP
            with model.no_sync():
                losses = [loss_of(model(batch), world_size) for batch in batches[rank][:2]]
            for loss in losses:
                loss.backward()
            loss_of(model(batches[rank][2]), world_size).backward()
        expected = expected_means(lambda: Chain(5, 17, 1), batches, lambda out: loss_of(out, world_size))
        assert_equal(gradients(model), expected, way, step)
    assert model.reducer.rounds == 2
    batches = [[integers(4, 5, seed=peer)] for peer in range(world_size)]
    model.zero_grad()
    loss_of(model(batches[rank][0]), world_size).backward()
    expected = expected_means(lambda: Chain(5, 17, 1), batches, lambda out: loss_of(out, world_size))
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("way", ["context", "assignment", "backward outside"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_micro_batches_accumulate_and_are_reduced_once(ranks, way: str, transport: str) -> None:
    ranks(2).run(accumulation, way, transport)


def no_sync_restores(rank: int, world_size: int) -> None:
    model = DDPX(Chain(5, 3))
    with pytest.raises(KeyError):
        with model.no_sync():
            assert not model.require_backward_grad_sync
            raise KeyError
    assert model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    with model.no_sync():
        pass
    assert not model.require_backward_grad_sync


def test_no_sync_leaves_things_as_they_were_even_when_left_by_an_exception(ranks) -> None:
    ranks(2).run(no_sync_restores)


def without_zero_grad(rank: int, world_size: int) -> None:
    """Means of successive steps add up, as in DDP: what was reduced already is the same on all ranks."""
    model, sums = DDPX(Chain(5, 17, 1), bucket_cap_mb=TINY_MB), None
    for step in range(3):
        batches = [[integers(4, 5, seed=10 * step + peer)] for peer in range(world_size)]
        loss_of(model(batches[rank][0]), world_size).backward()
        means = expected_means(lambda: Chain(5, 17, 1), batches, lambda out: loss_of(out, world_size))
        sums = means if sums is None else [a + b for a, b in zip(sums, means, strict=True)]
        assert_equal(gradients(model), sums, step)


def test_without_zero_grad_means_add_up(ranks) -> None:
    ranks(2).run(without_zero_grad)


def two_forwards_one_backward(rank: int, world_size: int) -> None:
    model = DDPX(Chain(5, 17, 1), bucket_cap_mb=TINY_MB)
    for step in range(3):
        batches = [[integers(4, 5, seed=10 * step + 2 * peer + k) for k in range(2)] for peer in range(world_size)]
        model.zero_grad()
        first, second = (loss_of(model(batch), world_size) for batch in batches[rank])
        (first + second).backward()
        expected = expected_means(lambda: Chain(5, 17, 1), batches, lambda out: loss_of(out, world_size))
        assert_equal(gradients(model), expected, step)


def test_two_forwards_may_share_a_backward(ranks) -> None:
    ranks(2).run(two_forwards_one_backward)


def two_backwards_of_one_forward(rank: int, world_size: int) -> None:
    model = DDPX(Chain(5, 17, 1), bucket_cap_mb=TINY_MB)
    for step in range(2):
        batches = [[integers(4, 5, seed=10 * step + peer)] for peer in range(world_size)]
        model.zero_grad()
        loss = loss_of(model(batches[rank][0]), world_size)
        loss.backward(retain_graph=True)
        loss.backward()
        means = expected_means(lambda: Chain(5, 17, 1), batches, lambda out: loss_of(out, world_size))
        assert_equal(gradients(model), [2 * mean for mean in means], step)


def test_a_second_backward_of_one_forward_adds_its_mean(ranks) -> None:
    ranks(2).run(two_backwards_of_one_forward)


def two_wrappers(rank: int, world_size: int) -> None:
    """Two models in one step, each with its own stream and transport, backward together and in turn."""
    models = [DDPX(Chain(5, 17, 1), bucket_cap_mb=TINY_MB), DDPX(Chain(5, 9, 1), bucket_cap_mb=TINY_MB)]
    makes = [lambda: Chain(5, 17, 1), lambda: Chain(5, 9, 1)]
    for step in range(4):
        batches = [[integers(4, 5, seed=10 * step + peer)] for peer in range(world_size)]
        for model in models:
            model.zero_grad()
        losses = [loss_of(model(batches[rank][0]), world_size) for model in models]
        if step % 2:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        for model, make in zip(models, makes, strict=True):
            expected = expected_means(make, batches, lambda out: loss_of(out, world_size))
            assert_equal(gradients(model), expected, step)


def test_two_models_may_be_trained_side_by_side(ranks) -> None:
    ranks(2).run(two_wrappers)


def a_part_of_the_world(rank: int, world_size: int) -> None:
    """Ranks 1 and 2 train one model and 0 and 3 another, each pair in its own process group."""
    import torch.distributed as dist

    groups = {pair: dist.new_group(pair) for pair in ((1, 2), (0, 3))}
    pair = next(pair for pair in groups if rank in pair)
    model = DDPX(Chain(5, 17, 1), process_group=groups[pair], bucket_cap_mb=TINY_MB)
    for step in range(2):
        batches = [[integers(4, 5, seed=10 * step + peer)] for peer in pair]
        model.zero_grad()
        loss_of(model(batches[pair.index(rank)][0]), 2).backward()
        expected = expected_means(lambda: Chain(5, 17, 1), batches, lambda out: loss_of(out, 2))
        assert_equal(gradients(model), expected, step)


def test_groups_of_some_ranks_train_apart(ranks) -> None:
    ranks(4).run(a_part_of_the_world)
