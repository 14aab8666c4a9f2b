"""What overlap and hierarchy buy on a network that is really slow: namespaces, veth and `tc tbf`. Root, four minutes.

    python profiles/slow_network.py --out profiles/DATE_2core-cpu_slow_network                 # all that follows
    python profiles/slow_network.py --out DIR --parts 1gbit        # a step at 1 Gbit/s between two hosts of one rank
    python profiles/slow_network.py --out DIR --parts 4gbit        # at 4 Gbit/s
    python profiles/slow_network.py --out DIR --parts link         # both again, emulated by --link in shared memory
    python profiles/slow_network.py --out DIR --parts hierarchical # all-reduce, two hosts of two ranks, and of one rank

Parts add to what the folder has. A step is forward, backward and optimizer (SGD) of GPT nano, from a barrier on, on the
slowest rank, all modes in turns: over sockets of our own, which `auto` takes between hosts, and over gloo. The batch is
chosen so that communication takes about as long as backward. The bound
that no schedule can beat: forward + max(backward, communication) + the last bucket + optimizer, where the times of
computing are local's medians, and communication is the median of the buckets' all-reduces run one after another with
nothing else going on. Hierarchical all-reduce is held against our flat ring and gloo's own, over the same four ranks;
bytes between hosts are those that the interface counted, headers of TCP included.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import torch
import torch.distributed as dist
import turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import ddpx
from ddpx import bench
from ddpx.gate import Promise
from ddpx.units import bytes_text, parse_bytes, seconds_text
from models.data import Corpus
from models.gpt import GPT

OURS = ("naive", "bucketed", "overlapped")
OVER_GLOO = ("naive over gloo", "overlapped over gloo")
RATES = {"1gbit": ("0.125GB/s", 6), "4gbit": ("0.5GB/s", 2)}  # by rate: the same as a link, sequences of a batch
LATENCY = "50us"
SEQUENCE = 64
SIZES = "1MiB,4MiB,25MiB"
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


# ---- A training step -------------------------------------------------------------------------------------------------


class Stepper:
    """A replica for a mode, and what its phases took; a call makes a step and tells its seconds."""

    def __init__(self, mode: str, batch: int, bucket_mib: float, link: str | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT.from_size("nano", 256, SEQUENCE)
        if mode == "torch":
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
        elif mode != "local":
            mode, _, over = mode.partition(" over ")
            transport = "process_group" if over == "gloo" else "auto"
            self.model = ddpx.DDPX(self.model, mode=mode, transport=transport, bucket_cap_mb=bucket_mib, link=link)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens, self.targets = Corpus.load().batch("train", batch, SEQUENCE, rank=dist.get_rank())
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        self.communication: list[tuple[float, float]] = []  # of ddpx: in all, and after backward had ended

    def __call__(self) -> float:
        at = [time.perf_counter()]
        loss = self.model(self.tokens, self.targets)[1]
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.append(time.perf_counter())
        for phase, began_s, ended_s in zip(self.phases, at, at[1:]):
            self.phases[phase].append(ended_s - began_s)
        if isinstance(self.model, ddpx.DDPX) and (stats := self.model.reducer.recorder.last_step) is not None:
            self.communication.append((stats.communication_s, stats.exposed_s))
        return at[-1] - at[0]


def buckets_s(model: ddpx.DDPX, times: int = 7) -> list[float]:
    """Median seconds of each bucket's all-reduce, one after another and nothing else going on. A collective."""
    reducer = model.reducer
    found: list[list[float]] = []
    for number in range(times):
        dist.barrier()
        reducer.enter((3 << 32) + number)
        row = []
        for bucket in reducer.buckets:
            began_s = time.perf_counter()
            reducer.run_in_epoch(bucket.plan.run)
            row.append(time.perf_counter() - began_s)
        found.append(row)
    slowest = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.median(0).values.tolist()


