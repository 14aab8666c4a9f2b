"""The wrapper as a user meets it: training equals big-batch training, and scripts written for DDP run as they are."""

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from processes import run
from torch import Tensor, nn

import ddpx
from ddpx import DDPX
from ddpx.group import Group

TINY_MB = 200 / 2**20  # buckets of 256 bytes
MODES = ("naive", "bucketed", "overlapped")


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 23), nn.GELU(), nn.Linear(23, 2)).to(dtype)


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), x.sin()[:, :2].to(dtype)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_wrapped(rank: int, world_size: int, steps: int, dtype: torch.dtype, **options: object) -> nn.Module:
    model = DDPX(small_model(dtype), bucket_cap_mb=TINY_MB, **options)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        x, target = batch_of(step, rank, dtype)
        mean_loss(model(x), target).backward()
        optimizer.step()
    return model.module


def train_alone(steps: int, dtype: torch.dtype, gradients: Callable[[nn.Module, int], None]) -> nn.Module:
    """One process; `gradients(model, step)` runs the backwards of a step."""
    model = small_model(dtype)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()
    return model


def big_batches(world_size: int, dtype: torch.dtype) -> Callable[[nn.Module, int], None]:
    def gradients(model: nn.Module, step: int) -> None:
        xs, targets = zip(*(batch_of(step, rank, dtype) for rank in range(world_size)))
        mean_loss(model(torch.cat(xs)), torch.cat(targets)).backward()

    return gradients


def in_rank_order(world_size: int, dtype: torch.dtype) -> Callable[[nn.Module, int], None]:
    def gradients(model: nn.Module, step: int) -> None:
        for rank in range(world_size):
            x, target = batch_of(step, rank, dtype)
            (mean_loss(model(x), target) / world_size).backward()

    return gradients


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# ---- Training --------------------------------------------------------------------------------------------------------


def big_batch_training(rank: int, world_size: int, options: dict[str, object]) -> tuple[float, float]:
    """After 20 steps: the largest difference to training on the joint batch, and of training on this rank's alone."""
    reference = train_alone(20, torch.float64, big_batches(world_size, torch.float64))
    alone = train_alone(20, torch.float64, lambda model, step: _one_batch(model, step, rank))
    wrapped = train_wrapped(rank, world_size, 20, torch.float64, **options)
    return largest_difference(wrapped, reference), largest_difference(alone, reference)


def _one_batch(model: nn.Module, step: int, rank: int) -> None:
    x, target = batch_of(step, rank, torch.float64)
    mean_loss(model(x), target).backward()


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"mode": "overlapped"}),
        (2, {"mode": "naive", "transport": "process_group"}),
        (3, {"mode": "bucketed", "algorithm": "ring"}),
        (4, {"algorithm": "tree"}),
        (4, {"algorithm": "direct", "transport": "process_group"}),
    ],
)
def test_twenty_steps_equal_big_batch_training(ranks, world_size: int, options: dict[str, object]) -> None:
    """The two add the same numbers in another order. Each element of a gradient is a sum of at most 4 ranks x 8 rows
    x 40 terms, so it is off by at most some 2^11 roundings of 2^-53; momentum sums the errors of 20 steps with weights
    below 10, at a step size of 0.1, of gradients below 1: 20 * 2^11 * 2^-53 < 5e-12."""
    for difference, control in ranks(world_size).run(big_batch_training, options):
        assert difference < 5e-12
        assert control > 1e-3


