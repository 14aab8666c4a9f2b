"""torch's stock communication hooks do with ours what they do with DDP; what is no hook is refused in DDP's words."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx import DDPX

CAP_MB = 0.0001  # several buckets for a toy


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def model_of(shape: str) -> nn.Module:
    if shape == "linear":
        return model()
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3))
    return convolutions.to(memory_format=torch.channels_last)


def power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5
    )


def register(wrapper, name: str) -> None:
    if name == "allreduce":
        wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "fp16_compress":
        wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "fp16_wrapper":
        wrapper.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    elif name == "bf16_compress":
        wrapper.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "noop":
        wrapper.register_comm_hook(None, debugging_hooks.noop_hook)
    elif name == "builtin_allreduce":
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif name == "builtin_fp16":
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif name == "power_sgd":
        wrapper.register_comm_hook(power_state(), powerSGD_hook.powerSGD_hook)
    elif name == "post_local_sgd":
        subgroups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        state = post_localSGD_hook.PostLocalSGDState(None, subgroups[dist.get_rank()], 3)
        wrapper.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def gradients(wrapper, rank: int, steps: int = 4, shape: str = "linear") -> list[list[torch.Tensor]]:
    sizes = (3, 8) if shape == "linear" else (2, 4, 9, 9)
    found = []
    for step in range(steps):
        wrapper.zero_grad()
        torch.manual_seed(100 * rank + step)
        wrapper(torch.randn(*sizes)).pow(2).sum().backward()
        found.append([param.grad.clone() for param in wrapper.parameters()])
    return found


def furthest(ours, theirs) -> float:
    pairs = [(a, b) for left, right in zip(ours, theirs, strict=True) for a, b in zip(left, right, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


def beside_ddp(rank: int, world_size: int, name: str) -> float:
    wrappers = [kind(model(), bucket_cap_mb=CAP_MB) for kind in (DDPX, DistributedDataParallel)]
    for wrapper in wrappers:
        register(wrapper, name)
    return furthest(*(gradients(wrapper, rank) for wrapper in wrappers))


EXACT = ["allreduce", "fp16_compress", "fp16_wrapper", "noop", "builtin_allreduce", "builtin_fp16", "post_local_sgd"]


@pytest.mark.parametrize("name", EXACT)
def test_a_stock_hook_gives_the_gradients_it_gives_with_ddp(ranks, name) -> None:
    assert ranks(2).run(beside_ddp, name) == [0.0, 0.0]


def with_hook(rank: int, world_size: int, name: str) -> list[float]:
    hooked, plain = DDPX(model(), bucket_cap_mb=CAP_MB), DDPX(model())
    register(hooked, name)
    found, wanted = gradients(hooked, rank), gradients(plain, rank)
    flat = torch.cat([grad.flatten() for grad in found[-1]])
    everywhere = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everywhere, flat)
    assert all(torch.equal(flat, other) for other in everywhere)
    return [furthest(a, b) for a, b in zip([[x] for x in found], [[x] for x in wanted], strict=True)]


def test_power_sgd_reduces_in_full_first_and_approximates_then(ranks) -> None:
    distances = ranks(2).run(with_hook, "power_sgd")[0]
    assert distances[0] < 1e-5 and distances[1] < 1e-5
    assert all(distance > 1e-4 for distance in distances[2:])


def in_turn(hook):
    """The hook, made to end before it returns: without that DDP hangs where callbacks call collectives on gloo."""

    def hook_in_turn(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return hook_in_turn


def power_sgd_beside_ddp(rank: int, world_size: int, wrapped: str, shape: str) -> float:
    hook = {
        "plain": powerSGD_hook.powerSGD_hook,
        "fp16": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        "bf16": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    }[wrapped]
    ours, theirs = (kind(model_of(shape), bucket_cap_mb=CAP_MB) for kind in (DDPX, DistributedDataParallel))
    ours.register_comm_hook(power_state(), hook)
    theirs.register_comm_hook(power_state(), in_turn(hook))
    found, wanted = (gradients(wrapper, rank, 6, shape) for wrapper in (ours, theirs))
    assert len(ours.reducer.buckets) > 2
    return furthest(found, wanted)


@pytest.mark.parametrize(
    ("wrapped", "shape", "world_size"),
    [("plain", "linear", 2), ("plain", "linear", 3), ("fp16", "linear", 2), ("plain", "channels_last", 2)],
)
def test_power_sgd_on_several_buckets_gives_what_ddp_gives(ranks, wrapped, shape, world_size) -> None:
    assert max(ranks(world_size).run(power_sgd_beside_ddp, wrapped, shape, timeout_s=20)) < 1e-5


def test_bf16_compression_works_on_gloo_too(ranks) -> None:
    distances = ranks(2).run(with_hook, "bf16_compress")[0]
    assert all(1e-6 < distance < 0.5 for distance in distances)


def seen_by_a_hook(rank: int, world_size: int) -> list[tuple]:
    wrapper = DDPX(model(), bucket_cap_mb=CAP_MB)
    seen: list[tuple] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients, params = bucket.gradients(), bucket.parameters()
        assert [grad.shape for grad in gradients] == [param.shape for param in params]
        assert torch.equal(torch.cat([grad.flatten() for grad in gradients]), bucket.buffer())
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().sum().item()))
        return default_hooks.allreduce_hook(None, bucket)

    wrapper.register_comm_hook(None, hook)
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(torch.ones(1, 8)).sum().backward()
    local = model()
    local(torch.ones(1, 8)).sum().backward()
    total = sum(param.grad.sum().item() for param in local.parameters())
    half = len(seen) // 2
    assert half > 2
    for calls in (seen[:half], seen[half:]):
        assert [index for index, _, _ in calls] == list(range(half))
        assert [last for _, last, _ in calls] == [False] * (half - 1) + [True]
        assert abs(sum(value for _, _, value in calls) - total) < 1e-3  # not divided
    return seen


def test_a_hook_sees_whole_parameters_in_launch_order_and_not_divided(ranks) -> None:
    assert len(ranks(2).run(seen_by_a_hook)[0]) > 4


def overlapped_optimizer(rank: int, world_size: int) -> float:
    wrapper = DDPX(model(), bucket_cap_mb=CAP_MB)
    wrapper._register_fused_optim(torch.optim.SGD, 0.1)
    plain = DDPX(model())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        gradients(wrapper, rank, 1)
        gradients(plain, rank, 1)
        optimizer.step()
    return max((a - b).abs().max().item() for a, b in zip(wrapper.parameters(), plain.parameters(), strict=True))


def test_the_overlapped_optimizer_steps_as_the_ordinary_one(ranks) -> None:
    assert max(ranks(2).run(overlapped_optimizer)) < 1e-6


def refusals(rank: int, world_size: int) -> None:
    wrapper = DDPX(model())
    with pytest.raises(TypeError, match="Communication hook must be callable."):
        wrapper.register_comm_hook(None, 1)

    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    with pytest.raises(ValueError, match="bucket annotation should be dist.GradBucket"):
        wrapper.register_comm_hook(None, wrong_bucket)

    def wrong_result(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    with pytest.raises(ValueError, match="return annotation should be torch.futures.Future"):
        wrapper.register_comm_hook(None, wrong_result)
    with pytest.raises(KeyError, match="bucket"):
        wrapper.register_comm_hook(None, lambda state, other: None)
    wrapper.register_comm_hook(None, lambda state, bucket: 3)
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once."):
        wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="callback must return a torch.futures.Future object, but got builtins.int"):
        wrapper(torch.ones(1, 8)).sum().backward()


def test_what_is_no_hook_is_refused_in_ddps_words(ranks) -> None:
    ranks(2).run(refusals)


def resizes(rank: int, world_size: int) -> float:
    """As batched PowerSGD does: pad the bucket, work on it, cut it off."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        numel = buffer.numel()
        buffer.resize_(3 * numel)[numel:] = 1e6
        buffer.resize_(numel)
        return default_hooks.allreduce_hook(None, bucket)

    hooked, plain = DDPX(model(), bucket_cap_mb=CAP_MB), DDPX(model())
    hooked.register_comm_hook(None, hook)
    return furthest(gradients(hooked, rank), gradients(plain, rank))


