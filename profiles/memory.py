"""Peak resident memory of a training rank: ddpx beside torch's DistributedDataParallel and no communication at all.

    python profiles/memory.py --out profiles/DATE_2core-cpu_memory                # GPT small and medium, three minutes
    python profiles/memory.py --out DIR --models gpt:nano,mlp:small --steps 4

Each contender trains in two processes of its own, in turns (A B C A B C), since a peak is a process's for good. Models
add to what the folder has. Pages of shared memory count in full in every process that has touched them (RSS), or by
halves where two have (PSS):

    peak RSS   VmHWM of the kernel, exact
    peak PSS   the largest of samples, one every 20 ms; the sum over ranks is what the job really holds
    shared     RssShmem at the end: of ddpx, the buckets of all ranks

What a process holds before its model (torch itself) is told apart. BOUND: ddpx's peak PSS at most 5 % above torch's.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import ddpx
import models
from ddpx.gate import Promise

BOUND = 1.05
MODES = ("local", "torch", "ddpx")
SAMPLE_S = 0.02
MIB = 2**20
Found = dict[str, dict[str, list[list[dict[str, Any]]]]]  # by model, by mode: each turn's ranks


def status(*names: str) -> list[int]:
    """Bytes that the kernel's /proc/self/status tells under these names."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    return [found[name] for name in names]


def pss() -> int:
    """Bytes that this process holds, pages shared with others by their share."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Sampler:
    """A thread that keeps the largest PSS, and the second of the run it was seen at."""

    def __init__(self) -> None:
        self.peak, self.at_s = 0, 0.0
        self._stop = threading.Event()
        self._began_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            now = pss()
            if now > self.peak:
                self.peak, self.at_s = now, time.perf_counter() - self._began_s

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def train(mode: str, name: str, size: str, steps: int, sequence: int, bucket_mib: float) -> dict[str, Any]:
    """Train for some steps on this rank and tell what it took; bytes."""
    before = pss()
    sampler = Sampler()
    torch.manual_seed(0)
    model: nn.Module = models.build(name, size, 256, sequence)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    if mode == "torch":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    elif mode == "ddpx":
        model = ddpx.DDPX(model, bucket_cap_mb=bucket_mib)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (1, sequence))
    after_step = []
    for _ in range(steps):
        model(tokens, tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step.append(status("VmHWM")[0])
        dist.barrier()
    sampler.close()
    peak, shared, anonymous = status("VmHWM", "RssShmem", "RssAnon")
    return {
        "parameters": parameters,
        "before": before,
        "rss": peak,
        "pss": sampler.peak,
        "pss_at_s": sampler.at_s,
        "shared": shared,
        "anonymous": anonymous,
        "rss_after_step": after_step,
    }


def on_rank(args: argparse.Namespace) -> None:
    """What torchrun starts: one contender; rank 0 prints all ranks' numbers as a line of JSON."""
    rank, n = turns.join_ranks()
    name, size = args.models.split(":")
    mine = train(args.worker, name, size, args.steps, args.sequence, args.bucket_mib)
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, mine)
    if rank == 0:
        print(json.dumps(everybody), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(mode: str, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One contender in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    command += ["--worker", mode, "--models", model, "--steps", str(args.steps), "--sequence", str(args.sequence)]
    command += ["--bucket-mib", str(args.bucket_mib)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    ranks: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return ranks


def text_of(found: Found) -> str:
    """A table a model: the greatest of turns and ranks, in MiB."""
    parts = []
    for model, by_mode in found.items():
        rows = [["", "peak RSS", "peak PSS", "of both ranks", "shared", "anonymous", "PSS of torch's"]]
        most = {
            mode: {
                what: max(rank[what] for ranks in by_mode[mode] for rank in ranks)
                for what in ("before", "parameters", "rss", "pss", "shared", "anonymous")
            }
            for mode in by_mode
        }
        for mode, peak in most.items():
            both = max(sum(rank["pss"] for rank in ranks) for ranks in by_mode[mode])
            figures = [peak["rss"], peak["pss"], both, peak["shared"], peak["anonymous"]]
            rows.append(
                [mode, *(f"{value / MIB:.0f}" for value in figures), f"{peak['pss'] / most['torch']['pss']:.3f}"]
            )
        verdict = "holds" if most["ddpx"]["pss"] <= BOUND * most["torch"]["pss"] else "MISSED"
        least = most["local"]
        parts.append(
            f"{model}: {least['parameters'] / MIB:.0f} MiB of parameters; "
            f"torch itself {least['before'] / MIB:.0f} MiB\n\n"
            f"{turns.markdown(rows)}\n\nddpx at most {BOUND:g} times torch's peak PSS: {verdict}."
        )
    return "\n\n".join([*parts, "MiB, the greatest of all ranks and turns."])


def promises_of(found: Found) -> list[Promise]:
    """Hardly more than torch's."""
    promises = []
    for model, by_mode in found.items():
        ours, theirs = (max(rank["pss"] for ranks in by_mode[mode] for rank in ranks) for mode in ("ddpx", "torch"))
        promises.append(Promise(f"peak PSS of {model}, over torch's", ours / theirs, BOUND, at_least=False))
    return promises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--models", default="gpt:small,gpt:medium", help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of each turn (%(default)s)")
    parser.add_argument("--sequence", type=int, default=16, help="tokens, one sequence (%(default)s)")
    parser.add_argument("--bucket-mib", type=float, default=25.0, help="(%(default)s)")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        on_rank(args)
        return
    if args.out is None:
        parser.error("--out says where to write")
    path = args.out / "memory.json"
    found: Found = json.loads(path.read_text())["models"] if path.exists() else {}
    for model in args.models.split(","):
        found[model] = {mode: [] for mode in MODES}
    todo = [(model, mode) for model in args.models.split(",") for _ in range(args.turns) for mode in MODES]
    for model, mode in tqdm(todo, disable=None, leave=False):
        found[model][mode].append(run(mode, model, args))
    document = {**turns.where(ranks=2), "bound": BOUND, "models": found}
    turns.write(args.out, "memory", document, text_of(found), promises_of(found))


if __name__ == "__main__":
    main()
