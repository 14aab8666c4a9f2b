"""All-reduce measured on real processes: each algorithm and transport, in turns with torch's own, beside the model.

    python -m ddpx bench --nproc 2                      start two ranks here; all sizes, a few minutes
    torchrun --nproc-per-node 2 -m ddpx bench           or join the ranks that torchrun starts
    python -m ddpx bench --nproc 4 --sizes 64KiB,25MiB --algorithms ring,direct --transports shared_memory
    python -m ddpx bench --nproc 2 --gate               all that is promised, with the scripts in profiles/: ten
                                                        minutes; exit 1 unless the promises hold (networks: root)

A time is that of the slowest rank, for a buffer in the transport's memory, as training's buckets are; torch's
all_reduce works in place on an ordinary tensor. Every contender runs one block of repetitions a round, and rounds
repeat (A B A B). algbw = size / time, busbw = algbw × 2(n-1)/n. Writes bench.json, bench.csv (all rounds), bench.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from ddpx import gate
from ddpx.algorithms import ALGORITHMS
from ddpx.communicator import Communicator
from ddpx.cost import Fabric, Fit, Sample, best_by_size, fit, predict
from ddpx.errors import Error
from ddpx.transport import Link
from ddpx.units import bandwidth_text, bytes_text, parse_bytes, seconds_text, table

SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,25MiB,64MiB,256MiB"
ALGORITHM_NAMES = tuple(name for name in ALGORITHMS["all_reduce"] if name != "hierarchical")
TRANSPORT_NAMES = ("shared_memory", "sockets", "process_group")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_S = 0.02  # one contender's part of a round takes about this long, or one repetition
MIN_ROUNDS, MAX_REPETITIONS = 3, 2000
TORCH = "torch all_reduce"
BUSY = 0.1
CACHED_BYTES = 1 << 20  # smaller buffers may stay in caches, which are faster than memory


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured; the same on every rank."""

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    transports: tuple[str, ...]
    dtype: str
    rounds: int
    seconds: float  # at most, for each size
    link: str | None


