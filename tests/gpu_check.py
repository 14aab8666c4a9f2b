"""Prove the communication stream where a GPU is, in under five minutes; on CPU the same checks try the thread stream.

    python tests/gpu_check.py                 # prints a line a check, writes gpu_check.json, exits 1 if one failed
    python tests/gpu_check.py --device cpu    # what the test suite runs

It starts two ranks of its own. On one GPU they share it through NCCL, which takes them for two hosts by NCCL_HOSTID.
Checks: tasks run after what their caller computed, and the caller after the task; the host does not wait for the
device; the three modes train like one process on both ranks' batches; the stream shows in a profiler trace.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ddpx import DDPX
from ddpx.stream import open_stream

WORLD_SIZE = 2
LIMIT_S = 240.0
MODES = ("naive", "bucketed", "overlapped")


def dawdle(device: torch.device) -> None:
    """Keep the current stream busy for some milliseconds, so that whoever does not wait for it comes too early."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)  # clock cycles
    else:
        time.sleep(0.005)


def check_stream_order(device: torch.device) -> str:
    """A task sees its caller's earlier writes, and the caller sees the task's, many times over.

    The control is what the caller sees without waiting: the result of the turn before.
    """
    stream = open_stream(device)
    size = 1 << 20
    value, result = torch.zeros(size, device=device), torch.zeros(size, device=device)
    early, seen_too_early = torch.zeros(size, device=device), 0

    def task() -> None:
        dawdle(device)
        result.copy_(value)
        result.mul_(2.0)

    for turn in range(30):
        before = float(result[0])
        dawdle(device)
        value.add_(1.0)
        pending = stream.submit(task)
        early.copy_(result)
        pending.wait(lambda: None, 60)
        result.add_(1.0)
        want = 2.0 * (turn + 1) + 1.0
        assert bool((result == want).all()), f"turn {turn}: {result[0].item()} instead of {want}"
        seen_too_early += bool((early == before).all())
    stream.close()
    assert seen_too_early > 15, f"without waiting, the caller saw an old result in {seen_too_early} of 30 turns only"
    return f"30 turns in order; without waiting, {seen_too_early} would not have been"


def check_host_does_not_wait(device: torch.device) -> str:
    """Submitting and waiting return while the device still works. On CPU: submitting does."""
    stream = open_stream(device)
    if device.type == "cpu":
        began_s = time.perf_counter()
        pending = stream.submit(lambda: time.sleep(0.3))
        submitted_s = time.perf_counter() - began_s
        pending.wait(lambda: None, 60)
        waited_s = time.perf_counter() - began_s
    else:
        big = torch.randn(8192, 8192, device=device)
        (big @ big).sum().item()  # warm
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(40):
            big = torch.tanh(big @ big)
        pending = stream.submit(lambda: None)
        pending.wait(lambda: None, 60)
        submitted_s = time.perf_counter() - began_s
        torch.cuda.synchronize(device)
        waited_s = time.perf_counter() - began_s
    stream.close()
    assert submitted_s < 0.5 * waited_s, f"the host was held for {submitted_s:.3f} of {waited_s:.3f} s"
    assert pending.started_s is not None and pending.ended_s is not None
    return f"host free after {submitted_s * 1e3:.1f} of {waited_s * 1e3:.1f} ms"


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 8)).to(device)


def batch(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 256, generator=generator), torch.randn(16, 8, generator=generator)
    return x.to(device), y.to(device)


def train(model: nn.Module, batches: Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]], steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        parts = batches(step)
        for x, y in parts:
            ((model(x) - y).pow(2).mean() / len(parts)).backward()
        optimizer.step()


