"""What DistributedDataParallel lets pass in silence, and what ddpx does there: one test a row, with both results.

Each program runs with torch's class and with ours. Its answer for torch's is what the row says ("apart": ranks ended
with different gradients, or weights, and nobody said so); ours must be right, or an error on every rank that names
what it is.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import everywhere
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import DDPX

Program = Callable[[Any, int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def net(module: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return module()


def data(rank: int, step: int = 0) -> Tensor:
    torch.manual_seed(1000 * step + rank + 1)
    return torch.randn(5, 4)


def equal_on_all(tensors: list[Tensor | None]) -> bool:
    mine = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
    rows = everywhere(mine)
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for row in rows
        for a, b in zip(rows[0], row, strict=True)
    )


def outcome(program: Program, kind: Any, rank: int, **options: Any) -> str:
    """Together, apart, or the error's class and words."""
    wrapper = kind(net(), **options)
    try:
        program(wrapper, rank)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    spoke = everywhere(said)
    if any(spoke):
        return spoke[rank]
    parameters = list(wrapper.module.parameters())
    same = equal_on_all([param.grad for param in parameters]) and equal_on_all(parameters)
    return "together" if same else "apart"


def both(rank: int, world_size: int, program: Program, options: dict[str, Any]) -> tuple[str, str]:
    return outcome(program, DistributedDataParallel, rank), outcome(program, DDPX, rank, timeout_s=15, **options)


def second_backward(wrapper: Any, rank: int) -> None:
    y = wrapper(data(rank)).sum()
    y.backward(retain_graph=True)
    y.backward()


def two_forwards_two_backwards(wrapper: Any, rank: int) -> None:
    a, b = wrapper(data(rank)).sum(), wrapper(2 * data(rank)).sum()
    a.backward()
    b.backward()


