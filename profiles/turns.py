"""What the profiles here share: contenders that take turns on all ranks, and the record of where that was."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddpx import bench, compare, native
from ddpx.gate import Promise, Unmeasured, as_document
from ddpx.units import seconds_text

LEAST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Times:
    """A contender's seconds, round by round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> tuple[float, float]:
        """First and last decile."""
        return quantile(self.seconds, 0.1), quantile(self.seconds, 0.9)

    def __str__(self) -> str:
        low, high = self.spread_s
        return f"{seconds_text(self.median_s)} ({seconds_text(low)} .. {seconds_text(high)})"

    def as_dict(self) -> dict[str, Any]:
        return {"median_s": self.median_s, "spread_s": self.spread_s, "rounds_s": self.seconds}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]


def ratio(ours: Times, theirs: Times) -> dict[str, float]:
    """Ours over theirs: of the medians, and the first and last decile of the ratios within a round."""
    rounds = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return {"of_medians": ours.median_s / theirs.median_s, "p10": quantile(rounds, 0.1), "p90": quantile(rounds, 0.9)}


def ratio_text(found: Mapping[str, float]) -> str:
    return f"{found['of_medians']:.3f} ({found['p10']:.2f} .. {found['p90']:.2f})"


def join_ranks() -> tuple[int, int]:
    """Join the ranks that torchrun started, one thread each. Returns this rank and how many there are."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def in_turns(
    contenders: Mapping[str, Callable[[], float]],  # each does its work once and returns the seconds it took here
    *,
    rounds: int,
    seconds: float,
    warmup: int = 2,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Times]:
    """Run every contender once a round, each from a barrier on: A B A B. The slowest rank's times.

    Stops after `rounds`, or once `seconds` are over and LEAST_ROUNDS done. A collective.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    spent_s = 0.0
    for turn in range(-warmup, rounds):
        row = torch.zeros(len(contenders), dtype=torch.float64)
        for place, run in enumerate(contenders.values()):
            dist.barrier(group)
            row[place] = run()
        dist.all_reduce(row, dist.ReduceOp.MAX, group)
        spent_s += float(row.sum())
        if turn >= 0:
            for name, value in zip(contenders, row.tolist(), strict=True):
                taken[name].append(value)
        if turn + 1 >= min(rounds, LEAST_ROUNDS) and spent_s > seconds:
            break
    return {name: Times(tuple(values)) for name, values in taken.items()}


def where(**more: Any) -> dict[str, Any]:
    """Hardware, versions, commit, command."""
    return {
        "processor": compare.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()},
        "commit": bench._commit(),
        "compiled_helper": native.LIBRARY is not None,
        "date": date.today().isoformat(),
        "command": " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        **more,
    }


def write(
    out: Path,
    name: str,
    document: Mapping[str, Any],
    text: str,
    promises: Sequence[Promise],
    unmeasured: Sequence[Unmeasured] = (),
) -> None:
    """`name`.json, with what `python -m ddpx bench --gate` reads, and `name`.md in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    whole = {**document, **as_document(promises, unmeasured)}
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n\nwritten: {out}/{name}.json, {name}.md", flush=True)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its head; the first column to the left, the others to the right."""
    head, *rows = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|---|{'---:|' * (len(lines[0]) - 1)}", *rows])