def check_modes(rank: int, device: torch.device) -> str:
    """Five steps of each mode equal one process on both ranks' batches, and each other to the last bit."""
    alone = make_model(device)
    train(alone, lambda step: [batch(r, step, device) for r in range(WORLD_SIZE)], 5)
    weights = []
    for mode in MODES:
        model = DDPX(make_model(device), mode=mode, bucket_cap_mb=0.1)
        train(model, lambda step: [batch(rank, step, device)], 5)
        weights.append([param.detach().clone() for param in model.parameters()])
        for mine, single in zip(weights[-1], alone.parameters(), strict=True):
            torch.testing.assert_close(mine, single.detach(), rtol=1e-4, atol=1e-5)
        assert len(model.reducer.buckets) > 2, "too few buckets to say anything about order"
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True)), "modes differ in bits"
    mine = torch.cat([param.flatten() for param in weights[0]])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs), "ranks differ in bits"
    return f"{', '.join(MODES)} equal one process and each other over {WORLD_SIZE} ranks"


def check_trace(rank: int, device: torch.device, folder: Path) -> str:
    """The sums of the buckets are in the trace, on a stream of their own beside the model's and NCCL's."""
    model = DDPX(make_model(device), bucket_cap_mb=0.1)
    train(model, lambda step: [batch(rank, step, device)], 2)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=activities, experimental_config=everything) as recorded:
        train(model, lambda step: [batch(rank, step, device)], 2)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path = folder / f"rank{rank}.json"
    recorded.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    if device.type == "cuda":
        kernels = [event for event in events if event.get("cat") == "kernel"]
        streams: dict[Any, list[str]] = {}
        for event in kernels:
            streams.setdefault(event["args"].get("stream"), []).append(event["name"])
        matrix = [s for s, names in streams.items() if any("gemm" in n or "cutlass" in n for n in names)]
        nccl = [s for s, names in streams.items() if any("nccl" in n for n in names)]
        ours = [s for s, names in streams.items() if s not in matrix and any("elementwise" in n for n in names)]
        assert ours, f"no stream beside the model's adds anything: { ({s: set(n) for s, n in streams.items()}) }"
        return f"{len(kernels)} kernels: the model's on streams {matrix}, NCCL's on {nccl}, our sums on {ours}"
    stats = model.stats()
    assert stats is not None and stats.communication_s > 0
    threads = {event["tid"] for event in events if event.get("cat") == "cpu_op"}
    return f"{len(events)} events on {len(threads)} thread(s); communication took {stats.communication_s * 1e3:.2f} ms"


def on_rank(rank: int, kind: str, folder: str) -> None:
    if kind == "cuda":
        os.environ.update(
            NCCL_HOSTID=f"gpu_check{rank}",  # different, so that NCCL does not refuse two ranks on one GPU
            NCCL_SOCKET_IFNAME="lo",
            NCCL_IB_DISABLE="1",
            NCCL_NET="Socket",
            NCCL_MNNVL_ENABLE="0",
            NCCL_NVLS_ENABLE="0",
            NCCL_MAX_CTAS="1",
            NCCL_ALGO="Ring",
            NCCL_PROTO="Simple",
        )
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        device_id=device if kind == "cuda" else None,
    )
    checks: dict[str, Callable[[], str]] = {
        "stream order": lambda: check_stream_order(device),
        "host free": lambda: check_host_does_not_wait(device),
        "three modes": lambda: check_modes(rank, device),
        "trace": lambda: check_trace(rank, device, Path(folder)),
    }
    results: dict[str, Any] = {}
    for name, check in checks.items():
        began_s = time.perf_counter()
        try:
            results[name] = {"ok": True, "says": check()}
        except Exception as error:
            results[name] = {"ok": False, "says": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.perf_counter() - began_s, 2)
    Path(folder, f"result{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where the results go")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu checks the thread stream")
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(on_rank, (arguments.device, folder), nprocs=WORLD_SIZE, join=False)
        until = time.monotonic() + LIMIT_S
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > until:
                    print(f"gpu_check: not done after {LIMIT_S:.0f} s", file=sys.stderr)
                    return 1
        finally:
            for process in ranks.processes:
                process.kill()
        results = [json.loads(Path(folder, f"result{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "cpu"
    report = {"device": arguments.device, "name": where, "torch": torch.__version__, "ranks": results}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for rank, checks in enumerate(results):
        for name, result in checks.items():
            print(f"{'ok    ' if result['ok'] else 'FAILED'} rank {rank}  {name}: {result['says']}")
    return 0 if all(result["ok"] for checks in results for result in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