def test_a_hook_may_resize_its_bucket(ranks) -> None:
    assert max(ranks(2).run(resizes)) < 1e-5


def optimizer_in_hook(rank: int, world_size: int) -> float:
    """Parameters after some steps, beside DDP."""
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

    found = []
    for kind in (DDPX, DistributedDataParallel):
        wrapper = kind(model(), bucket_cap_mb=CAP_MB)
        state = optimizer_overlap_hooks._OptimizerHookState(_FunctionalSGD([], 0.1, _allow_empty_param_list=True))
        hook = default_hooks.fp16_compress_hook
        wrapper.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer(hook, state))
        for step in range(4):
            gradients(wrapper, 10 * rank + step, 1)
        found.append([param.detach() for param in wrapper.parameters()])
    return furthest(*([params] for params in found))


def test_an_optimizer_behind_a_hook_steps_as_it_does_with_ddp(ranks) -> None:
    assert max(ranks(2).run(optimizer_in_hook)) < 1e-6


def model_averaging(rank: int, world_size: int) -> float:
    from torch.distributed.optim import PostLocalSGDOptimizer

    found = []
    for kind in (DDPX, DistributedDataParallel):
        wrapper = kind(model(), bucket_cap_mb=CAP_MB)
        alone = [dist.new_group([member]) for member in range(world_size)][rank]
        wrapper.register_comm_hook(
            post_localSGD_hook.PostLocalSGDState(None, alone, 2), post_localSGD_hook.post_localSGD_hook
        )
        averager = PeriodicModelAverager(period=2, warmup_steps=2)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), averager)
        for step in range(7):
            gradients(wrapper, 10 * rank + step, 1)
            optimizer.step()
        found.append([param.detach() for param in wrapper.parameters()])
    return furthest(*([params] for params in found))


