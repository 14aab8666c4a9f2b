"""What a user does to a wrapped model: copies it, loads it, injects adapters, swaps heads, freezes, registers buffers.

Beside torch's DistributedDataParallel where that says something: "apart" is what ranks end with when nobody tells.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import everywhere
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import ddpx
from ddpx import DDPX

TRANSPORTS = ["shared_memory", "sockets", "process_group"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        return self.b(hidden if self.adapter is None else self.adapter(hidden))


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def data(rank: int, step: int = 0) -> Tensor:
    torch.manual_seed(1000 * step + rank + 1)
    return torch.randn(5, 4)


def together(tensors: list[Tensor | None]) -> bool:
    rows = everywhere([None if tensor is None else tensor.detach().clone() for tensor in tensors])
    return all(torch.equal(a, b) for row in rows for a, b in zip(rows[0], row, strict=True))


def step(wrapper: nn.Module, rank: int, number: int = 0) -> str:
    """A forward and a backward; what was said if they failed."""
    try:
        wrapper(data(rank, number)).pow(2).sum().backward()
    except (ddpx.Error, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_means(wrapper: Any, rank: int, number: int = 0) -> None:
    """The gradients of a step are the mean of what each rank's copy of the module has by itself."""
    alone = copy.deepcopy(wrapper.module)
    alone.zero_grad()
    alone(data(rank, number)).pow(2).sum().backward()
    for (name, param), own in zip(wrapper.module.named_parameters(), alone.parameters(), strict=True):
        if own.grad is None:
            continue
        dist.all_reduce(own.grad)
        torch.testing.assert_close(
            param.grad, own.grad / dist.get_world_size(), msg=lambda text, name=name: name + text
        )


# ---- Copies ----------------------------------------------------------------------------------------------------------


def through_pickle(wrapper: DDPX) -> DDPX:
    return pickle.loads(pickle.dumps(wrapper))


def through_a_file(wrapper: DDPX) -> DDPX:
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, through_pickle, through_a_file]


def copied_on_one_rank(rank: int, world_size: int, how: Any) -> None:
    wrapper = DDPX(net(), timeout_s=5)
    assert step(wrapper, rank) == ""
    if rank == 0:
        best = how(wrapper)
        with torch.no_grad():
            assert torch.equal(best(data(0)), wrapper(data(0)))
        best.eval()(data(0))
        with best.train().no_sync():
            best(data(0)).sum().backward()
        assert best.module.a.weight.grad is not None
        best.requires_grad_(False)
        best(data(0))  # a frozen average, called alone in training mode
        assert best.stats() is None
        del best
    for number in range(2):
        wrapper.zero_grad()
        assert step(wrapper, rank, number) == ""
        assert_means(wrapper, rank, number)
    assert step(DDPX(net()), rank) == ""  # wrapping goes on as before


@pytest.mark.parametrize("how", COPIES)
def test_one_rank_may_copy_and_use_a_wrapper_by_itself(ranks, how) -> None:
    ranks(2).run(copied_on_one_rank, how, timeout_s=30)


def copied_on_all_ranks(rank: int, world_size: int, how: Any) -> None:
    wrapper = DDPX(net())
    twin = how(wrapper)
    if rank == 1:
        with torch.no_grad():
            twin.module.a.weight.add_(1)  # as at construction, rank 0's values are the ones
    for number in range(3):
        twin.zero_grad()
        assert step(twin, rank, number) == ""
        assert_means(twin, rank, number)
        assert together([twin.module.a.weight])
    assert all(param.grad is None for param in wrapper.parameters())


@pytest.mark.parametrize("how", COPIES)
def test_copies_on_all_ranks_train_together(ranks, how) -> None:
    ranks(2).run(copied_on_all_ranks, how)


def copy_met_in_a_backward(rank: int, world_size: int) -> None:
    twin = copy.deepcopy(DDPX(net())).eval()
    x = data(rank).requires_grad_()
    torch.autograd.grad(twin(x).sum(), x)  # reaches no parameter: this rank alone
    assert twin._reducer is None
    for number in range(2):
        twin.zero_grad()
        assert step(twin, rank, number) == ""
        assert_means(twin, rank, number)


def test_a_copy_in_eval_mode_meets_its_peers_in_its_backward(ranks) -> None:
    ranks(2).run(copy_met_in_a_backward)


