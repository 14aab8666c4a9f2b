"""Train a small GPT on Python's own sources, and see what it buys to communicate while backward still computes.

    python train.py                                              # one process: nothing to communicate
    torchrun --nproc-per-node 2 train.py                         # the whole comparison: two minutes on two cores
    torchrun --nproc-per-node 2 train.py --link 1ms,0.5GB/s      # on a slower emulated network
    torchrun --nproc-per-node 2 train.py --profile               # also a profiler trace of each mode
    torchrun --nproc-per-node 2 train.py --modes overlapped --link none --steps 1000      # just train
    torchrun --nproc-per-node 4 train.py --model mlp --steps 10
    torchrun --nproc-per-node 8 train.py --size small --batch 16 --sequence 1024 --dtype bf16      # eight GPUs

Every mode trains a replica of its own from the same seed on the same batches, in turns: step 1 in each mode, then
step 2 in each, so that whatever else the machine does hits all alike. The modes:

    local       no communication: the ceiling, and not data-parallel training, since each rank goes its own way
    torch       torch.nn.parallel.DistributedDataParallel
    naive       ddpx, one blocking all-reduce a parameter after backward
    bucketed    ddpx, fixed-size buckets after backward
    overlapped  ddpx, fixed-size buckets, each as soon as it is full

`report.json` and `timeline.png` in the output folder have the numbers and a picture of one step of each.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import ddpx
import models
from ddpx import compare, mfu, profile, timeline
from ddpx.algorithms import ALGORITHMS, build
from ddpx.communicator import TRANSPORTS
from ddpx.compare import Network, Phase, RankStep, Run, Yardstick
from models.data import Corpus, synthetic_images

MODES = ("local", "torch", "naive", "bucketed", "overlapped")
DEFAULT_LINK = "50us,1.25GB/s"  # 10 Gbit/s Ethernet
DEFAULT_STEPS = 40
# Where --steps is not given, training stops after this, so that a run ends within two minutes on a slow machine too.
TIME_LIMIT_S = 60
LEAST_STEPS = 8  # with 7, even a mode that is ahead at every step is hardly told from chance
KEPT_VIEWS = 100  # steps that are kept in full, for the picture and the buckets' times
VALIDATION_BATCHES = 8


# ---- Arguments: all that can be wrong is found before anything starts ------------------------------------------------


class Parser(argparse.ArgumentParser):
    """One line and exit code 2 for what is wrong, from rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Corpus | None]:
    """The settings, checked, and the text to train on (None for images). Exits with 2 where something is wrong."""
    parser = Parser(prog="train.py", description="Train in several modes side by side, and compare what they cost.")
    add = parser.add_argument
    add("--model", choices=models.MODELS, default="gpt")
    add("--size", default="nano", help="nano, small or medium (%(default)s)")
    add("--data", metavar="FILE|DIR", help="text, or uint16 tokens (.bin); default: Python's own standard library")
    add("--batch", type=int, default=2, help="sequences (or images) a rank and micro-step (%(default)s)")
    add("--sequence", type=int, default=64, help="tokens in a sequence (%(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="micro-steps a step (%(default)s)")
    add("--steps", type=int, help=f"timed steps a mode ({DEFAULT_STEPS}, or what {TIME_LIMIT_S} s allow)")
    add("--warmup", type=int, default=3, help="steps before them, not timed (%(default)s)")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    add("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast: weights and gradients stay fp32")
    add("--modes", default=",".join(MODES), help="any of %(default)s")
    add("--bucket-mb", type=float, default=4.0, metavar="MIB", help="bucket size, torch's too (%(default)s)")
    add(
        "--algorithm",
        choices=("auto", *ALGORITHMS["all_reduce"]),
        default="auto",
        metavar="NAME",
        help="of ddpx.algorithms",
    )
    add("--transport", choices=TRANSPORTS, default="auto")
    add("--link", metavar="ALPHA,BETA", help=f"emulated network, such as 200us,1GB/s; or none ({DEFAULT_LINK})")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--peak-tflops", type=float, metavar="T", help="of one device, for MFU; default: by name, on CPU measured")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--out", type=Path, metavar="DIR", help="default: runs/<date and time>")
    add("--profile", action="store_true", help="trace some more steps of each mode with torch.profiler: minutes")
    # torchrun takes --log for an option of its own, even behind the script's name, so there is a second spelling.
    add("--step-log", "--log", dest="log", type=Path, metavar="FILE", help="write a JSON line a step and mode")
    args = parser.parse_args(argv)
    try:
        return args, _check(args)
    except ValueError as error:
        parser.error(str(error))


