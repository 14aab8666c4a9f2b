"""What the wrapper itself costs, beside torch's: backward through 2,000 small parameters. One minute, two CPU ranks.

    torchrun --nproc-per-node 2 profiles/wrapper_cost.py --out profiles/DATE_2core-cpu_wrapper_cost

First alone, in a group of one rank: backward bare, in torch's DistributedDataParallel and in ddpx, in turns; there is
nothing to communicate, so what is more than bare is the wrapper's own. Then a step of GPT small, bare and in ddpx. Then
with two ranks: the time from one hook's return to the next one's, which is one small gradient's computation, the wait
for the interpreter's lock and the hook; for gradients that come while an all-reduce of a large one runs, and for the
same ones where none runs (mode bucketed).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpx
from ddpx.gate import Promise
from ddpx.reducer import Reducer
from ddpx.units import seconds_text
from models.gpt import GPT


class Chain(nn.Module):
    """x times each of `count` small parameters in turn, behind them a large one, whose gradient comes first."""

    def __init__(self, count: int, width: int, large: int = 0) -> None:
        super().__init__()
        self.small = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(count))
        self.large = nn.Parameter(torch.ones(large)) if large else None

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.small:
            x = x * factor
        loss = x.sum()
        return loss if self.large is None else loss * self.large.sum()


def backward_s(model: nn.Module, x: Tensor) -> Callable[[], float]:
    """What makes a forward, and tells the seconds of its backward."""

    def run() -> float:
        loss = model(x)
        began_s = time.perf_counter()
        loss.backward()
        took_s = time.perf_counter() - began_s
        model.zero_grad()
        return took_s

    return run


def small_step(model: nn.Module) -> Callable[[], float]:
    """What makes a step of a GPT on one sequence, and tells its seconds."""
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> float:
        began_s = time.perf_counter()
        model(tokens, tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began_s

    return run


def alone(count: int, width: int, rounds: int, seconds: float) -> tuple[dict[str, turns.Times], dict[str, turns.Times]]:
    """Backward in three ways, then a step of GPT small in two; each rank in a group of its own. Rank 0's times.

    The other ranks sleep meanwhile.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if dist.get_rank():
        dist.barrier()
        return {}, {}
    x = torch.ones(width)
    mine = groups[0]
    contenders = {
        "bare": backward_s(Chain(count, width), x),
        "torch": backward_s(
            DistributedDataParallel(Chain(count, width), process_group=mine, gradient_as_bucket_view=True), x
        ),
        "ddpx": backward_s(ddpx.DDPX(Chain(count, width), process_group=mine), x),
    }
    times = turns.in_turns(contenders, rounds=rounds, seconds=seconds, group=mine)
    small = {
        "bare": small_step(GPT.from_size("small", 256, 128)),
        "ddpx": small_step(ddpx.DDPX(GPT.from_size("small", 256, 128), process_group=mine)),
    }
    steps = turns.in_turns(small, rounds=rounds, seconds=seconds, group=mine)
    dist.barrier()
    return times, steps


class Watch:
    """Notes when each call of the reducer's hook begins and ends."""

    def __init__(self, reducer: Reducer) -> None:
        self.calls: list[tuple[float, float]] = []
        inner = reducer.on_gradient

        def timed(*arguments: Any) -> None:
            began_s = time.perf_counter()
            inner(*arguments)
            self.calls.append((began_s, time.perf_counter()))

        reducer.on_gradient = timed  # type: ignore[method-assign, assignment]


def hooks(count: int, width: int, large: int, steps: int, transport: str) -> dict[str, dict[str, list[float]]]:
    """By mode: `gap` from a hook's return to the next one's, `hook` from its call to its return. A collective.

    Of overlapped, those that lie within a bucket's communication; of bucketed, all.
    """
    x = torch.ones(width)
    models, watches = {}, {}
    for mode in ("overlapped", "bucketed"):
        models[mode] = ddpx.DDPX(
            Chain(count, width, large),
            mode=mode,
            transport=transport,
            bucket_cap_mb=large * 4 / 2**20,
        )
        watches[mode] = Watch(models[mode].reducer)
    found: dict[str, dict[str, list[float]]] = {mode: {"gap": [], "hook": []} for mode in models}
    for step in range(steps + 2):
        for mode, model in models.items():
            calls = watches[mode].calls
            calls.clear()
            dist.barrier()
            backward_s(model, x)()
            stats = model.stats()
            assert stats is not None
            busy = [
                (b.started_s, b.ended_s) for b in stats.buckets if b.started_s is not None and b.ended_s is not None
            ]
            if step < 2:
                continue
            # The large gradient's own hook, which writes it, is the first one.
            for (_, before_s), (began_s, ended_s) in zip(calls[1:], calls[2:]):
                if mode == "bucketed" or any(start_s <= before_s and ended_s <= end_s for start_s, end_s in busy):
                    found[mode]["gap"].append(ended_s - before_s)
                    found[mode]["hook"].append(ended_s - began_s)
    for model in models.values():
        model.reducer.close()
    return found