@pytest.mark.parametrize("world_size", [2, 3])
def test_post_local_sgd_with_model_averaging_gives_ddps_parameters(ranks, world_size) -> None:
    assert max(ranks(world_size).run(model_averaging)) < 1e-6


def quantized(rank: int, world_size: int, name: str) -> list[str]:
    words = []
    for kind in (DDPX, DistributedDataParallel):
        wrapper = kind(model(), bucket_cap_mb=25)
        wrapper.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, name))
        with pytest.raises(RuntimeError) as failure:
            gradients(wrapper, rank, 1)
        words.append(str(failure.value).split("At:")[0])
    return words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_quantization_hooks_fail_on_gloo_with_torchs_own_error(ranks, name) -> None:
    """They read the result of an all_gather as NCCL shapes it."""
    for ours, theirs in ranks(2).run(quantized, name):
        assert ours == theirs and "IndexError" in ours


def memory_after_failure(rank: int, world_size: int) -> tuple[bool, bool, str]:
    never: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    wrapper = DDPX(model(), bucket_cap_mb=CAP_MB, timeout_s=20)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 1 and state["fails"]:
            raise ValueError("the hook's own words")
        return never if state["fails"] else default_hooks.allreduce_hook(None, bucket)

    state = {"fails": False}
    wrapper.register_comm_hook(state, hook)
    wrapper(torch.ones(1, 8)).sum().backward()
    state["fails"] = True  # in the second round, where buckets launch inside backward
    with pytest.raises((ddpx.Error, ValueError, RuntimeError)) as failure:
        wrapper(torch.ones(1, 8)).sum().backward()
    words = str(failure.value)
    reducer, flat = weakref.ref(wrapper.reducer), weakref.ref(wrapper.reducer.buckets[0].flat)
    del wrapper, failure
    gc.collect()
    return reducer() is None, flat() is None, words


def test_a_wrapper_whose_hook_failed_lets_its_memory_go(ranks) -> None:
    answers = ranks(2).run(memory_after_failure, timeout_s=15)
    assert [answer[:2] for answer in answers] == [(True, True)] * 2
    assert "rank 1 failed" in answers[0][2] and "the hook's own words" in answers[0][2]
    assert answers[1][2] == "the hook's own words"


def hook_fails_on_one_rank(rank: int, world_size: int) -> str:
    wrapper = DDPX(model(), timeout_s=20)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 1:
            raise ValueError("the hook's own words")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        return future  # never done: only the failing rank's announcement ends the wait

    wrapper.register_comm_hook(None, hook)
    with pytest.raises((ddpx.Error, ValueError, RuntimeError)) as failure:
        wrapper(torch.ones(1, 8)).sum().backward()
    return str(failure.value)


def test_a_hook_that_raises_on_one_rank_ends_the_step_on_all(ranks) -> None:
    words = ranks(2).run(hook_fails_on_one_rank, timeout_s=15)
    assert "rank 1 failed" in words[0] and "the hook's own words" in words[1]