def step_part(args: argparse.Namespace) -> dict[str, Any]:
    """On every rank: all modes in turns, then the bound."""
    before = bench._processor_s()
    modes = ("local", *OURS) if args.link else ("local", *OURS, *OVER_GLOO, "torch")
    steppers = {mode: Stepper(mode, args.batch, args.bucket_mib, args.link) for mode in modes}
    times = turns.in_turns(steppers, rounds=args.rounds, seconds=args.seconds)
    others = bench._others(before)
    overlapped = steppers["overlapped"].model
    assert isinstance(overlapped, ddpx.DDPX)
    buckets = buckets_s(overlapped)
    phases = torch.tensor([statistics.median(found) for found in steppers["local"].phases.values()])
    dist.all_reduce(phases, dist.ReduceOp.MAX)
    forward_s, backward_s, optimizer_s = phases.tolist()
    stats = overlapped.reducer.recorder.last_step
    assert stats is not None
    return {
        "times": {mode: found.as_dict() for mode, found in times.items()},
        "batch": args.batch,
        "bucket_mib": args.bucket_mib,
        "buckets_bytes": [bucket.nbytes for bucket in stats.buckets],
        "algorithms": [bucket.algorithm for bucket in stats.buckets],
        "transport": overlapped.reducer.communicator.transport_name,
        "buckets_s": buckets,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "bound_s": forward_s + max(backward_s, sum(buckets)) + buckets[-1] + optimizer_s,
        "communication_s": {
            mode: [statistics.median(part) for part in zip(*stepper.communication)]
            for mode, stepper in steppers.items()
            if stepper.communication
        },
        "others": others,
    }


# ---- An all-reduce over hosts ----------------------------------------------------------------------------------------


def hierarchical_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: hierarchical, our flat ring over messages and gloo in turns; bytes that left a host."""
    n, per_host = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    messages = ddpx.Communicator(transport="sockets")
    layered = ddpx.Communicator(transport="hierarchical") if per_host > 1 else None
    rows = []
    for nbytes in map(parse_bytes, SIZES.split(",")):
        ordinary = torch.zeros(nbytes // 4)
        flat = messages.empty(nbytes // 4, torch.float32)
        runs: dict[str, Callable[[], object]] = {
            "gloo": partial(dist.all_reduce, ordinary),
            "flat ring": messages.plan_all_reduce(flat, algorithm="ring").run,
        }
        if layered is not None:
            runs = {"hierarchical": layered.plan_all_reduce(layered.empty(nbytes // 4, torch.float32)).run, **runs}
        contenders = {name: partial(_timed, run) for name, run in runs.items()}
        times = turns.in_turns(contenders, rounds=args.rounds, seconds=args.seconds / 3)
        for name, run in runs.items():
            rows.append(
                {"contender": name, "bytes": nbytes, "ranks": n, "hosts": n // per_host}
                | {"sent_by_a_host": _sent(run), **times[name].as_dict()}
            )
    return rows


def _timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def _sent(run: Callable[[], object], times: int = 5) -> float:
    """Bytes that the busiest host's interface sent for one `run`. A collective."""
    dist.barrier()
    before = int(SENT.read_text())
    for _ in range(times):
        run()
    dist.barrier()
    sent = torch.tensor([(int(SENT.read_text()) - before) / times], dtype=torch.float64)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return float(sent)


# ---- Text ------------------------------------------------------------------------------------------------------------


def text_of(found: dict[str, Any]) -> str:
    parts = []
    for name, part in found.items():
        if name.startswith("hierarchical"):
            parts.append(_hierarchical_text(name, part))
        else:
            parts.append(_step_text(name, part))
    return "\n\n".join(parts)


def _step_text(name: str, part: dict[str, Any]) -> str:
    times = {mode: turns.Times(tuple(entry["rounds_s"])) for mode, entry in part["times"].items()}
    reference = times["overlapped"]
    lines = [["step", "median (deciles)", "overlapped takes", "communication", "of it after backward"]]
    for mode, entry in times.items():
        communication = [seconds_text(value) for value in part["communication_s"].get(mode, [])] or ["", ""]
        lines.append([mode, str(entry), turns.ratio_text(turns.ratio(reference, entry)), *communication])
    lines.append(["bound", seconds_text(part["bound_s"]), f"{reference.median_s / part['bound_s']:.3f}", "", ""])
    communication_s = sum(part["buckets_s"])
    return (
        f"{name}: GPT nano, batch {part['batch']} x {SEQUENCE}, {len(part['buckets_s'])} buckets of at most "
        f"{part['bucket_mib']:g} MiB; forward {seconds_text(part['forward_s'])}, backward "
        f"{seconds_text(part['backward_s'])}, communication {seconds_text(communication_s)}, the last bucket "
        f"{seconds_text(part['buckets_s'][-1])}; others {part['others']:.0%}\n\n{turns.markdown(lines)}"
    )


def _hierarchical_text(name: str, rows: list[dict[str, Any]]) -> str:
    lines = [["all-reduce", "hosts x ranks", "by", "median (deciles)", "sent by a host", "of the buffer"]]
    for row in rows:
        shape = f"{row['hosts']} x {row['ranks'] // row['hosts']}"
        sent = row["sent_by_a_host"]
        times = str(turns.Times(tuple(row["rounds_s"])))
        lines.append(
            [bytes_text(row["bytes"]), shape, row["contender"], times, f"{sent / 1e6:.2f} MB"]
            + [f"{sent / row['bytes']:.2f}×"]
        )
    return f"{name}\n\n{turns.markdown(lines)}"


