"""Ways of calling forward and backward, each against one process that runs every rank's work and averages."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddpx
from ddpx import DDPX

Work = Callable[[nn.Module, int], None]
WORLD_SIZE = 2


class Net(nn.Module):
    """Two layers and a choice of what to return."""

    def __init__(self, shape: str = "tensor") -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 2)
        self.shape = shape

    def forward(self, x: Tensor, branch: str = "") -> Any:
        h = torch.tanh(self.a(x))
        if self.shape.endswith("reentrant"):
            for _ in range(2):
                h = checkpoint(lambda t: torch.tanh(self.b(t)), h, use_reentrant=self.shape == "reentrant")
        elif branch != "without b":
            h = torch.tanh(self.b(h))
        y, z = self.c(h), h.sum()
        match self.shape:
            case "tuple":
                return y, (z, "text")
            case "dict":
                return {"y": y, "more": [z, None]}
            case "dataclass":
                return Result(y, z)
            case "object":
                return Box(y)
            case "opaque":
                return Opaque(y)
        return y


@dataclasses.dataclass
class Result:
    y: Tensor
    z: Tensor


class Box:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Opaque:
    """Its tensor lies in a closure: nothing finds it."""

    __slots__ = ("get",)

    def __init__(self, y: Tensor) -> None:
        self.get = lambda: y


def net(shape: str = "tensor") -> nn.Module:
    torch.manual_seed(7)
    return Net(shape)


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def reference(work: Work, build: Callable[[], nn.Module]) -> list[Tensor | None]:
    """The mean over ranks of what `work` leaves in each gradient; None where no rank has one."""
    rows = []
    for rank in range(WORLD_SIZE):
        module = build()
        work(module, rank)
        rows.append([param.grad for param in module.parameters()])
    means = []
    for grads in zip(*rows, strict=True):
        have = [grad.detach() for grad in grads if grad is not None]
        means.append(sum(have) / WORLD_SIZE if have else None)
    return means


def same(wrapper: nn.Module, wanted: list[Tensor | None]) -> None:
    for (name, param), mean in zip(wrapper.named_parameters(), wanted, strict=True):
        if mean is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad, mean, msg=lambda text, name=name: f"{name}: {text}")


# ---- Patterns: work(module, rank) leaves gradients -------------------------------------------------------------------


def plain(module: nn.Module, rank: int) -> None:
    module(data(rank)).pow(2).sum().backward()


def two_forwards_one_backward(module: nn.Module, rank: int) -> None:
    (module(data(rank)).sum() + module(data(rank, 1)).pow(2).sum()).backward()


def two_forwards_two_backwards_crossed(module: nn.Module, rank: int) -> None:
    first, second = module(data(rank)).pow(2).sum(), module(data(rank, 1)).pow(2).sum()
    second.backward()
    first.backward()


def three_backwards_on_one_forward(module: nn.Module, rank: int) -> None:
    y = module(data(rank))
    y.sum().backward(retain_graph=True)
    y.pow(2).sum().backward(retain_graph=True)
    y.pow(3).sum().backward()


def part_of_the_outputs(module: nn.Module, rank: int) -> None:
    module(data(rank))[:, :1].sum().backward()


def gradient_penalty(module: nn.Module, rank: int) -> None:
    x = data(rank).requires_grad_()
    y = module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()


def penalty_alone(module: nn.Module, rank: int) -> None:
    x = data(rank).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()


def forwards_without_a_backward(module: nn.Module, rank: int) -> None:
    with torch.no_grad():
        module(data(rank, 3))
    with torch.inference_mode():
        module(data(rank, 4))
    module(data(rank, 5))  # a graph that is dropped
    plain(module, rank)


def a_hook_on_a_parameter(module: nn.Module, rank: int) -> None:
    handle = next(module.parameters()).register_hook(lambda grad: grad * 3)
    plain(module, rank)
    handle.remove()


def in_a_thread(module: nn.Module, rank: int) -> None:
    thread = threading.Thread(target=plain, args=(module, rank))
    thread.start()
    thread.join()


def the_input_wants_a_gradient(module: nn.Module, rank: int) -> None:
    x = data(rank).requires_grad_()
    module(x).pow(2).sum().backward()
    assert x.grad is not None


PATTERNS = [
    plain,
    two_forwards_one_backward,
    two_forwards_two_backwards_crossed,
    three_backwards_on_one_forward,
    part_of_the_outputs,
    gradient_penalty,
    penalty_alone,
    forwards_without_a_backward,
    a_hook_on_a_parameter,
    in_a_thread,
    the_input_wants_a_gradient,
]


def against_reference(rank: int, world_size: int, work: Work, shape: str, options: dict[str, Any]) -> None:
    # The penalty leaves the last bias without a gradient, so unused parameters are allowed where a pattern needs it.
    wrapper = DDPX(net(shape), timeout_s=20, **options)
    for _ in range(3):
        wrapper.zero_grad()
        work(wrapper, rank)
        same(wrapper, reference(work, lambda: net(shape)))


@pytest.mark.parametrize("work", PATTERNS, ids=[work.__name__ for work in PATTERNS])
def test_pattern_gives_the_mean_of_single_processes(ranks, work) -> None:
    ranks(WORLD_SIZE).run(against_reference, work, "tensor", {"find_unused_parameters": work is penalty_alone})


GETTERS: dict[str, Callable[[Any], Tensor]] = {
    "tuple": lambda output: output[0],
    "dict": lambda output: output["y"],
    "dataclass": lambda output: output.y,
    "object": lambda output: output.y,
    "opaque": lambda output: output.get(),
}


def boxed(module: nn.Module, rank: int) -> None:
    inner = getattr(module, "module", module)
    GETTERS[inner.shape](module(data(rank))).pow(2).sum().backward()


@pytest.mark.parametrize("shape", list(GETTERS))
def test_outputs_come_in_any_container(ranks, shape) -> None:
    ranks(WORLD_SIZE).run(against_reference, boxed, shape, {})


@pytest.mark.parametrize("shape", ["reentrant", "nonreentrant"])
def test_a_block_can_be_checkpointed_twice(ranks, shape) -> None:
    ranks(WORLD_SIZE).run(against_reference, plain, shape, {})


def other_branch_on_rank_1(module: nn.Module, rank: int) -> None:
    module(data(rank), "without b" if rank == 1 else "").pow(2).sum().backward()


def test_ranks_may_take_different_branches(ranks) -> None:
    ranks(WORLD_SIZE).run(against_reference, other_branch_on_rank_1, "tensor", {"find_unused_parameters": True})


def create_graph(rank: int, world_size: int) -> None:
    def work(module: nn.Module, rank: int) -> None:
        module(data(rank)).pow(2).sum().backward(create_graph=True)

    wrapper = DDPX(net())
    with pytest.warns(UserWarning, match="create_graph=True"):
        work(wrapper, rank)
        same(wrapper, reference(work, net))


def test_backward_with_create_graph(ranks) -> None:
    ranks(WORLD_SIZE).run(create_graph)


class Trap(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Trap.armed:
            raise ArithmeticError("the trap")
        return grad


def backward_raises_on_one_rank(rank: int, world_size: int) -> str:
    module = net()
    module.b.register_forward_hook(lambda module, args, output: Trap.apply(output))
    wrapper = DDPX(module, timeout_s=20)
    plain(wrapper, rank)
    Trap.armed = rank == 1
    with pytest.raises((ddpx.Error, ArithmeticError)) as failure:
        plain(wrapper, rank)
    Trap.armed = False
    for _ in range(2):
        wrapper.zero_grad()
        plain(wrapper, rank)
        same(wrapper, reference(plain, net))
    return str(failure.value)


def test_a_backward_that_raised_is_told_to_all_and_the_next_is_fine(ranks) -> None:
    words = ranks(WORLD_SIZE).run(backward_raises_on_one_rank)
    assert "rank 1 failed in its backward" in words[0] and "the trap" in words[1]


def forward_raises_on_one_rank(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapper = DDPX(module, timeout_s=20)
    with pytest.raises((ddpx.Error, RuntimeError)) as failure:
        wrapper(torch.ones(2, 9 if rank == 1 else 4)).sum().backward()
    wrapper(data(rank)).sum().backward()
    return str(failure.value)


def test_a_forward_that_raised_is_told_to_all_and_the_next_is_fine(ranks) -> None:
    words = ranks(WORLD_SIZE).run(forward_raises_on_one_rank)
    assert "rank 1 failed in its forward" in words[0] and "shapes cannot be multiplied" in words[1]


def in_backward(rank: int, world_size: int) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module, twin = net(), net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    wrapper, plain_wrapper = DDPX(module), DDPX(twin)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        wrapper(data(rank, step)).pow(2).sum().backward()
        optimizer.zero_grad()
        plain_wrapper(data(rank, step)).pow(2).sum().backward()
        optimizer.step()
        assert all(param.grad is None for param in module.parameters())
        for ours, other in zip(module.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, other)


def test_torchs_optimizer_in_backward_steps_on_the_mean(ranks) -> None:
    ranks(WORLD_SIZE).run(in_backward)


def scaled_and_clipped(rank: int, world_size: int) -> None:
    def work(module: nn.Module, rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(data(rank)).float().pow(2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    wrapper = DDPX(net())
    for _ in range(2):
        wrapper.zero_grad()
        work(wrapper, rank)
        wanted = reference(work, net)
        same(wrapper, wanted)
    total = torch.nn.utils.clip_grad_norm_(wrapper.parameters(), 0.1)
    torch.testing.assert_close(total, torch.stack([mean.norm() for mean in wanted]).norm())


def test_grad_scaler_autocast_and_clipping(ranks) -> None:
    ranks(WORLD_SIZE).run(scaled_and_clipped)


def compiled(rank: int, world_size: int, outside: bool) -> None:
    torch._dynamo.reset()
    module = net()
    wrapper = DDPX(module if outside else torch.compile(module, backend="aot_eager"))
    call = torch.compile(wrapper, backend="aot_eager") if outside else wrapper
    for _ in range(2):
        wrapper.zero_grad()
        plain(call, rank)
        same(wrapper, reference(plain, net))


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False], ids=["wrapper", "module"])
def test_torch_compile(ranks, outside) -> None:
    ranks(WORLD_SIZE).run(compiled, outside, timeout_s=120)


def tied(rank: int, world_size: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.first(x)))

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Tied()

    wrapper = DDPX(build())
    for _ in range(2):
        wrapper.zero_grad()
        plain(wrapper, rank)
        same(wrapper, reference(plain, build))


def test_tied_and_reused_parameters(ranks) -> None:
    ranks(WORLD_SIZE).run(tied)


def frozen_while_the_other_trains(rank: int, world_size: int) -> None:
    judge, maker = DDPX(net()), DDPX(nn.Linear(4, 4))
    for step in range(2):
        for param in judge.parameters():
            param.requires_grad_(False)
        judge(maker(data(rank, step))).sum().backward()
        for param in judge.parameters():
            param.requires_grad_(True)
            assert param.grad is None or step
        judge.zero_grad()
        plain(judge, rank)
        same(judge, reference(plain, net))


def test_a_discriminator_can_be_frozen_for_the_generators_step(ranks) -> None:
    ranks(WORLD_SIZE).run(frozen_while_the_other_trains)


def wrap_and_drop(rank: int, world_size: int) -> tuple[int, int, bool]:
    module = nn.Linear(256, 1024)  # 1 MiB

    def once() -> "weakref.ref[DDPX]":
        wrapper = DDPX(module)
        module.zero_grad()
        wrapper(torch.ones(1, 256)).sum().backward()
        return weakref.ref(wrapper)

    for _ in range(20):
        last = once()
    gc.collect()
    before_kib, threads = resident_kib(), threading.active_count()
    for _ in range(200):
        last = once()
    module.zero_grad()
    gc.collect()
    return resident_kib() - before_kib, threading.active_count() - threads, last() is None


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.slow
def test_wrapping_and_dropping_200_times_leaves_memory_and_threads_flat(ranks) -> None:
    for grown_kib, threads, gone in ranks(WORLD_SIZE).run(wrap_and_drop, timeout_s=120):
        assert gone and threads <= 0
        assert grown_kib < 20 << 10  # 200 arenas would be 200 MiB
