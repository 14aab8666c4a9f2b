"""Inside join(): what a step may consist of, and what the others hear when a rank leaves by an exception."""

import pytest
import torch
from test_failures import TRANSPORTS, assert_right, batch_of, boom, wrapped
from torch import nn

import ddpx
from ddpx import DDPX


def loss_of(model: DDPX, step: int, rank: int) -> torch.Tensor:
    return model(batch_of(step, rank)).square().sum()


def free_steps(rank: int, world_size: int, transport: str, kind: str) -> None:
    """Rank r has 1 + 2r steps that are more than a forward and a backward; gradients are those of one process."""
    model = wrapped(rank, transport, timeout_s=10)
    twin = wrapped(rank, transport, timeout_s=10).module
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(twin.parameters(), lr=0.01)
    batches = [1 + 2 * peer for peer in range(world_size)]
    repeats = 2 if kind == "accumulates" else 1
    with model.join():
        for step in range(batches[rank]):
            optimizer.zero_grad()
            if kind == "drops a forward":
                loss_of(model, step, rank)
            elif kind == "evaluates":
                model.eval()
                loss_of(model, step, rank)
                model.train()
            elif kind == "accumulates":
                with model.no_sync():
                    loss_of(model, step, rank).backward()
            loss_of(model, step, rank).backward()
            optimizer.step()
    for step in range(max(batches)):
        other.zero_grad()
        for peer in range(world_size):
            if step < batches[peer]:
                (twin(batch_of(step, peer)).square().sum() * repeats / world_size).backward()
        other.step()
    for ours, wanted in zip(model.module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["drops a forward", "evaluates", "accumulates"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_inside_join_may_be_more_than_a_forward_and_a_backward(ranks, transport: str, kind: str) -> None:
    ranks(2).run(free_steps, transport, kind, timeout_s=30)


PLACES = ("before the forward", "after the forward", "in the backward")


def leaving(rank: int, world_size: int, transport: str, place: str) -> tuple[str, str]:
    """Rank 0 has run out of inputs when rank 1 raises; rank 2 is at work. The step after it is right again."""
    model = wrapped(rank, transport, timeout_s=20)
    said = "nothing", ""
    try:
        with model.join():
            for step in range(1 if rank == 0 else 5):
                model.zero_grad()
                failing = rank == 1 and step == 3
                if failing and place == "before the forward":
                    boom()
                output = model(batch_of(step, rank), boom if failing else None)
                if failing and place == "after the forward":
                    boom()
                output.square().sum().backward()
    except (ddpx.Error, KeyError) as error:
        said = type(error).__name__, str(error)
    model.zero_grad()
    loss_of(model, 7, rank).backward()
    assert_right(model, world_size, 7)
    return said


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_inside_join_is_told_on_all_ranks(ranks, transport: str, place: str) -> None:
    found = ranks(3).run(leaving, transport, place, timeout_s=15)  # sooner than any deadline
    assert [kind for kind, _ in found] == ["PeerFailed", "KeyError", "PeerFailed"], found
    for rank in (0, 2):
        assert "rank 1 failed in its backward" in found[rank][1] or "rank 1 left join()" in found[rank][1], found


def out_of_order(rank: int, world_size: int) -> str:
    """Rank 1 runs a training forward more than rank 0; in a model with buffers each is a collective."""
    module = nn.Linear(3, 2)
    module.register_buffer("seen", torch.zeros(1))
    model = DDPX(module, timeout_s=20)
    with pytest.raises(ddpx.Error) as raised, model.join():
        for _ in range(3):
            if rank == 1:
                model(torch.ones(1, 3))
            model(torch.ones(1, 3)).sum().backward()
    return str(raised.value)


def test_ranks_that_differ_inside_join_are_told_both_sides(ranks) -> None:
    for words in ranks(2).run(out_of_order, timeout_s=15):
        assert "rank 0: a backward, rank 1: a training forward" in words, words