def text_of(document: dict[str, Any]) -> str:
    """Two tables."""
    count = document["parameters"]
    times = {name: turns.Times(tuple(entry["rounds_s"])) for name, entry in document["alone"].items()}
    bare_s = times["bare"].median_s
    lines = [["backward, one rank", "median (deciles)", "of bare", "more than bare, a parameter"]]
    for name, entry in times.items():
        more = f"{1e6 * (entry.median_s - bare_s) / count:.2f} us"
        lines.append([name, str(entry), f"{entry.median_s / bare_s:.2f}×", more])
    parts = [turns.markdown(lines)]
    lines = [["a step of GPT small, one rank", "median (deciles)"]]
    steps = {name: turns.Times(tuple(entry["rounds_s"])) for name, entry in document["small_step"].items()}
    parts.append(turns.markdown([*lines, *([name, str(entry)] for name, entry in steps.items())]))
    lines = [["rank 0, over", "all-reduce", "gradients", "gap median", "gap p99", "hook median", "hook p99"]]
    for transport, modes in document["hooks"].items():
        for mode, entry in modes.items():
            running = "runs" if mode == "overlapped" else "does not run"
            figures = [
                seconds_text(entry[what][figure]) for what in ("gap", "hook") for figure in ("median_s", "p99_s")
            ]
            lines.append([transport, running, str(entry["gradients"]), *figures])
    parts.append(turns.markdown(lines))
    return "\n\n".join(parts)


def promises_of(document: dict[str, Any]) -> list[Promise]:
    """No more than torch's, and a running all-reduce slows gradients less than another thread's Python would."""
    medians = {name: entry["median_s"] for name, entry in document["alone"].items()}
    of_torch = (medians["ddpx"] - medians["bare"]) / (medians["torch"] - medians["bare"])
    promises = [Promise("what the wrapper adds to a backward, over what torch's adds", of_torch, 1.0, at_least=False)]
    for transport, modes in document["hooks"].items():
        for figure, name, bound in (("median_s", "median", 29 / 21), ("p99_s", "99th percentile", 119 / 47)):
            slowed = modes["overlapped"]["gap"][figure] / modes["bucketed"]["gap"][figure]
            what = f"gradient to hook's return, {name}, while an all-reduce runs over {transport}, over without"
            promises.append(Promise(what, slowed, round(bound, 2), at_least=False))
    step = document["small_step"]
    share = step["ddpx"]["median_s"] / step["bare"]["median_s"]
    promises.append(Promise("a step of GPT small in a group of one, over bare", share, 1.01, at_least=False))
    return promises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64, help="elements of each (%(default)s)")
    parser.add_argument("--large-mib", type=int, default=64, help="the gradient whose all-reduce runs (%(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="at most (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part, about (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each mode in the second part (%(default)s)")
    args = parser.parse_args()
    rank, n = turns.join_ranks()
    times, steps = alone(args.parameters, args.width, args.rounds, args.seconds)
    document: dict[str, Any] = {
        **turns.where(ranks=n),
        "parameters": args.parameters,
        "width": args.width,
        "alone": {name: found.as_dict() for name, found in times.items()},
        "small_step": {name: found.as_dict() for name, found in steps.items()},
        "hooks": {},
    }
    for transport in ("shared_memory", "sockets", "process_group"):
        found = hooks(args.parameters, args.width, args.large_mib << 18, args.steps, transport)
        document["hooks"][transport] = {
            mode: {
                "gradients": len(values["gap"]),
                **{
                    what: {"median_s": turns.quantile(values[what], 0.5), "p99_s": turns.quantile(values[what], 0.99)}
                    for what in ("gap", "hook")
                    if values[what]
                },
            }
            for mode, values in found.items()
        }
    if rank == 0:
        turns.write(args.out, "wrapper_cost", document, text_of(document), promises_of(document))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