def promises_of(found: dict[str, Any]) -> list[Promise]:
    """Of a step: ahead of naive, close to the bound, not behind torch's. Of hierarchical: bytes, and ahead of both."""
    promises = []
    for name, part in found.items():
        if name == "hierarchical":
            promises += _hierarchical_promises(part)
            continue
        medians = {mode: entry["median_s"] for mode, entry in part["times"].items()}
        ours = medians["overlapped"]
        promises.append(Promise(f"{name}: naive's step over overlapped's", medians["naive"] / ours, 1.5))
        promises.append(Promise(f"{name}: overlapped's step over the bound", ours / part["bound_s"], 1.05, False))
        if "torch" in medians:
            promises.append(Promise(f"{name}: overlapped's step over torch's", ours / medians["torch"], 1.0, False))
            naive, overlapped = (medians[mode] for mode in OVER_GLOO)
            promises.append(Promise(f"{name}: naive's step over overlapped's, over gloo", naive / overlapped, 1.5))
    return promises


def _hierarchical_promises(rows: list[dict[str, Any]]) -> list[Promise]:
    promises = []
    at = {(row["contender"], row["bytes"], row["ranks"]): row for row in rows}
    for nbytes in sorted({row["bytes"] for row in rows}):
        ours, ring, gloo = (at[name, nbytes, 4] for name in ("hierarchical", "flat ring", "gloo"))
        what = f"{bytes_text(nbytes)} over hosts:"
        bytes_of_one = ours["sent_by_a_host"] / at["flat ring", nbytes, 2]["sent_by_a_host"]
        promises.append(Promise(f"{what} bytes of two ranks a host over those of one", bytes_of_one, 1.02, False))
        for name, theirs in (("the flat ring", ring), ("gloo", gloo)):
            promises.append(
                Promise(f"{what} {name}'s time over hierarchical's", theirs["median_s"] / ours["median_s"], 1.0)
            )
    return promises


# ---- The program -----------------------------------------------------------------------------------------------------


def on_rank(args: argparse.Namespace) -> None:
    """What torchrun starts in the namespaces."""
    rank, _ = turns.join_ranks()
    found: Any = hierarchical_part(args) if args.worker == "hierarchical" else step_part(args)
    if rank == 0:
        args.out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run(worker: str, rate: str, ranks_per_host: int, args: argparse.Namespace, link: str | None = None) -> Any:
    """Measure on ranks of their own, and take namespaces down again; what rank 0 found."""
    batch = RATES[rate][1] if args.batch is None else args.batch
    place = args.out / f"part.{os.getpid()}.json"
    command = [__file__, "--worker", worker, "--out", str(place), "--rounds", str(args.rounds)]
    command += ["--seconds", str(args.seconds), "--batch", str(batch), "--bucket-mib", str(args.bucket_mib)]
    try:
        if link is not None:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            code = subprocess.run([*launch, *command, "--link", link], env=environment, check=False).returncode
        else:
            with hosts.namespaces(2, rate) as names:
                code = hosts.launch(names, ranks_per_host, command)
        if code:
            sys.exit(code)
        return json.loads(place.read_text(encoding="utf-8"))
    finally:
        place.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--parts", default="1gbit,4gbit,link,hierarchical", metavar="LIST", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="at most (%(default)s)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each part, about (%(default)s)")
    parser.add_argument("--batch", type=int, help="sequences; default: by rate")
    parser.add_argument("--bucket-mib", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--worker", choices=("step", "hierarchical"), help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        on_rank(args)
        return
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, hosts.end_as_interrupted)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "slow_network.json"
    found: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    for part in tqdm(args.parts.split(","), disable=None, leave=False):
        if part in RATES:
            found[part] = run("step", part, 1, args)
        elif part == "link":
            for rate, (bandwidth, _) in RATES.items():
                link = f"{LATENCY},{bandwidth}"
                found[f"link {link}"] = run("step", rate, 1, args, link)
        elif part == "hierarchical":
            found["hierarchical"] = [row for ranks in (2, 1) for row in run("hierarchical", "1gbit", ranks, args)]
        else:
            parser.error(f"no part is called {part!r}")
        document = {**turns.where(), "parts": found}
        turns.write(args.out, "slow_network", document, text_of(found), promises_of(found))


if __name__ == "__main__":
    main()