def _check(args: argparse.Namespace) -> Corpus | None:
    """Replace names by what they stand for; ValueError says what is wrong."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for name, least in {"batch": 1, "sequence": 1, "accumulate": 1, "steps": 1, "warmup": 1, "seed": 0}.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    for name in ("lr", "bucket_mb", "peak_tflops"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be above zero, not {value}")
    args.modes = list(dict.fromkeys(mode.strip() for mode in args.modes.split(",")))
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown:
        raise ValueError(f"--modes: no mode is called {unknown[0]!r}; there are {', '.join(MODES)}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if args.device == "cuda" and torch.cuda.device_count() <= local_rank:
        raise ValueError(f"--device cuda: local rank {local_rank} has no GPU, there are {torch.cuda.device_count()}")
    if args.device == "cuda" and args.transport not in ("auto", "process_group"):
        raise ValueError(f"--transport {args.transport} joins CPU ranks; on GPUs it is process_group")
    if args.algorithm != "auto":
        build("all_reduce", args.algorithm, world_size)
    if args.link is None:
        args.link = DEFAULT_LINK if args.device == "cpu" and one_host() else "none"
    elif args.link != "none" and args.device == "cuda":
        raise ValueError("--link emulates a network between CPU ranks; leave it out on GPUs")
    link = None if args.link == "none" else ddpx.Link.parse(args.link)
    args.link = link if world_size > 1 else None
    for path in (args.out, args.log.parent if args.log else None):
        _check_folder(path or Path("runs"))
    if args.log and args.log.is_dir():
        raise ValueError(f"--log {args.log} is a folder")
    corpus = None
    if args.model == "resnet":
        if args.data:
            raise ValueError("--data: resnet trains on synthetic images, it reads no data")
    else:
        corpus = Corpus.load(args.data)
        corpus.check(args.sequence)
    with torch.device("meta"):
        models.build(args.model, args.size, corpus.vocab_size if corpus else 256, args.sequence)
    return corpus


def one_host() -> bool:
    """Whether all ranks run on this host, as the launcher says."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is one to write to, or can be made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{folder} cannot be a folder: {there} is a file")
    try:  # root may write anywhere by its permissions, but not make folders in /proc
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None


# ---- The job: ranks, device, model -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """This process among its peers. `control` is a gloo group for what is not gradients: barriers, times, losses."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    @classmethod
    def start(cls, device: str) -> "Job":
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(place)
        elif os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun sets 1 where nothing is set
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
        alone: dict[str, Any] = (
            {"store": dist.HashStore(), "rank": 0, "world_size": 1} if "RANK" not in os.environ else {}
        )
        if device == "cuda":
            dist.init_process_group("nccl", device_id=place, **alone)
        else:
            dist.init_process_group("gloo", **alone)
        return cls(rank, world_size, place, dist.new_group(backend="gloo"))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        with _between_steps():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        with _between_steps():
            dist.barrier(self.control)

    def sum(self, value: float) -> float:
        return float(sum(self.gather(value)))

    def now(self) -> float:
        """Seconds, when all that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def print(self, text: str) -> None:
        if self.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


@contextlib.contextmanager
def _between_steps() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's words for a closed connection or the end of its patience
        raise ddpx.Error(f"a rank is gone, or does something else, between two steps: {error}") from error


@dataclass(slots=True)
class Replica:
    """A model of its own for each mode and network, and what became of it."""

    run: Run
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.run.mode == "local" else self.model.no_sync()  # type: ignore[operator]


def make_replicas(args: argparse.Namespace, job: Job, vocab_size: int) -> list[Replica]:
    """One for each mode, and one more for each of ddpx's modes on the emulated network. A collective."""
    planned: list[tuple[str, Network]] = [(mode, "none" if mode == "local" else "own") for mode in args.modes]
    planned.sort(key=lambda pair: pair[1] != "none")
    if args.link:
        planned += [(mode, "emulated") for mode in args.modes if mode not in ("local", "torch")]
    replicas = []
    for mode, network in planned:
        torch.manual_seed(args.seed)
        model = models.build(args.model, args.size, vocab_size, args.sequence).to(job.device)
        if mode == "torch":
            ids = [job.device.index] if job.device.type == "cuda" else None
            model = DistributedDataParallel(
                model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=args.bucket_mb
            )
            model._set_ddp_runtime_logging_sample_rate(1)
        elif mode != "local":
            model = ddpx.DDPX(
                model,
                mode=mode,  # type: ignore[arg-type]
                algorithm=args.algorithm,
                transport=args.transport,
                bucket_cap_mb=args.bucket_mb,
                link=args.link if network == "emulated" else None,
            )
        if args.optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        replicas.append(Replica(Run(mode, network, ""), model, optimizer))
    ours = [replica.model for replica in replicas if isinstance(replica.model, ddpx.DDPX)]
    transport = ours[0].reducer.communicator.transport_name.replace("_", " ") if ours else "torch's own"
    labels = {
        "none": "no communication",
        "own": f"{'this machine' if one_host() else 'these machines'} ({transport})",
        "emulated": f"emulated network ({args.link})",
    }
    for replica in replicas:
        replica.run.label = labels[replica.run.network] if job.world_size > 1 else "one process"
    return replicas