def copy_synchronised_by_hand(rank: int, world_size: int) -> None:
    twin = copy.deepcopy(DDPX(net()))
    with twin.no_sync():
        assert step(twin, rank) == ""
    ddpx.sync_grads(twin)
    assert_means(twin, rank)


def test_a_copy_can_be_synchronised_by_hand(ranks) -> None:
    ranks(2).run(copy_synchronised_by_hand)


def trained_on_one_rank(rank: int, world_size: int) -> str:
    wrapper = DDPX(net(), timeout_s=0.5)
    said = step(copy.deepcopy(wrapper), rank) if rank == 0 else ""
    dist.barrier()
    assert step(DDPX(net()), rank) == ""  # and wrapping and copying go on as before
    wrapper = copy.deepcopy(DDPX(net(), timeout_s=5))
    assert step(wrapper, rank) == ""
    assert_means(wrapper, rank)
    return said


def test_a_copy_trained_on_one_rank_alone_is_told_at_the_deadline(ranks) -> None:
    said, _ = ranks(2).run(trained_on_one_rank)
    assert said.startswith("DeadlineExceeded: rank 0 waited") and "for rank 1" in said
    assert "copy of a wrapper" in said and "all ranks have to make" in said


def shift(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


class Named(DDPX):
    def __init__(self, module: nn.Module, name: str, **options: Any) -> None:
        super().__init__(module, **options)
        self.name = name


class TorchNamed(DistributedDataParallel):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name


def what_a_copy_keeps(rank: int, world_size: int) -> list[list[Any]]:
    kept = []
    for kind in (TorchNamed, Named):
        wrapper = kind(net(), "mine")
        wrapper.steps = 7
        wrapper.require_backward_grad_sync = False
        wrapper.register_forward_hook(shift)
        wrapper.train(False)
        for how in COPIES:
            twin = how(wrapper)
            assert type(twin) is kind
            shifted = torch.equal(twin(data(rank)), twin.module(data(rank)) + 1)
            kept.append([twin.name, twin.steps, twin.require_backward_grad_sync, twin.training, shifted])
    return kept


def test_a_copy_keeps_what_torchs_keeps(ranks) -> None:
    for kept in ranks(2).run(what_a_copy_keeps):
        assert kept == [["mine", 7, False, False, True]] * 6


def of_another_group(rank: int, world_size: int) -> str:
    wrapper = DDPX(net(), process_group=dist.new_group([0, 1]))
    twin = copy.deepcopy(wrapper)
    assert twin.process_group is wrapper.process_group
    assert step(twin, rank) == ""
    assert_means(twin, rank)
    with pytest.raises(RuntimeError, match="DDP Pickling/Unpickling are only supported"):
        pickle.dumps(wrapper)


def test_a_copy_stays_in_its_process_group(ranks) -> None:
    ranks(2).run(of_another_group)


def copy_with_static_graph(rank: int, world_size: int) -> None:
    wrapper = DDPX(net())
    wrapper._set_static_graph()
    twin = copy.deepcopy(wrapper)
    said = step(twin, rank)
    assert said == "", said
    assert twin.static_graph and twin.reducer.unused.static
    twin.module.adapter = nn.Identity()
    twin.zero_grad()
    assert step(twin, rank) == ""
    assert_means(twin, rank)


def test_a_copy_keeps_its_static_graph(ranks) -> None:
    ranks(2).run(copy_with_static_graph)


# ---- Buffers ---------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def changing_buffers(rank: int, world_size: int, transport: str) -> None:
    wrapper = DDPX(Buffers(), transport=transport, check_replicas_every=2)
    module = wrapper.module
    mine = float(rank + 1)
    assert step(wrapper, rank) == ""
    for number in range(2):  # twice, so that nothing is left over from the first time
        module.late = torch.full((3,), mine)
        module.fc.register_buffer("seen", torch.full((2, 2), int(mine)))
        wrapper.zero_grad()
        assert step(wrapper, rank, number) == ""
        assert module.late.tolist() == [1.0] * 3 and module.fc.seen.tolist() == [[1, 1], [1, 1]]
        for size in (5, 9, 2000, 3):
            module.late = torch.full((size,), mine, dtype=torch.float64)
            wrapper.zero_grad()
            assert step(wrapper, rank, number) == ""
            assert module.late.tolist() == [1.0] * size
            assert_means(wrapper, rank, number)
        module.late.data = torch.full((7,), mine, dtype=torch.float64)  # under the same tensor
        assert step(wrapper, rank, number) == ""
        assert module.late.tolist() == [1.0] * 7
        module.late = None
        del module.fc.seen
        assert step(wrapper, rank, number) == ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_are_shared_as_they_are_at_each_forward(ranks, transport: str) -> None:
    ranks(2).run(changing_buffers, transport)


def torchs_late_buffer(rank: int, world_size: int) -> float:
    wrapper = DistributedDataParallel(Buffers())
    wrapper.module.fc.register_buffer("seen", torch.full((2,), rank + 1.0))
    step(wrapper, rank)
    step(wrapper, rank)
    return wrapper.module.fc.seen[0].item()


def test_torch_shares_no_buffer_that_came_into_a_model_without_buffers(ranks) -> None:
    assert ranks(2).run(torchs_late_buffer) == [1.0, 2.0]


def differing_buffers(rank: int, world_size: int, transport: str, what: str) -> list[str]:
    module = Buffers()
    if what not in ("first", "none"):
        module.late = torch.zeros(3)
    wrapper = DDPX(module, transport=transport, timeout_s=15)
    assert step(wrapper, rank) == ""
    odd = rank == 1
    module.late = {
        "size": torch.ones(1000 if odd else 3),
        "dtype": torch.ones(3, dtype=torch.float64 if odd else torch.float32),
        "name": torch.ones(3),
        "count": torch.ones(3),
        "first": torch.ones(4 if odd else 3),
        "none": torch.ones(3) if odd else None,
        "all grow": torch.ones(1000 if odd else 999),
    }[what]
    if what == "name":
        module.late = None
        module.register_buffer("odd" if odd else "even", torch.ones(3))
    if what == "count" and odd:
        module.register_buffer("odd", torch.ones(2))
    return [step(wrapper, rank, 1), f"{type(wrapper).__name__}"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("what", "buffer"),
    [
        ("size", "late is [1000]"),
        ("dtype", "late is [3] torch.float64"),
        ("name", "[3] torch.float32 on rank"),
        ("count", "odd is [2]"),
        ("first", "late is [4]"),
        ("none", "late is [3]"),
        ("all grow", "late is [1000]"),
    ],
)
def test_buffers_that_differ_are_named_on_every_rank(ranks, transport: str, what: str, buffer: str, world_size) -> None:
    for said, _ in ranks(world_size).run(differing_buffers, transport, what):
        assert said.split(":")[0] in ("Mismatch", "PeerFailed"), said
        assert "buffers differ between rank" in said and "rank 1" in said
        assert all(part in said for part in buffer.split(" is ")), said


# ---- Modules and parameters ------------------------------------------------------------------------------------------


def inject(module: Any) -> None:
    module.adapter = nn.Linear(4, 4)


def swap_head(module: Any) -> None:
    module.b = nn.Linear(4, 2)


def add_parameter(module: Any) -> None:
    module.a.register_parameter("scale", nn.Parameter(torch.ones(1)))


def remove(module: Any) -> None:
    module.a = nn.Identity()


CHANGES = [
    (inject, "parameter adapter.weight was added"),
    (swap_head, "parameter b.weight was replaced"),
    (add_parameter, "parameter a.scale was added"),
    (remove, "parameter a.weight was removed"),
]


def changed(rank: int, world_size: int, change: Any, alone: bool, options: dict[str, Any]) -> list[str]:
    wrapper = DDPX(net(), timeout_s=15, **options)
    assert step(wrapper, rank) == ""
    if rank == 1 or not alone:
        change(wrapper.module)
    return [step(wrapper, rank, 1), "" if alone else step(wrapper, rank, 2)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_parameter_that_comes_or_goes_after_wrapping_is_named_on_every_rank(ranks, change, words, alone) -> None:
    for options in ({}, {"find_unused_parameters": True}):
        for now, then in ranks(2).run(changed, change, alone, options):
            assert words in now and "wrap it again" in now, now
            assert alone or words in then  # and as long as it is so


def injected_in_torchs(rank: int, world_size: int) -> bool:
    wrapper = DistributedDataParallel(net())
    inject(wrapper.module)
    assert step(wrapper, rank) == ""
    return together([wrapper.module.adapter.weight.grad])


def test_torch_leaves_an_injected_adapter_local(ranks) -> None:
    assert ranks(2).run(injected_in_torchs) == [False, False]


def harmless_changes(rank: int, world_size: int) -> None:
    wrapper = DDPX(net(), find_unused_parameters=False)
    module: Any = wrapper.module
    assert step(wrapper, rank) == ""
    inject(module)
    module.adapter.requires_grad_(False)  # a frozen adapter
    for number in (1, 2):
        wrapper.zero_grad()
        assert step(wrapper, rank, number) == ""
        assert_means(wrapper, rank, number)
    module.adapter.requires_grad_(True)
    assert "parameter adapter.weight was unfrozen" in step(wrapper, rank, 3)
    module.adapter = None
    module.a = nn.Sequential(module.a)  # the same parameters at other places
    wrapper.zero_grad()
    assert step(wrapper, rank, 4) == ""
    assert_means(wrapper, rank, 4)
    wanted = module.b.weight.grad.clone()
    prune.identity(module.b, "weight")
    wrapper.zero_grad()
    assert step(wrapper, rank, 4) == ""
    torch.testing.assert_close(module.b.weight_orig.grad, wanted)


def test_frozen_moved_and_pruned_parameters_train_on(ranks) -> None:
    ranks(2).run(harmless_changes)


def functional(rank: int, world_size: int) -> None:
    wrapper = DDPX(net())
    lent = {name: torch.zeros_like(param) for name, param in wrapper.named_parameters()}
    assert not torch.func.functional_call(wrapper, lent, data(rank)).any()
    assert step(wrapper, rank) == ""
    assert_means(wrapper, rank)


def test_a_functional_call_lends_tensors_and_gives_the_parameters_back(ranks) -> None:
    ranks(2).run(functional)


# ---- Outputs that are parameters -------------------------------------------------------------------------------------


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.tied = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) @ self.tied, self.tied


def loss_on_a_parameter(rank: int, world_size: int, find_unused: bool, order: str) -> tuple[str, list[float] | None]:
    wrapper = DDPX(Returning(), find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
    said = ""
    for _ in range(2):
        optimizer.zero_grad()
        output, tied = wrapper(torch.zeros(5, 4))
        try:
            ((rank + 1) * tied).sum().backward()
            if order == "first":
                output.sum().backward()
            optimizer.step()
        except ddpx.Error as error:
            said = str(error)
            break
    return said, None if said else wrapper.module.tied.grad[0].tolist()


def test_a_loss_on_a_returned_parameter_alone_is_averaged_or_told(ranks) -> None:
    for said, grad in ranks(2).run(loss_on_a_parameter, True, "alone"):
        assert said == "" and grad == [1.5, 1.5]
    for said, _ in ranks(2).run(loss_on_a_parameter, False, "alone"):
        assert "was about to use gradients that no backward has reduced over the ranks: tied" in said


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_penalty_on_a_returned_parameter_may_have_a_backward_of_its_own(ranks, find_unused: bool) -> None:
    for said, _ in ranks(2).run(loss_on_a_parameter, find_unused, "first"):
        assert said == ""


# ---- Freezing --------------------------------------------------------------------------------------------------------


def frozen_on_one_rank(rank: int, world_size: int, transport: str) -> list[str]:
    wrapper = DDPX(net(), transport=transport, timeout_s=15)
    assert step(wrapper, rank) == ""
    if rank == 1:
        wrapper.requires_grad_(False)
        wrapper(data(rank, 1))
        wrapper.requires_grad_(True)
    return [step(wrapper, rank, 2), step(wrapper, rank, 3)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_freezes_everything_for_a_step_is_named_on_every_rank(ranks, transport: str) -> None:
    for first, _ in ranks(2).run(frozen_on_one_rank, transport):
        assert "out of step" in first and "with all parameters frozen" in first, first
        assert "rank 1 made 1" in first and "rank 0 made 0" in first


def frozen_for_good(rank: int, world_size: int) -> str:
    wrapper = DDPX(net(), timeout_s=0.5)
    if rank == 1:
        wrapper.requires_grad_(False)
        wrapper(data(rank))
        dist.barrier()
        return ""
    said = step(wrapper, rank)
    dist.barrier()
    return said


def test_a_rank_that_stays_frozen_is_named_at_the_deadline(ranks) -> None:
    said, _ = ranks(2).run(frozen_for_good)
    assert said.startswith("DeadlineExceeded: rank 0 waited") and "for rank 1" in said
