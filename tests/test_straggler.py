"""Which rank is slow, and where: the rule on plain numbers, and a stall injected into each phase of a real step."""

import time

import pytest
import torch
from torch import nn

from ddpx.stats import PhaseTimes, find_straggler

STALL_S = 0.2


def test_the_slowest_rank_is_named_with_its_slow_phase():
    usual = PhaseTimes(0.010, 0.020, 0.040)
    slow = PhaseTimes(0.010, 0.021, 0.240)
    found = find_straggler([usual, usual, slow, usual])
    assert found is not None
    assert (found.rank, found.phase) == (2, "backward")
    assert found.excess_s == pytest.approx(0.2)


def test_equal_ranks_and_small_differences_name_nobody():
    usual = PhaseTimes(0.010, 0.020, 0.040)
    assert find_straggler([usual, usual, usual]) is None
    assert find_straggler([usual, PhaseTimes(0.011, 0.020, 0.041)]) is None
    assert find_straggler([usual]) is None


class _StallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.forward_stall_s = self.backward_stall_s = 0.0

    def forward(self, x):
        time.sleep(self.forward_stall_s)
        return self.second(_StallInBackward.apply(self.first(x), self.backward_stall_s))


def _stalled(rank, world_size, transport, phase):
    from ddpx import DDPX

    model = DDPX(_Net(), transport=transport, bucket_cap_mb=0.01)
    slow = rank == world_size - 1
    stall_s = STALL_S if slow else 0.0
    for step in range(3):
        if step == 2:
            time.sleep(stall_s if phase == "input" else 0.0)
            model.module.forward_stall_s = stall_s if phase == "forward" else 0.0
            model.module.backward_stall_s = stall_s if phase == "backward" else 0.0
        model(torch.ones(4, 64)).sum().backward()
    stats = model.stats()
    bucket = stats.longest_wait
    first = next(b.index for b in model.reducer.buckets if any("first" in slot.name for slot in b.slots))
    return stats.straggler, bucket.index if bucket else None, first


@pytest.mark.processes
@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "process_group"])
def test_a_stall_is_named_by_rank_phase_and_bucket_on_every_rank(ranks, transport, phase):
    for rank, (straggler, bucket, first) in enumerate(ranks(3).run(_stalled, transport, phase)):
        assert straggler is not None
        assert (straggler.rank, straggler.phase) == (2, phase)
        assert straggler.excess_s > 0.9 * STALL_S
        if rank != 2:
            # Backward stalls between the two layers, so the first bucket that needs the first layer waits; a late input
            # or forward makes the very first bucket wait.
            assert bucket == (first if phase == "backward" else 0)