@dataclass(slots=True)
class Row:
    """One contender at one size: by round, the mean seconds of a repetition on the slowest rank."""

    contender: str
    transport: str
    algorithm: str
    nbytes: int
    repetitions: int
    rounds: list[float]
    predicted_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread_s(self) -> tuple[float, float]:
        """First and last decile; least and greatest where there are few rounds."""
        ordered = sorted(self.rounds)
        return ordered[round(0.1 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank's memory does, beyond its caches, while all ranks do the same: the ground under every number."""

    copy_bytes_per_s: float  # bytes copied; each is read and written
    add_s_per_byte: float  # a += b, by byte of a
    others: float = 0.0  # the share of all processors that other processes took meanwhile

    def limit_s(self, nbytes: int, n: int) -> float:
        """The least that an all-reduce of n ranks moves, at this speed: each reads n slices and writes n."""
        return nbytes / self.copy_bytes_per_s if n > 1 else 0.0


# ---- On every rank ---------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> tuple[list[Row], Machine]:
    """Run all contenders on the initialised process group. A collective; the rows are the same on every rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[settings.dtype]
    link = Link.parse(settings.link) if settings.link else None
    largest = max(settings.sizes) // dtype.itemsize
    machine = _machine()
    before = _processor_s()
    ordinary = torch.zeros(largest, dtype=dtype)
    groups = {name: Communicator(transport=name, link=link) for name in settings.transports}
    flats = {name: communicator.empty(largest, dtype) for name, communicator in groups.items()}
    rows: list[Row] = []
    shown = tqdm(settings.sizes, desc="sizes", disable=None if rank == 0 else True, leave=False)
    for nbytes in shown:
        shown.set_postfix_str(bytes_text(nbytes))
        numel = nbytes // dtype.itemsize
        contenders: list[tuple[str, str, str, Callable[[], object], torch.Tensor]] = []
        part = ordinary[:numel]
        contenders.append((TORCH, "gloo", "", partial(dist.all_reduce, part), part))
        for name, communicator in groups.items():
            for algorithm in settings.algorithms:
                flat = flats[name][:numel]
                plan = communicator.plan_all_reduce(flat, algorithm=algorithm if algorithm != "auto" else None)
                contenders.append((f"{name} {algorithm}", name, algorithm, plan.run, flat))
        rows += _measure_size(nbytes, contenders, settings, n)
    for communicator in groups.values():
        communicator.close()
    return rows, replace(machine, others=_others(before))


def _measure_size(
    nbytes: int,
    contenders: Sequence[tuple[str, str, str, Callable[[], object], torch.Tensor]],
    settings: Settings,
    n: int,
) -> list[Row]:
    estimates = torch.zeros(len(contenders), dtype=torch.float64)
    for index, (name, _, _, run, flat) in enumerate(contenders):
        flat.fill_(dist.get_rank() + 1)
        run()
        right = torch.tensor([int(bool((flat == n * (n + 1) // 2).all()))])
        dist.all_reduce(right, dist.ReduceOp.MIN)
        if not right.item():
            raise Error(f"{name} gives a wrong sum for {bytes_text(nbytes)}")
        flat.zero_()
        estimates[index] = _time(run, 2)
    dist.all_reduce(estimates, dist.ReduceOp.MAX)  # the same on every rank, so that all repeat as often
    repetitions = [min(MAX_REPETITIONS, max(1, round(BLOCK_S / estimate))) for estimate in estimates.tolist()]
    round_s = sum(count * estimate for count, estimate in zip(repetitions, estimates.tolist(), strict=True))
    rounds = max(MIN_ROUNDS, min(settings.rounds, int(settings.seconds / round_s)))
    seconds = torch.zeros(rounds, len(contenders), dtype=torch.float64)
    for turn in range(rounds):
        for index, (_, _, _, run, _) in enumerate(contenders):
            seconds[turn, index] = _time(run, repetitions[index])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return [
        Row(name, transport, algorithm, nbytes, repetitions[index], seconds[:, index].tolist())
        for index, (name, transport, algorithm, _, _) in enumerate(contenders)
    ]


def _time(run: Callable[[], object], repetitions: int) -> float:
    """Mean seconds of a repetition. The first run is not counted: it brings the ranks together."""
    run()
    began = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - began) / repetitions


def _machine() -> Machine:
    a, b = torch.zeros(16 << 20), torch.zeros(16 << 20)
    times: dict[str, list[float]] = {"copy": [], "add": []}
    for _ in range(5):
        dist.barrier()
        for name, run in (("copy", lambda: a.copy_(b)), ("add", lambda: a.add_(b))):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    medians = torch.tensor([statistics.median(times["copy"]), statistics.median(times["add"])])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return Machine(a.nbytes / float(medians[0]), float(medians[1]) / a.nbytes)


def _processor_s() -> tuple[float, float, float]:
    """(now, seconds that all processors together were busy, those of them spent in this process)."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy_s = math.nan
    return time.monotonic(), busy_s, time.process_time()


def _others(before: tuple[float, float, float]) -> float:
    """The share of this host's processors that processes other than the ranks took since `before`; nan if unknown."""
    elapsed, busy_s, own_s = (now - then for now, then in zip(_processor_s(), before, strict=True))
    ours = torch.tensor([own_s], dtype=torch.float64)
    dist.all_reduce(ours)
    share = torch.tensor([(busy_s - float(ours)) / (elapsed * (os.cpu_count() or 1))], dtype=torch.float64)
    dist.broadcast(share, 0)
    return max(0.0, float(share)) if math.isfinite(float(share)) else math.nan


# ---- What the numbers say --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crossing:
    """From `nbytes` on, `after` is the fastest of a transport, where `before` was."""

    nbytes: float
    before: str
    after: str


def fit_rows(rows: Sequence[Row], n: int, machine: Machine) -> dict[str, Fit]:
    """One alpha and one beta for each transport, over all its algorithms and sizes; fills in `predicted_s`."""
    fits = {}
    for transport in dict.fromkeys(row.transport for row in rows if row.algorithm):
        ours = [row for row in rows if row.transport == transport and row.algorithm in ALGORITHM_NAMES]
        if len({row.nbytes for row in ours}) < 2 or n == 1:
            continue
        crowd = n / len(os.sched_getaffinity(0)) if transport == "process_group" else 0.0
        like = Fabric(0.0, 0.0, machine.add_s_per_byte, concurrent=transport != "sockets", ranks_per_core=crowd)
        found = fits[transport] = fit([Sample(row.algorithm, n, row.nbytes, row.median_s) for row in ours], like)
        for row in ours:
            row.predicted_s = predict("all_reduce", row.algorithm, n, row.nbytes, found.fabric).total_s
    return fits


def measured_crossings(rows: Sequence[Row], transport: str) -> list[Crossing]:
    """Where the fastest algorithm changes; between two sizes, where their lines in the log-log picture meet."""
    by_size: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.transport == transport:
            by_size.setdefault(row.nbytes, {})[row.algorithm] = row.median_s
    found = []
    sizes = sorted(by_size)
    for low, high in zip(sizes, sizes[1:]):
        before, after = (min(by_size[size], key=lambda name: by_size[size][name]) for size in (low, high))
        if before != after:
            gap_low = math.log(by_size[low][after] / by_size[low][before])
            gap_high = math.log(by_size[high][before] / by_size[high][after])
            share = gap_low / (gap_low + gap_high) if gap_low + gap_high else 0.5
            found.append(Crossing(low * (high / low) ** share, before, after))
    return found


def predicted_crossings(fits: dict[str, Fit], transport: str, names: Sequence[str], n: int) -> list[Crossing]:
    if transport not in fits or len(names) < 2:
        return []
    best = best_by_size(n, fits[transport].fabric, names)
    return [Crossing(size, before, after) for (_, before), (size, after) in zip(best, best[1:]) if size < 1 << 40]


def report(rows: Sequence[Row], fits: dict[str, Fit], machine: Machine, n: int) -> str:
    """The numbers as text: a table a size, then what they say."""
    parts = []
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        here = [row for row in rows if row.nbytes == nbytes]
        torch_s = here[0].median_s
        lines = [
            [f"{bytes_text(nbytes)}, {n} ranks, {len(here[0].rounds)} rounds"]
            + ["median", "10th..90th percentile", "algbw", "busbw", "torch takes", "model", "off by"]
        ]
        for row in here:
            low, high = row.spread_s
            model = ["", ""]
            if row.predicted_s is not None:
                model = [seconds_text(row.predicted_s), f"{row.predicted_s / row.median_s - 1:+.0%}"]
            algbw = nbytes / row.median_s
            lines.append(
                [row.contender, seconds_text(row.median_s), f"{seconds_text(low)} .. {seconds_text(high)}"]
                + [bandwidth_text(algbw), bandwidth_text(algbw * 2 * (n - 1) / n)]
                + [f"{torch_s / row.median_s:.2f}×", *model]
            )
        if nbytes >= CACHED_BYTES:
            lines.append(["the speed of memory", seconds_text(machine.limit_s(nbytes, n)), *[""] * 6])
        parts.append(table(lines))
    said = [
        f"memory: a rank copies {bandwidth_text(machine.copy_bytes_per_s)} and adds "
        f"{bandwidth_text(1 / machine.add_s_per_byte)} while all ranks do",
        f"other processes took {machine.others:.0%} of the processors"
        + (": TOO MUCH for these times to mean anything but their ratios" if machine.others > BUSY else ""),
    ]
    for transport, found in fits.items():
        fabric = found.fabric
        of = "at each end of a message" if fabric.ranks_per_core else "a step"
        beta = bandwidth_text(1 / fabric.beta_s_per_byte) if fabric.beta_s_per_byte else "no limit"
        said.append(
            f"{transport}: alpha {seconds_text(fabric.alpha_s)} {of}, {beta}; the model is off by "
            f"{found.rms:.0%} (root mean square), at worst {found.worst:+.0%}"
        )
        names = list(dict.fromkeys(row.algorithm for row in rows if row.transport == transport))
        known = [name for name in names if name in ALGORITHM_NAMES]
        for kind, crossings in (
            ("measured", measured_crossings(rows, transport)),
            ("by the model", predicted_crossings(fits, transport, known, n)),
        ):
            text = ", ".join(f"{c.before} to {c.after} at {bytes_text(round(c.nbytes))}" for c in crossings)
            said.append(f"  fastest changes, {kind}: {text or 'nowhere'}")
    return "\n\n".join([*parts, "\n".join(said)])


def save(out: Path, rows: Sequence[Row], fits: dict[str, Fit], machine: Machine, n: int, settings: Settings) -> None:
    """bench.json, bench.csv and bench.png."""
    out.mkdir(parents=True, exist_ok=True)
    transports = list(dict.fromkeys(row.transport for row in rows if row.algorithm))
    names = [name for name in settings.algorithms if name in ALGORITHM_NAMES]
    document = {
        "format": "ddpx-bench",
        "version": 1,
        "settings": asdict(settings),
        "ranks": n,
        "commit": _commit(),
        "hardware": {"cpus": len(os.sched_getaffinity(0)), "processor": _processor(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads_per_rank": torch.get_num_threads(),
        "memory": asdict(machine),
        "rows": [
            {**asdict(row), "median_s": row.median_s, "spread_s": row.spread_s, "busbw": _busbw(row, n)} for row in rows
        ],
        "fits": {
            transport: {
                "alpha_s": found.fabric.alpha_s,
                "beta_s_per_byte": found.fabric.beta_s_per_byte,
                "gamma_s_per_byte": found.fabric.gamma_s_per_byte,
                "rms": found.rms,
                "worst": found.worst,
                "residuals": found.residuals,
            }
            for transport, found in fits.items()
        },
        "crossovers": {
            transport: {
                "measured": [asdict(c) for c in measured_crossings(rows, transport)],
                "predicted": [asdict(c) for c in predicted_crossings(fits, transport, names, n)],
            }
            for transport in transports
        },
    }
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with (out / "bench.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["contender", "transport", "algorithm", "bytes", "round", "repetitions", "seconds", "busbw"])
        for row in rows:
            for turn, seconds in enumerate(row.rounds):
                busbw = row.nbytes / seconds * 2 * (n - 1) / n
                writer.writerow(
                    [row.contender, row.transport, row.algorithm, row.nbytes, turn, row.repetitions]
                    + [f"{seconds:.9f}", f"{busbw:.0f}"]
                )
    draw(out / "bench.png", rows, fits, machine, n)


def _busbw(row: Row, n: int) -> float:
    return row.nbytes / row.median_s * 2 * (n - 1) / n


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#8c6d31",
)  # for the colour-blind
MARKERS = "osD^vP*X"


def draw(path: Path, rows: Sequence[Row], fits: dict[str, Fit], machine: Machine, n: int) -> None:
    """Time against size, both logarithmic, a panel a transport: measured as marks, the model as thin lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    transports = list(dict.fromkeys(row.transport for row in rows if row.algorithm))
    names = list(dict.fromkeys(row.algorithm for row in rows if row.algorithm))
    figure, axes = pyplot.subplots(1, len(transports), figsize=(7 * len(transports), 6), sharey=True, squeeze=False)
    reference = [row for row in rows if row.contender == TORCH]
    for axis, transport in zip(axes[0], transports, strict=True):
        sizes = [row.nbytes for row in reference]
        axis.plot(sizes, [row.median_s for row in reference], color="black", lw=2.2, label="torch all_reduce (gloo)")
        best = []
        for index, name in enumerate(names):
            here = [row for row in rows if row.transport == transport and row.algorithm == name]
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            axis.plot([r.nbytes for r in here], [r.median_s for r in here], ls="", ms=6, label=name, **style)
            if all(row.predicted_s is not None for row in here):
                axis.plot([r.nbytes for r in here], [r.predicted_s for r in here], color=style["color"], lw=0.8)
            best.append([row.median_s for row in here])
        if transport == "shared_memory":
            beyond = [size for size in sizes if size >= CACHED_BYTES]
            axis.plot(
                beyond,
                [machine.limit_s(size, n) for size in beyond],
                color="grey",
                ls=":",
                label="the speed of memory",
            )
        for crossing in measured_crossings(rows, transport):
            axis.axvline(crossing.nbytes, color="grey", lw=0.7, ls="--")
            where = axis.get_xaxis_transform()
            text = f" {crossing.before} → {crossing.after}"
            axis.text(crossing.nbytes, 0.01, text, rotation=90, fontsize=7, va="bottom", ha="right", transform=where)
        fastest = [min(of_size) for of_size in zip(*best, strict=True)]
        ratio = reference[-1].median_s / fastest[-1]
        title = f"{transport}: {ratio:.1f}× torch's speed at {bytes_text(reference[-1].nbytes)}"
        if transport in fits:
            title += f"\nthin lines: one alpha and beta for all, off by {fits[transport].rms:.0%} (rms)"
        axis.set_title(title, fontsize=11)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e3:g}"))
        axis.set_xlabel("buffer of a rank")
        axis.grid(True, which="major", lw=0.3)
    axes[0][0].set_ylabel("milliseconds, median over rounds of the slowest rank")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"All-reduce of {n} ranks on {len(os.sched_getaffinity(0))} cores")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---- The program -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks here (2; not under torchrun)")
    parser.add_argument("--sizes", default=None, metavar="LIST", help=f"({SIZES})")
    parser.add_argument(
        "--algorithms", default="all", metavar="LIST", help=f"or auto; all: {', '.join(ALGORITHM_NAMES)}"
    )
    parser.add_argument("--transports", default="all", metavar="LIST", help=f"all: {', '.join(TRANSPORT_NAMES)}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, metavar="R", help="at most, for each size (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="about, for each size (%(default)s)")
    parser.add_argument("--link", metavar="LINK", help="emulate a network under ours, not torch's: 200us,1GB/s")
    parser.add_argument("--gate", action="store_true", help="measure what is promised; exit 1 when a promise is missed")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="(%(default)s)")


def _settings(args: argparse.Namespace) -> Settings:
    """Settings from arguments; ValueError says what is wrong."""
    sizes = args.sizes
    if sizes is None:
        sizes = gate.SIZES if args.gate else SIZES
    itemsize = DTYPES[args.dtype].itemsize
    parsed = tuple(dict.fromkeys(parse_bytes(size) // itemsize * itemsize for size in sizes.split(",")))
    if min(parsed) < itemsize:
        raise ValueError(f"--sizes {sizes}: a buffer holds at least one element, {itemsize} bytes")
    algorithms = _names("algorithm", args.algorithms, ALGORITHM_NAMES, ("auto", "hierarchical"))
    transports = _names("transport", args.transports, TRANSPORT_NAMES, ("hierarchical",))
    if args.gate:
        algorithms = ("auto",)
    if args.rounds < 1 or args.seconds <= 0:
        raise ValueError("--rounds and --seconds are above zero")
    if args.link:
        Link.parse(args.link)
    return Settings(parsed, algorithms, transports, args.dtype, args.rounds, args.seconds, args.link)


def _names(what: str, text: str, everything: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    names = everything if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in (*everything, *more):
            raise ValueError(f"unknown {what} '{name}'; known: {', '.join((*everything, *more))}")
    return names


def run(args: argparse.Namespace) -> int:
    """Do what the arguments ask, on ranks of our own or on torchrun's; returns the exit code."""
    settings = _settings(args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if args.nproc is not None:
            raise ValueError("--nproc starts ranks, but torchrun has started them already")
        dist.init_process_group("gloo")
        _on_rank(settings, args.out, args.gate)
        rank = dist.get_rank()
        dist.destroy_process_group()
        return _judge(args.out, profiles=False) if args.gate and rank == 0 else 0
    nproc = 2 if args.nproc is None else args.nproc
    if nproc < 1:
        raise ValueError(f"--nproc {nproc}: at least one rank")
    with tempfile.TemporaryDirectory(prefix="ddpx-bench-") as folder:
        context = torch.multiprocessing.spawn(
            _start, args=(nproc, folder, settings, args.out, args.gate), nprocs=nproc, join=False
        )
        try:
            while not context.join():
                pass
        except torch.multiprocessing.ProcessExitedException as error:
            return error.exit_code if error.exit_code > 0 else 1
        except torch.multiprocessing.ProcessRaisedException as error:
            print(f"python -m ddpx bench: {error}")
            return 1
    return _judge(args.out, profiles=True) if args.gate else 0


def _judge(out: Path, profiles: bool) -> int:
    """Print every promise beside its bound; 1 if one is missed."""
    document = json.loads((out / "gate.json").read_text(encoding="utf-8"))
    promises = [gate.Promise(**promise) for promise in document["promises"]]
    unmeasured: list[gate.Unmeasured] = []
    if profiles:
        more, unmeasured = gate.of_profiles(out)
        promises += more
        document = gate.as_document(promises, unmeasured)
        (out / "gate.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text, held = gate.report(promises, unmeasured)
    print(f"\n{text}")
    return 0 if held else 1


def _start(rank: int, world_size: int, folder: str, settings: Settings, out: Path, gated: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10))
    _on_rank(settings, out, gated)
    dist.barrier()
    dist.destroy_process_group()


def _on_rank(settings: Settings, out: Path, gated: bool) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        chosen = f"{', '.join(settings.algorithms)} over {', '.join(settings.transports)}"
        print(f"all-reduce, {n} ranks on {len(os.sched_getaffinity(0))} cores, {settings.dtype}: {chosen}")
        print(
            f"up to {settings.rounds} rounds and {settings.seconds:g} s a size, {torch.get_num_threads()} thread a rank"
        )
        if settings.link:
            print(f"emulated link under ours, not under torch's: {settings.link}")
    rows, machine = measure(settings)
    halves = _measure_halves(settings) if gated else {}
    if rank == 0:
        fits = fit_rows(rows, n, machine)
        print(f"\n{report(rows, fits, machine, n)}")
        save(out, rows, fits, machine, n, settings)
        print(f"\nwritten: {out}/bench.json, bench.csv, bench.png")
        if gated:
            promises = gate.of_all_reduce(rows, machine, n, len(os.sched_getaffinity(0))) + gate.of_halves(halves, n)
            (out / "gate.json").write_text(json.dumps(gate.as_document(promises), indent=1) + "\n", encoding="utf-8")


def _measure_halves(settings: Settings) -> dict[str, list[Row]]:
    """By dtype: all-reduces of as many elements in shared memory. A collective."""
    numel = parse_bytes(gate.HALVES_AT) // 4
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        sizes = (numel * DTYPES[dtype].itemsize,)
        found[dtype] = measure(replace(settings, sizes=sizes, transports=("shared_memory",), dtype=dtype))[0]
    return found