def inner_module_then_step(wrapper: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    wrapper.module(data(rank)).sum().backward()
    optimizer.step()


def no_sync_then_step(wrapper: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    with wrapper.no_sync():
        wrapper(data(rank)).sum().backward()
    optimizer.step()


def optimizer_in_a_gradient_hook(wrapper: Any, rank: int) -> None:
    for param in wrapper.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    wrapper(data(rank)).sum().backward()


def assigned_state(wrapper: Any, rank: int) -> None:
    wrapper.load_state_dict(wrapper.state_dict(), assign=True)
    wrapper(data(rank)).sum().backward()


def retyped(wrapper: Any, rank: int) -> None:
    wrapper.double()
    wrapper(data(rank).double()).sum().backward()


def replaced(wrapper: Any, rank: int) -> None:
    wrapper.module.b.weight = nn.Parameter(wrapper.module.b.weight.detach().clone())
    wrapper(data(rank)).sum().backward()


def unused_once(wrapper: Any, rank: int) -> None:
    handle = wrapper.module.a.register_forward_hook(lambda module, args, output: output.detach())
    wrapper(data(rank)).sum().backward()
    handle.remove()


def edited_on_one_rank(wrapper: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(4):
        if rank == 1 and step == 1:
            with torch.no_grad():
                wrapper.module.b.weight[0, 0] += 1e-3
        optimizer.zero_grad()
        wrapper(data(rank, step)).sum().backward()
        optimizer.step()


def different_learning_rates(wrapper: Any, rank: int) -> None:
    train(wrapper, rank, lr=0.1 * (rank + 1))


def train(wrapper: Any, rank: int, lr: float) -> None:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=lr)
    for step in range(3):
        optimizer.zero_grad()
        wrapper(data(rank, step)).sum().backward()
        optimizer.step()


def noop_hook(wrapper: Any, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    wrapper.register_comm_hook(None, noop_hook)
    train(wrapper, rank, lr=0.1)


def nan_on_one_rank(wrapper: Any, rank: int) -> None:
    x = data(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    wrapper(x).sum().backward()


NOW = {"check_replicas_every": 1}

ROWS = [
    # program, what torch's does, options of ours, what ours does on each of two ranks
    (second_backward, "apart", {}, ("together", "together")),
    (two_forwards_two_backwards, "apart", {}, ("together", "together")),
    (inner_module_then_step, "apart", {}, ("UnsynchronisedStep", "UnsynchronisedStep")),
    (no_sync_then_step, "apart", {}, ("UnsynchronisedStep", "UnsynchronisedStep")),
    (optimizer_in_a_gradient_hook, "apart", {}, ("UnsynchronisedStep", "UnsynchronisedStep")),
    (assigned_state, "apart", {}, ("ParametersChanged", "ParametersChanged")),
    (retyped, "apart", {}, ("ParametersChanged", "ParametersChanged")),
    (replaced, "apart", {}, ("ParametersChanged", "ParametersChanged")),
    (unused_once, "apart", {}, ("UnusedParameters", "UnusedParameters")),
    (edited_on_one_rank, "apart", NOW, ("ReplicasDrifted", "ReplicasDrifted")),
    (different_learning_rates, "apart", NOW, ("ReplicasDrifted", "ReplicasDrifted")),
    (noop_hook, "apart", NOW, ("ReplicasDrifted", "ReplicasDrifted")),
    (nan_on_one_rank, "apart", {"nonfinite": "error"}, ("PeerFailed|NonFiniteGradient", "NonFiniteGradient")),
]


@pytest.mark.parametrize(("program", "theirs", "options", "ours"), ROWS, ids=[row[0].__name__ for row in ROWS])
def test_ddp_is_silent_and_ddpx_is_right_or_speaks(ranks, program, theirs, options, ours) -> None:
    results = ranks(2).run(both, program, options)
    for (torchs, own), expected in zip(results, ours, strict=True):
        assert torchs == theirs
        assert own.split(":")[0] in expected.split("|"), own


def names_in(program: Program, options: dict[str, Any], ranks: Any) -> list[str]:
    return [own for _, own in ranks(2).run(both, program, options)]


@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        (inner_module_then_step, {}, "a.weight"),
        (unused_once, {}, "a.weight, a.bias"),
        (edited_on_one_rank, NOW, "parameter b.weight of rank"),
        (nan_on_one_rank, {"nonfinite": "error"}, "rank 1: the gradient of"),
        (replaced, {}, "parameter b.weight was replaced"),
    ],
    ids=["local step", "unused", "drift", "nan", "replaced"],
)
def test_the_error_names_the_parameter_on_every_rank(ranks, program, options, words) -> None:
    for own in names_in(program, options, ranks):
        assert words in own


# ---- Rows that need a program of their own ---------------------------------------------------------------------------


def frozen_then_unfrozen(rank: int, world_size: int) -> tuple[list[bool], str]:
    together = []
    said = ""
    for kind in (DistributedDataParallel, DDPX):
        module = net()
        module.a.requires_grad_(False)
        wrapper = kind(module)
        module.a.requires_grad_(True)
        try:
            wrapper(data(rank)).sum().backward()
        except ddpx.ParametersChanged as error:
            said = str(error)
            continue
        together.append(equal_on_all([module.a.weight.grad]))
    return together, said


def test_unfreezing_a_layer_is_an_error_and_ddp_leaves_it_local(ranks) -> None:
    for rank, (together, said) in enumerate(ranks(2).run(frozen_then_unfrozen)):
        assert together == [False]
        assert said.startswith(f"rank {rank}: parameter a.weight was unfrozen")


class Square(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3))
            nn.init.constant_(getattr(self, name).weight, {"a": 1.0, "b": 2.0}[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def other_order(rank: int, world_size: int) -> tuple[float, str]:
    module = Square("ab" if rank == 0 else "ba")
    mixed = DistributedDataParallel(module).module.a.weight[0, 0].item()
    with pytest.raises(ddpx.Mismatch) as failure:
        DDPX(Square("ab" if rank == 0 else "ba"))
    return mixed, str(failure.value)


def test_another_order_of_registration_is_named_on_every_rank_and_mixes_layers_in_ddp(ranks) -> None:
    results = ranks(2).run(other_order)
    assert results[1][0] == 2.0  # rank 1's `a` got the weights of `b`
    words = [text for _, text in results]
    assert words[0] == words[1]
    assert "differ first at tensor 0: rank 0 has a.weight" in words[0] and "rank 1 has b.weight" in words[0]


def autograd_grad(rank: int, world_size: int) -> bool:
    wrapper = DDPX(net())
    grads = torch.autograd.grad(wrapper(data(rank)).sum(), list(wrapper.parameters()))
    for param, grad in zip(wrapper.parameters(), grads, strict=True):
        param.grad = grad
    ddpx.sync_grads(wrapper)
    return equal_on_all([param.grad for param in wrapper.parameters()])


def test_gradients_from_autograd_grad_stay_local_until_sync_grads(ranks) -> None:
    assert ranks(2).run(autograd_grad) == [True, True]


def no_sync_around_backward_alone(rank: int, world_size: int) -> list[bool]:
    found = []
    for kind in (DistributedDataParallel, DDPX):
        wrapper = kind(net())
        y = wrapper(data(rank)).sum()
        with wrapper.no_sync():
            y.backward()
        found.append(equal_on_all([param.grad for param in wrapper.parameters()]))
    return found


def test_no_sync_is_read_in_the_forward_as_ddp_does(ranks) -> None:
    assert ranks(2).run(no_sync_around_backward_alone) == [[True, True]] * 2


def nan_warning(rank: int, world_size: int) -> list[str]:
    wrapper = DDPX(net(), nonfinite="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nan_on_one_rank(wrapper, rank)
    return [str(warning.message) for warning in caught]


def test_nan_can_be_a_warning_where_it_began(ranks) -> None:
    quiet, loud = ranks(2).run(nan_warning)
    assert quiet == [] and loud and "rank 1: the gradient of" in loud[0] and "synchronised backward 1" in loud[0]


def local_steps_allowed(rank: int, world_size: int) -> None:
    no_sync_then_step(DDPX(net(), local_steps="allow"), rank)


def test_local_steps_can_be_allowed(ranks) -> None:
    ranks(2).run(local_steps_allowed)


def right_steps(rank: int, world_size: int, kind: str) -> None:
    """Steps that follow a local backward and are right all the same."""
    from ddpx import Communicator

    wrapper = DDPX(net(), timeout_s=15)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
    communicator = Communicator() if kind == "our collectives" else None
    with wrapper.no_sync():
        wrapper(data(rank)).pow(2).sum().backward()
    if kind == "torch's collectives":
        for param in wrapper.parameters():
            dist.all_reduce(param.grad)
    elif communicator is not None:
        for param in wrapper.parameters():
            communicator.all_reduce(param.grad, op="avg")
    elif kind == "zeroed":
        optimizer.zero_grad(set_to_none=False)
    elif kind == "sync_grads, clipped":
        ddpx.sync_grads(wrapper)
        nn.utils.clip_grad_norm_(wrapper.parameters(), 0.1)
    elif kind == "another optimizer":
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    elif kind == "closure":

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = wrapper(data(rank)).pow(2).sum()
            loss.backward()
            return loss

        optimizer = torch.optim.LBFGS(wrapper.parameters(), max_iter=2)
        optimizer.step(closure)
    if kind != "closure":
        optimizer.step()
    assert equal_on_all(list(wrapper.parameters()))


@pytest.mark.parametrize(
    "kind",
    ["torch's collectives", "our collectives", "zeroed", "sync_grads, clipped", "another optimizer", "closure"],
)
def test_a_step_that_is_right_is_let_pass(ranks, kind: str) -> None:
    ranks(2).run(right_steps, kind)


def clipped_local_step(rank: int, world_size: int) -> None:
    wrapper = DDPX(net(), timeout_s=15)
    with wrapper.no_sync():
        wrapper(data(rank)).pow(2).sum().backward()
    nn.utils.clip_grad_norm_(wrapper.parameters(), 0.1)
    with pytest.raises(ddpx.UnsynchronisedStep, match=r"b\.weight"):
        torch.optim.SGD(wrapper.parameters(), lr=0.1).step()


def test_clipping_does_not_make_local_gradients_reduced_ones(ranks) -> None:
    ranks(2).run(clipped_local_step)


def drift_by_default(rank: int, world_size: int) -> int:
    wrapper = DDPX(net())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(30):
        if rank == 1 and step == 2:
            with torch.no_grad():
                wrapper.module.b.bias[1] += 1e-6
        optimizer.zero_grad()
        try:
            wrapper(data(rank, step)).sum().backward()
        except ddpx.ReplicasDrifted as error:
            assert "b.bias" in str(error) and "rank" in str(error)
            return step
        optimizer.step()
    return -1


def test_drift_is_found_within_ten_steps_by_default(ranks) -> None:
    found = ranks(2).run(drift_by_default)
    assert found[0] == found[1] and 2 <= found[0] <= 12
