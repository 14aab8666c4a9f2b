"""The helper that runs functions on n ranks reports every rank, and outlives a killed one."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from processes import Ranks, RanksFailed, attempt, run

pytestmark = pytest.mark.processes


def sum_of_ranks(rank: int, world_size: int, factor: int) -> torch.Tensor:
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value)
    return value


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on_all(rank: int, world_size: int) -> None:
    raise ValueError(f"this is rank {rank}")


def killed_on_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep(rank: int, world_size: int, seconds: float) -> None:
    time.sleep(seconds)


def test_results_come_in_rank_order(ranks) -> None:
    assert [value.item() for value in ranks(3).run(sum_of_ranks, 10)] == [30.0] * 3


def test_processes_are_shared_between_calls(ranks) -> None:
    assert ranks(3).run(process_id) == ranks(3).run(process_id)


def test_run_starts_processes_of_its_own(ranks) -> None:
    assert not set(run(process_id, 2)) & set(ranks(2).run(process_id))


def test_failures_of_all_ranks_are_reported(ranks) -> None:
    with pytest.raises(RanksFailed, match="failed on 2 of 2 ranks") as failed:
        ranks(2).run(fail_on_all)
    assert "ValueError: this is rank 0" in str(failed.value)
    assert "ValueError: this is rank 1" in str(failed.value)


def test_a_pool_starts_anew_after_a_kill() -> None:
    pool = Ranks(2)
    before = pool.run(process_id)
    outcomes = pool.attempt(killed_on_rank_one)
    assert [outcome.exitcode for outcome in outcomes] == [None, -signal.SIGKILL]
    assert outcomes[0].value == "alive" and "SIGKILL" in outcomes[1].error
    assert not set(pool.run(process_id)) & set(before)
    pool.close()


def test_a_rank_that_does_not_end_is_killed_at_the_deadline() -> None:
    start = time.monotonic()
    outcomes = attempt(sleep, 2, 60.0, timeout_s=2)
    assert time.monotonic() - start < 15
    assert all("had not ended after 2 s" in outcome.error for outcome in outcomes)
