"""Real traces of two ranks over gloo: torch's DDP and FSDP, and ddpx's own modes."""

import time
from pathlib import Path

import pytest

from ddpx.trace.analyse import analyse_run

STEPS = 4


def trained(rank, world_size, kind, folder, stall_rank=None):
    """Train a small model for some steps under torch.profiler and write this rank's trace."""
    import os

    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    os.environ["KINETO_LOG_LEVEL"] = "99"
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)], nn.Linear(256, 10))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    data = torch.utils.data.TensorDataset(torch.randn(16 * STEPS + 16, 256))
    batches = iter(torch.utils.data.DataLoader(data, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        record_shapes=True,
    ) as profiler:
        for _ in range(STEPS + 1):
            loss = model(next(batches)[0]).square().mean()
            if rank == stall_rank:
                with record_function("stall"):
                    time.sleep(0.2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(Path(folder, f"host_{rank}.pt.trace.json")))


def assert_sums(run):
    for rank in run.ranks:
        assert len(rank.steps) == STEPS
        for step in rank.steps:
            assert step.split.duration == step.end - step.start == step.host
            assert sum(step.idle.values()) == step.split.exposed + step.split.gap
            assert min(step.split.compute_only, step.split.exposed + step.split.overlapped, step.split.gap) > 0


def test_torchs_ddp_over_gloo(ranks, tmp_path):
    ranks(2).run(trained, "ddp", str(tmp_path))
    run = analyse_run("ddp", sorted(tmp_path.glob("*.json")))
    assert run.problems == []
    assert_sums(run)
    parameters = 4 * (256 * 256 + 256) + 256 * 10 + 10
    rows = [row for row in run.rows if row.kind == "all_reduce" and row.dtype == "float"]
    assert sum(row.size * row.per_step for row in rows) == 4 * parameters
    assert {row.group_size for row in rows} == {2}
    assert all(row.busbw > 0 and row.transfer_ms <= row.duration_ms for row in rows)
    assert run.mean("idle_data_loading_ms") > 0


def test_fsdp_over_gloo(ranks, tmp_path):
    ranks(2).run(trained, "fsdp", str(tmp_path))
    run = analyse_run("fsdp", sorted(tmp_path.glob("*.json")))
    assert run.problems == []
    assert_sums(run)
    gathers = [row for row in run.rows if row.kind == "all_gather"]
    # Each layer is gathered for the forward and again for the backward; the root's own parameters are none.
    assert sum(row.size * row.per_step for row in gathers) >= 4 * 4 * (256 * 256 + 256)
    assert run.ratio("overlap") is not None


def test_a_200_ms_stall_in_one_rank_is_named(ranks, tmp_path):
    ranks(2).run(trained, "ddp", str(tmp_path), 1)
    run = analyse_run("stalled", sorted(tmp_path.glob("*.json")))
    assert run.straggler is not None and run.straggler.startswith("rank 1 arrives last")
    assert "in host code between operators" in run.straggler
    worst = next(arrival for arrival in run.arrivals if arrival.rank == 1)
    assert worst.cost_ms == pytest.approx(200, rel=0.25)
    assert run.ranks[1].holes[0].within == "stall"
    assert run.ranks[0].holes[0].cause == "peer"


def own(rank, world_size, mode, folder):
    """The same with ddpx and its own recorder."""
    import os

    import torch
    from torch import nn

    from ddpx import DDPX, profile

    os.environ["KINETO_LOG_LEVEL"] = "99"
    torch.manual_seed(0)
    model = DDPX(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), mode=mode, bucket_cap_mb=0.25)

    def step():
        model(torch.randn(16, 256)).square().mean().backward()
        model.zero_grad()

    step()
    with profile.record(Path(folder), rank, model) as end_of_step:
        for _ in range(profile.STEPS):
            step()
            end_of_step()


@pytest.mark.parametrize("mode", ["naive", "bucketed", "overlapped"])
def test_ddpxs_own_traces_tell_buckets_apart_and_serial_modes_hide_nothing(ranks, tmp_path, mode):
    pytest.importorskip("ddpx.profile")
    ranks(2).run(own, mode, str(tmp_path))
    run = analyse_run(mode, sorted(tmp_path.glob("*.json.gz")))
    assert run.problems == []
    for rank in run.ranks:
        for step in rank.steps:
            assert step.split.duration == step.end - step.start
            assert mode == "overlapped" or step.split.overlapped == 0
    labels = [row.label for row in run.rows]
    assert len(set(labels)) == len(labels) > 1 and set(labels) == {f"bucket {i}" for i in range(len(labels))}
    assert sum(row.size for row in run.rows) == 4 * 4 * (256 * 256 + 256)