# ---- Training --------------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]
Draw = Callable[[int, int], list[Batch]]  # (step, rank) -> a step's micro-batches


def train_step(replica: Replica, batches: Sequence[Batch], dtype: torch.dtype, job: Job) -> RankStep:
    """Forward, backward and optimizer, timed. Gradients of all micro-batches but the last stay on this rank."""
    model, device = replica.model, job.device.type
    loss_sum = torch.zeros((), device=job.device)
    phases: list[Phase] = []
    began_s = job.now()
    for number, (inputs, targets) in enumerate(batches, 1):
        last = number == len(batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            forward_s = time.perf_counter()
            with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
                _, loss = model(inputs, targets)
            backward_s = time.perf_counter()
            (loss / len(batches)).backward()
            ended_s = time.perf_counter()
        loss_sum += loss.detach() / len(batches)
        phases.append(Phase("forward", forward_s - began_s, backward_s - began_s))
        phases.append(Phase("backward", backward_s - began_s, ended_s - began_s))
    replica.optimizer.step()
    replica.optimizer.zero_grad()
    done_s = job.now()
    backward_ended_s, buckets = compare.communication_of(model, began_s)
    if buckets:
        phases[-1] = phases[-1]._replace(end_s=backward_ended_s)
        phases.append(Phase("wait", backward_ended_s, ended_s - began_s))
    phases.append(Phase("optimizer", ended_s - began_s, done_s - began_s))
    return RankStep(loss_sum.item(), done_s - began_s, backward_ended_s, tuple(phases), buckets)


def take_turns(args: argparse.Namespace, job: Job, replicas: Sequence[Replica], draw: Draw, log: Any) -> None:
    """Train: each step in every replica before the next. A console line a step; a JSON line each, where wanted."""
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    total = args.warmup + (args.steps or DEFAULT_STEPS)
    began_s = time.perf_counter()
    bar = tqdm(total=total * len(replicas), unit="step", disable=None if job.rank == 0 else True, leave=False)
    for number in range(total):
        batches = draw(number, job.rank)
        for replica in replicas:
            run = replica.run
            bar.set_description(f"{run.mode}, {run.label}")
            job.barrier()
            ranks = job.gather(train_step(replica, batches, dtype, job))
            step = compare.summarise(ranks)
            run.losses.append(step.loss)
            if number >= args.warmup:
                run.steps.append(step)
                run.views = [*run.views[-KEPT_VIEWS + 1 :], ranks]
            if log:
                log.write(json.dumps(compare.log_line(number, run, step, ranks)) + "\n")
            bar.update()
        job.print(compare.console_line(number, [replica.run for replica in replicas], step))
        done = number + 1 - args.warmup
        if args.steps is None and LEAST_STEPS <= done < DEFAULT_STEPS:
            if job.gather(time.perf_counter() - began_s)[0] > TIME_LIMIT_S:
                job.print(f"stopped after {done} timed steps, since {TIME_LIMIT_S} s are over; --steps sets a number")
                break
    bar.close()


def validate(replica: Replica, draw: Callable[[int, int], list[Batch]], job: Job) -> float:
    """Mean loss over held-out batches, all ranks' together."""
    model = replica.model if replica.run.mode == "local" else replica.model.module
    assert isinstance(model, nn.Module)
    model.eval()
    with torch.no_grad():
        losses = [model(*batch)[1].item() for number in range(VALIDATION_BATCHES) for batch in draw(number, job.rank)]
    model.train()
    return job.sum(sum(losses) / len(losses)) / job.world_size


def trace(args: argparse.Namespace, job: Job, replicas: Sequence[Replica], draw: Draw, out: Path) -> list[Path]:
    """Some more steps of each replica under the profiler, untimed. Returns the folders with the ranks' files."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to standard error when it starts
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    folders = []
    for replica in tqdm(replicas, unit="trace", disable=None if job.rank == 0 else True, leave=False):
        folder = out / (f"{replica.run.mode}-emulated" if replica.run.network == "emulated" else replica.run.mode)
        if job.rank == 0 and folder.is_dir():
            for old in folder.glob(profile.PATTERN):  # of an earlier run in this folder, perhaps of more ranks
                old.unlink()
        every_step = [draw(number, job.rank) for number in range(profile.STEPS)]
        job.barrier()
        with profile.record(folder, job.rank, replica.model) as end_of_step:
            for batches in every_step:
                train_step(replica, batches, dtype, job)
                end_of_step()
        job.barrier()
        if job.rank == 0:
            profile.merge(folder, out / f"merged_{folder.name}.perfetto.json.gz")
        folders.append(folder)
    return folders


# ---- The program -----------------------------------------------------------------------------------------------------


def work_of(args: argparse.Namespace, model: nn.Module, batch: Batch, job: Job) -> tuple[float, str, int, str]:
    """FLOPs of a global step and how they were counted; tokens or images of a global step, and which."""
    formula = None
    if isinstance(model, models.GPT):
        shape = model.config
        tokens = args.batch * args.sequence
        per_token = mfu.palm_flops_per_token(
            model.matmul_parameters(), shape.layers, shape.heads, shape.head_dim, args.sequence
        )
        formula = per_token * tokens
    flops = mfu.ModelFlops(mfu.count_flops(model, *batch), formula)
    times = args.accumulate * job.world_size
    item = "image" if args.model == "resnet" else "token"
    items = args.batch * (1 if item == "image" else args.sequence)
    return float(flops.per_batch * times), flops.convention, items * times, item


def settings_text(
    args: argparse.Namespace, job: Job, replicas: Sequence[Replica], corpus: Corpus | None, out: Path
) -> str:
    """What this run is, resolved: nothing left at "auto"."""
    parameters = [parameter.numel() for parameter in replicas[0].model.parameters()]
    place = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else f"cpu ({compare.processor()})"
    threads = f", {torch.get_num_threads()} thread(s) a rank" if job.device.type == "cpu" else ""
    rows = {
        "ranks": f"{job.world_size} on {place}{threads}; torch {torch.__version__}, ddpx {ddpx.__version__}",
        "model": f"{args.model} {args.size}: {sum(parameters) / 1e6:.1f} M parameters in {len(parameters)} tensors, "
        f"{4 * sum(parameters) / 2**20:.1f} MiB of gradients; {args.dtype}",
        "data": f"{corpus.name}, {len(corpus.train) / 1e6:.1f} M tokens" if corpus else "synthetic images",
        "batch": f"{args.batch} a rank"
        + (f" x {args.sequence} tokens" if corpus else "")
        + (f" x {args.accumulate} micro-steps" if args.accumulate > 1 else ""),
        "steps": f"{args.warmup} to warm up, then {args.steps or DEFAULT_STEPS} timed, in turns; {args.optimizer}, "
        f"lr {args.lr:g}, seed {args.seed}",
        "modes": ", ".join(args.modes) + (f"; network also emulated as {args.link}" if args.link else ""),
        "reduce": all_reduce_text(args, replicas),
        "out": str(out),
    }
    return "\n".join(f"{name:8} {text}" for name, text in rows.items())


def all_reduce_text(args: argparse.Namespace, replicas: Sequence[Replica]) -> str:
    """How gradients travel in ddpx's modes."""
    ours = [replica.model for replica in replicas if isinstance(replica.model, ddpx.DDPX)]
    buckets = f"buckets of {args.bucket_mb:g} MiB"
    if not ours:
        return buckets
    communicator = ours[0].reducer.communicator
    small, large = communicator.choose(1), communicator.choose(int(args.bucket_mb * 2**20))
    names = large if small == large else f"{large}, for small buckets {small},"
    return f"{names} over {communicator.transport_name.replace('_', ' ')}, {buckets}"


def draws(args: argparse.Namespace, corpus: Corpus | None, job: Job) -> tuple[Draw, Draw]:
    """How to draw a rank's batches of a step: to train on, and held out."""
    source = corpus.batch if corpus else synthetic_images

    def training(step: int, rank: int) -> list[Batch]:
        shape = (args.batch, args.sequence, args.seed)
        return [source("train", *shape, step, rank, job.device, micro) for micro in range(args.accumulate)]

    def held_out(step: int, rank: int) -> list[Batch]:
        return [source("validation", args.batch, args.sequence, args.seed, step, rank, job.device)]

    return training, held_out


def train(args: argparse.Namespace, corpus: Corpus | None, job: Job) -> None:
    """The whole run: train in turns, validate, compare, write, say what was found."""
    name = job.gather(datetime.now().strftime("%Y-%m-%d_%H%M%S"))[0]
    out: Path = args.out or Path("runs", name)
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = draws(args, corpus, job)
    replicas = make_replicas(args, job, corpus.vocab_size if corpus else 256)
    job.print(settings_text(args, job, replicas, corpus, out))

    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    bare = models.build(args.model, args.size, corpus.vocab_size if corpus else 256, args.sequence)
    flops, convention, items, item = work_of(args, bare, training(0, 0)[0], job)

    def peak() -> mfu.Peak | None:
        tf32 = torch.backends.cuda.matmul.allow_tf32
        return mfu.job_peak(
            job.device,
            dtype,
            tf32=tf32,
            device_tflops=args.peak_tflops,
            barrier=job.barrier,
            sum_over_ranks=job.sum,
        )

    before = peak()
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
    with args.log.open("w", buffering=1) if args.log and not job.rank else contextlib.nullcontext() as log:
        take_turns(args, job, replicas, training, log)
    after, warning = peak(), None
    if before is not None and after is not None:
        after, warning = mfu.higher_peak(before, after)
    runs = [replica.run for replica in replicas]
    for replica in replicas:
        replica.run.validation_loss = validate(replica, held_out, job)
        if isinstance(replica.model, ddpx.DDPX):
            buckets = replica.model.reducer.buckets
            replica.run.algorithm = ", ".join(dict.fromkeys(bucket.algorithm for bucket in buckets))
    folders = trace(args, job, replicas, training, out) if args.profile else []
    if job.rank:
        return

    yardstick = Yardstick(items, item, flops, convention, after, warning)
    print(f"\n{compare.table(runs, yardstick)}\n")
    print(compare.mfu_text(yardstick))
    print(compare.loss_text(runs))
    print(f"\n{compare.finding(runs, job.world_size)}\n")
    what = f"{args.model} {args.size} on {job.world_size} rank(s) of {'GPUs' if args.device == 'cuda' else 'CPU'}"
    timeline.draw(runs, what, out / "timeline.png")
    content = {
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in _plain(args).items()},
        "world_size": job.world_size,
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else compare.processor(),
        "threads": torch.get_num_threads(),
        "versions": {"ddpx": ddpx.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": corpus.name if corpus else "synthetic images",
        **compare.report(runs, yardstick, job.world_size),
    }
    (out / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    written = ["report.json", "timeline.png", *(f"{folder.name}/" for folder in folders)]
    print(f"Written to {out}: {', '.join(written)}")
    if folders:
        print(f"To read the traces: python -m ddpx trace {folders[-1]}")


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {**vars(args), "link": str(args.link) if args.link else None}


def main() -> int:
    args, corpus = parse()
    job = Job.start(args.device)
    try:
        train(args, corpus, job)
    except ddpx.Error as error:
        print(f"train.py: rank {job.rank}: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