def rank_order_training(rank: int, world_size: int, options: dict[str, object]) -> bool:
    wrapped = train_wrapped(rank, world_size, 6, torch.float32, **options)
    return same_bits(wrapped, train_alone(6, torch.float32, in_rank_order(world_size, torch.float32)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_direct_equals_one_process_that_accumulates_in_rank_order_bit_for_bit(
    ranks, world_size: int, transport: str
) -> None:
    for mode in MODES:
        options = {"algorithm": "direct", "transport": transport, "mode": mode}
        assert ranks(world_size).run(rank_order_training, options) == [True] * world_size, mode


def test_other_orders_of_addition_give_other_bits(ranks) -> None:
    """The control of the test above."""
    assert ranks(4).run(rank_order_training, {"algorithm": "ring"}) == [False] * 4


def same_parameters_in_all_modes(rank: int, world_size: int) -> bool:
    models = [train_wrapped(rank, world_size, 5, torch.float32, mode=mode, algorithm="direct") for mode in MODES]
    return same_bits(models[0], models[1]) and same_bits(models[0], models[2])


def test_modes_train_the_same_model(ranks) -> None:
    assert ranks(3).run(same_parameters_in_all_modes) == [True] * 3


# ---- Construction ----------------------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """Buffers of several types; `seen` counts forwards in a buffer, as BatchNorm does."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.tensor(rank, dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([bool(rank), True]))
        self.register_buffer("local", torch.full((2, 3), float(rank)).t(), persistent=False)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(float(rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.seen


def construction(rank: int, world_size: int, transport: str) -> None:
    model = DDPX(WithBuffers(rank + 5), transport=transport)
    assert all((param == 5).all() for param in model.parameters())
    assert model.module.seen == 5 and model.module.flags.tolist() == [True, True] and (model.module.local == 5).all()
    for step in range(3):
        model.module.seen += 1 + rank  # ranks drift apart until the next training forward
        model.train(step < 2)
        output = model(torch.zeros(1, 3))
        assert model.module.seen == 5 + step + 1 + (rank if step == 2 else 0)
        output.sum().backward()


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_ranks_start_from_rank_0_and_share_its_buffers_before_training_forwards(ranks, transport: str) -> None:
    ranks(3).run(construction, transport)


class Announced(nn.Module):
    """A module with a buffer; rank 0 tells the board when it has run."""

    def __init__(self, rank: int, board: Group) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mean", torch.full((4,), float(rank)))
        self.rank, self.board = rank, board
        self.announces = False

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1
        if self.rank == 0 and self.announces:
            self.board.gather("rank 0 has run", None)
        return self.linear(x) + self.mean.sum()


def runs_ahead(rank: int, world_size: int) -> list[list[float]]:
    """The buffer after each of three forwards; after the first, rank 1 begins when rank 0's module has run."""
    board = Group()
    model = DDPX(Announced(rank, board), transport="shared_memory", timeout_s=10)
    found = []
    for turn in range(3):
        model.module.announces = turn > 0
        if rank and turn > 0:
            board.gather("rank 0 has run", None)
        model(torch.ones(2, 3)).sum().backward()
        found.append(model.module.mean.tolist())
    return found


def test_rank_0_does_not_wait_for_the_readers_of_its_buffers(ranks) -> None:
    assert ranks(2).run(runs_ahead) == [[[turn] * 4 for turn in (1.0, 2.0, 3.0)]] * 2


def batch_norm(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(rank)
    model = DDPX(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
        model.zero_grad()
    after = model.module[1].running_mean.tolist()
    model(torch.randn(5, 3))
    return after, model.module[1].running_mean.tolist()


def test_batch_norm_starts_each_forward_from_rank_0s_statistics(ranks) -> None:
    """Each rank then updates them from its own batch, as DDP does."""
    after, _ = zip(*ranks(2).run(batch_norm))
    assert after[0] != after[1]


# ---- What scripts use ------------------------------------------------------------------------------------------------


def scripts_find(rank: int, world_size: int) -> None:
    inner = small_model()
    model = DDPX(inner)
    assert model.module is inner
    assert list(model.state_dict()) == [f"module.{name}" for name in inner.state_dict()]
    assert [name for name, _ in model.named_parameters()] == [f"module.{name}" for name, _ in inner.named_parameters()]
    saved = copy.deepcopy(model.state_dict())
    x, target = batch_of(0, rank)
    mean_loss(model(x), target).backward()
    sgd(model).step()
    assert not torch.equal(saved["module.0.weight"], inner[0].weight)
    model.load_state_dict(saved)
    assert torch.equal(saved["module.0.weight"], inner[0].weight)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert sum(param.grad.square().sum() for param in model.parameters()).sqrt() <= 1.001e-3
    assert model.train().training and not model.eval().training
    with torch.no_grad():
        assert torch.equal(model(x), inner(x))
    assert model.require_backward_grad_sync is True


def test_scripts_written_for_ddp_find_what_they_use(ranks) -> None:
    ranks(2).run(scripts_find)


def nanogpt_style(rank: int, world_size: int) -> bool:
    """The loop of a well-known training script: synchronise by assignment in the last micro-step; scaled losses."""
    model = DDPX(small_model(), bucket_cap_mb=TINY_MB, algorithm="direct")
    raw_model = model.module
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    accumulation = 4
    x, target = batch_of(0, rank)
    for step in range(3):
        for micro_step in range(accumulation):
            model.require_backward_grad_sync = micro_step == accumulation - 1
            loss = mean_loss(model(x), target) / accumulation
            x, target = batch_of(step * accumulation + micro_step + 1, rank)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        return bool(torch.isfinite(raw_model(x)).all()) and float(sum(p.double().sum() for p in raw_model.parameters()))


def test_gradient_accumulation_as_nanogpt_writes_it_keeps_ranks_equal(ranks) -> None:
    results = ranks(2).run(nanogpt_style)
    assert results[0] == results[1]


def statistics(rank: int, world_size: int) -> None:
    model = DDPX(small_model(), bucket_cap_mb=TINY_MB)
    assert model.stats() is None
    for round_number in (1, 2):
        x, target = batch_of(0, rank)
        mean_loss(model(x), target).backward()
        stats = model.stats()
        assert stats.round == round_number
        assert stats.backward_began_s <= stats.backward_ended_s <= stats.wait_began_s <= stats.done_s
        for bucket in stats.buckets:
            assert bucket.ready_s <= bucket.launched_s <= bucket.started_s <= bucket.ended_s
            assert bucket.ended_s <= bucket.wait_ended_s + 1e-3 and bucket.wait_began_s <= bucket.wait_ended_s
        assert 0 <= stats.exposed_s <= stats.communication_s and 0 <= stats.overlap <= 1


def test_stats_tell_what_a_backward_looked_like(ranks) -> None:
    ranks(2).run(statistics)


# ---- One process -----------------------------------------------------------------------------------------------------


def test_one_process_needs_no_process_group() -> None:
    for mode in MODES:
        plain, wrapped = small_model(), DDPX(small_model(), mode=mode, bucket_cap_mb=TINY_MB)
        for model in (plain, wrapped):
            optimizer = sgd(model)
            for step in range(3):
                optimizer.zero_grad()
                x, target = batch_of(step, 0)
                mean_loss(model(x), target).backward()
                optimizer.step()
        assert same_bits(plain, wrapped.module)


def test_a_launched_rank_that_forgot_init_process_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Default process group has not been initialized.*WORLD_SIZE is 2"):
        DDPX(small_model())


SCRIPT = """
import torch
import ddpx

model = ddpx.DDPX(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
print(model.module.weight.grad.tolist())
"""


def test_a_script_on_one_process_ends_without_a_word_on_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(ddpx.__file__).parent.parent,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[[2.0, 2.0, 2.0]]", "")


# ---- Bad arguments and what is left behind ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode is one of naive, bucketed, overlapped, not 'fast'"),
        ({"algorithm": "rings"}, "unknown algorithm 'rings'; known: auto, ring"),
        ({"transport": "pigeon"}, "unknown transport 'pigeon'"),
        ({"link": "quick"}, "a link is LATENCY,BANDWIDTH"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPX(small_model(), **options)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(RuntimeError, match="not needed when a module doesn't have any parameter that requires"):
            DDPX(module)


def test_a_lazy_model_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used with"):
        DDPX(nn.Sequential(nn.LazyLinear(3)))


def dropped(rank: int, world_size: int, transport: str) -> list[tuple[int, int, int]]:
    """After each of several wrappers was made, used and dropped: shared mappings, threads of ours, open files."""
    import os

    counts = []
    for turn in range(5):
        model = DDPX(WithBuffers(0), transport=transport)
        for _ in range(1 + turn % 2):  # also one that never ran a second round
            model(torch.zeros(1, 3)).sum().backward()
        del model
        gc.collect()
        mappings = Path("/proc/self/maps").read_text().count("memfd:ddpx")
        threads = sum(thread.name.startswith("ddpx") for thread in threading.enumerate())
        counts.append((mappings, threads, len(os.listdir("/proc/self/fd"))))
    return counts


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_a_dropped_wrapper_leaves_no_memory_no_thread_and_no_open_file(transport: str) -> None:
    for counts in run(dropped, 2, transport):  # processes of their own, in which no other test has left anything
        mappings, threads, files = zip(*counts)
        assert mappings[-1] == 0
        assert max(threads[2:]) <= 1  # one may be on its way out
        assert files[-1] <= files[1] + 2


def inner_model_after_dropping(rank: int, world_size: int) -> None:
    """Gradients outlive the wrapper, and the inner module trains on alone."""
    inner = small_model()
    model = DDPX(inner)
    x, target = batch_of(0, rank)
    mean_loss(model(x), target).backward()
    before = [param.grad.clone() for param in inner.parameters()]
    del model
    gc.collect()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(inner.parameters(), before, strict=True))
    mean_loss(inner(x), target).backward()


def test_gradients_outlive_the_wrapper(ranks) -> None:
    ranks(2).run(inner_model_after_dropping)


def wrapped_again(rank: int, world_size: int) -> Sequence[float]:
    """Wrapping anew in a loop, as notebooks do."""
    inner = small_model()
    for turn in range(3):
        model = DDPX(inner, bucket_cap_mb=TINY_MB)
        model.zero_grad()
        x, target = batch_of(turn, rank)
        mean_loss(model(x), target).backward()
    return inner[0].weight.grad.flatten().tolist()


def test_a_model_may_be_wrapped_again(ranks) -> None:
    results = ranks(2).run(wrapped_again)
    assert results[0] == results[1]
