"""A training step over ten configurations: local, torch's DistributedDataParallel and ddpx in turns. Four minutes.

    torchrun --nproc-per-node 2 profiles/configurations.py --out profiles/DATE_2core-cpu_configurations
    torchrun --nproc-per-node 2 profiles/configurations.py --out DIR --only "gpt nano fp32 4 MiB x1" --again

A step is forward, backward of all micro-batches and the optimizer (SGD), from a barrier on, on the slowest rank. What
communication adds is a contender's median minus local's. Local allocates its gradients anew in every step, as a plain
loop does, which costs more than communication where models are large; with --keep-gradients they are zeroed in place,
in all three ways. Configurations that the folder has already are not measured again, unless --again says so, so that a
run may be cut in pieces.
"""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from turns import Times

import ddpx
import models
from ddpx import bench
from ddpx.gate import Promise
from ddpx.units import seconds_text
from models.data import Corpus, synthetic_images

HALF = 0.5  # of what torch's communication adds, ours may add


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is trained, and how. `dtype` bf16 has weights and gradients in bf16, autocast only what it computes with."""

    model: str
    size: str
    dtype: str
    bucket_mib: int
    accumulate: int
    batch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.model} {self.size} {self.dtype} {self.bucket_mib} MiB x{self.accumulate}"


CONFIGURATIONS = (
    Configuration("gpt", "nano", "fp32", 1, 1, 2, 64),
    Configuration("gpt", "nano", "fp32", 4, 1, 2, 64),
    Configuration("gpt", "nano", "fp32", 25, 4, 2, 64),
    Configuration("gpt", "nano", "autocast", 4, 1, 1, 8),
    Configuration("gpt", "nano", "bf16", 1, 1, 1, 8),
    Configuration("gpt", "small", "fp32", 25, 1, 1, 8),
    Configuration("gpt", "small", "fp32", 4, 1, 1, 8),
    Configuration("mlp", "nano", "fp32", 1, 1, 2, 64),
    Configuration("mlp", "small", "fp32", 25, 4, 1, 16),
    Configuration("resnet", "nano", "fp32", 4, 1, 4, 0),
)


def stepper(configuration: Configuration, mode: str, batches: list[Any], keep: bool) -> Callable[[], float]:
    """A replica of its own for `mode`; what is returned makes a step and tells its seconds."""
    torch.manual_seed(0)
    model: nn.Module = models.build(configuration.model, configuration.size, 256, max(1, configuration.sequence))
    if configuration.dtype == "bf16":
        model = model.bfloat16()
    if mode == "torch":
        cap = configuration.bucket_mib
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    elif mode == "ddpx":
        model = ddpx.DDPX(model, bucket_cap_mb=configuration.bucket_mib, transport="shared_memory")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    no_sync: Callable[[], Any] = getattr(model, "no_sync", contextlib.nullcontext)

    def step() -> float:
        began_s = time.perf_counter()
        for inputs, targets in batches[:-1]:
            with no_sync():
                backward(inputs, targets)
        backward(*batches[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)
        return time.perf_counter() - began_s

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=configuration.dtype == "autocast"):
            loss = model(inputs, targets)[1]
        (loss / len(batches)).backward()

    return step


def measure(configuration: Configuration, corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """One configuration in three ways. A collective."""
    source = synthetic_images if configuration.model == "resnet" else corpus.batch
    shape = (configuration.batch, max(1, configuration.sequence), 0)
    batches = [source("train", *shape, 0, dist.get_rank(), "cpu", micro) for micro in range(configuration.accumulate)]
    before = bench._processor_s()
    contenders = {
        mode: stepper(configuration, mode, batches, args.keep_gradients) for mode in ("local", "torch", "ddpx")
    }
    times = turns.in_turns(contenders, rounds=args.rounds, seconds=args.seconds)
    others = bench._others(before)
    del contenders
    gc.collect()
    local, theirs, ours = (times[mode] for mode in ("local", "torch", "ddpx"))
    return {
        "configuration": asdict(configuration),
        "times": {mode: found.as_dict() for mode, found in times.items()},
        "ratio": turns.ratio(ours, theirs),
        "torch_adds_s": theirs.median_s - local.median_s,
        "ddpx_adds_s": ours.median_s - local.median_s,
        "others": others,
    }


def text_of(found: dict[str, dict[str, Any]]) -> str:
    """The table, and which configurations miss what is wanted."""
    head = [
        "configuration",
        "local",
        "torch DDP",
        "ddpx",
        "torch adds",
        "ddpx adds",
        "ddpx / torch",
        "rounds",
        "others",
    ]
    lines, slower, above = [head], [], []
    for name, entry in found.items():
        local, theirs, ours = (Times(tuple(entry["times"][mode]["rounds_s"])) for mode in ("local", "torch", "ddpx"))
        torch_adds, ddpx_adds = entry["torch_adds_s"], entry["ddpx_adds_s"]
        times = [seconds_text(times.median_s) for times in (local, theirs, ours)]
        adds = [f"{1e3 * seconds:.1f} ms" for seconds in (torch_adds, ddpx_adds)]
        of_torch = turns.ratio_text(entry["ratio"])
        lines.append([name, *times, *adds, of_torch, str(len(ours.seconds)), f"{entry['others']:.0%}"])
        if entry["ratio"]["of_medians"] > 1:
            slower.append(name)
        if ddpx_adds > HALF * torch_adds:
            above.append(name)
    return "\n".join(
        [
            turns.markdown(lines),
            "",
            "Medians. ddpx / torch: ratio of medians (first to last decile of the ratios within a round). Others: the",
            "share of the processors that other processes took meanwhile. Adds: median minus local's.",
            "",
            f"Slower than torch: {', '.join(slower) or 'none'}.",
            f"Adds more than {HALF:.0%} of what torch's adds: {', '.join(above) or 'none'}.",
        ]
    )


def promises_of(found: dict[str, dict[str, Any]]) -> list[Promise]:
    """Never slower than torch's, and at most half of what it adds."""
    promises = []
    for name, entry in found.items():
        promises.append(Promise(f"a step of {name}, over torch's", entry["ratio"]["of_medians"], 1.0, at_least=False))
        if entry["torch_adds_s"] > 0:
            share = entry["ddpx_adds_s"] / entry["torch_adds_s"]
            promises.append(Promise(f"what is added to {name}, over what torch's adds", share, HALF, at_least=False))
    return promises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this configuration; may be given several times"
    )
    parser.add_argument("--again", action="store_true", help="measure also what the folder has already")
    parser.add_argument("--keep-gradients", action="store_true", help="zero them in place rather than drop them")
    parser.add_argument("--rounds", type=int, default=60, help="at most (%(default)s)")
    parser.add_argument("--seconds", type=float, default=14.0, help="about, for each (%(default)s)")
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no further one after this (%(default)s)")
    args = parser.parse_args()
    names = {str(configuration): configuration for configuration in CONFIGURATIONS}
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        parser.error(f"no configuration is called {unknown[0]!r}; there are: {'; '.join(names)}")
    rank, _ = turns.join_ranks()
    path = args.out / "configurations.json"
    have: dict[str, Any] = json.loads(path.read_text())["configurations"] if path.exists() else {}
    wanted = [name for name in args.only or names if args.again or name not in have]
    corpus = Corpus.load()
    began_s = time.perf_counter()
    for name in tqdm(wanted, disable=None if rank == 0 else True, leave=False):
        ended = torch.tensor([time.perf_counter() - began_s > 60 * args.minutes])
        dist.broadcast(ended, 0)
        if ended.item():
            break
        have[name] = measure(names[name], corpus, args)
    if rank == 0:
        have = {name: have[name] for name in names if name in have}
        document = {**turns.where(ranks=2), "configurations": have}
        turns.write(args.out, "configurations", document, text_of(have), promises_of(have))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
