"""Programs that broke it once: parameters outside the module, hooks after ours, two wrappers at a time, odd outputs."""

import dataclasses

import pytest
import torch
from torch import nn

from ddpx import DDPX, Error, ParametersChanged
from ddpx.outputs import tensors_in


class WithScale(nn.Module):
    """`scale` is used in the loss, not in forward, as CLIP's logit_scale is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.layer(x)


def batch(rank, step=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_gradients(make, loss, world_size, step=0):
    """Single-process truth: the mean over ranks of each rank's gradients."""
    sums = None
    for rank in range(world_size):
        model = make()
        loss(model, model, batch(rank, step)).backward()
        grads = [param.grad for param in model.parameters()]
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
    return [grad / world_size for grad in sums]


def scaled_loss(wrapper, inner, x):
    return (wrapper(x) * inner.scale.exp()).pow(2).sum()


def trains_as_one_process(rank, world_size, **options):
    model = DDPX(WithScale(), **options)
    for step in range(3):
        model.zero_grad()
        scaled_loss(model, model.module, batch(rank, step)).backward()
        wanted = mean_gradients(WithScale, scaled_loss, world_size, step)
        for param, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(param.grad, want)


def parameter_outside_forward(rank, world_size):
    trains_as_one_process(rank, world_size)


def hook_after_wrapping(rank, world_size):
    model = DDPX(nn.Linear(64, 64))

    def halve(param):
        param.grad.mul_(0.5)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve)
    reference = nn.Linear(64, 64)
    reference.load_state_dict(model.module.state_dict())
    for step in range(3):
        model.zero_grad()
        x = [torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world_size)]
        model(x[rank]).pow(2).sum().backward()
        reference.zero_grad()
        sum(reference(part).pow(2).sum() for part in x).backward()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, 0.5 * want.grad / world_size)


def two_wrappers_in_one_backward(rank, world_size):
    shared = nn.Linear(4, 4)
    one, two = DDPX(nn.Sequential(shared, nn.Tanh())), DDPX(nn.Sequential(shared, nn.ReLU()))
    with pytest.raises(Error, match="two DDPX wrappers reduce parameter"):
        (one(batch(rank)).sum() + two(batch(rank)).sum()).backward()


def different_bucket_sizes(rank, world_size):
    trains_as_one_process(rank, world_size, bucket_cap_mb=7 if rank else 0.0001)


def grown_parameter(rank, world_size):
    model = DDPX(nn.Linear(4, 4, bias=False))
    model(batch(rank)).sum().backward()
    model.module.weight.data = torch.randn(6, 4)
    with pytest.raises(ParametersChanged, match=r"weight changed from \[4, 4\] to \[6, 4\]"):
        model(batch(rank))


@pytest.mark.parametrize(
    "program",
    [
        parameter_outside_forward,
        hook_after_wrapping,
        two_wrappers_in_one_backward,
        different_bucket_sizes,
        grown_parameter,
    ],
)
def test_the_program_is_right_or_told(ranks, program):
    ranks(2).run(program)


class _Slotted:
    __slots__ = ("tensor",)


class _Child(_Slotted):
    __slots__ = ("other",)


@dataclasses.dataclass
class _Fields:
    first: torch.Tensor


class _TaggedList(list):
    pass


def test_tensors_are_found_in_inherited_slots_and_beside_elements_and_fields():
    child, fields, tagged = _Child(), _Fields(torch.ones(1)), _TaggedList([torch.ones(2)])
    child.tensor, child.other = torch.ones(3), torch.ones(4)
    fields.extra = torch.ones(5)
    tagged.extra = torch.ones(6)
    assert sorted(len(tensor) for tensor in tensors_in([child, fields, tagged])) == [1, 2, 3, 4, 5, 6]


def test_a_long_chain_of_objects_is_walked_without_recursion():
    chain = {"tensor": torch.ones(1)}
    for _ in range(5000):
        chain = {"next": chain}
    assert len(list(tensors_in(chain))) == 1
