"""All-reduce beside Open MPI's and MPICH's on this host, where they are installed. Three minutes with both.

    apt-get install openmpi-bin libopenmpi-dev mpich libmpich-dev       # or what the system calls them
    for m in openmpi mpich; do python -m venv /tmp/$m
        MPICC=$(which mpicc.$m) /tmp/$m/bin/pip install --no-cache-dir --no-binary mpi4py mpi4py numpy; done
    python profiles/mpi.py --openmpi /tmp/openmpi/bin/python --mpich /tmp/mpich/bin/python --out DIR

Each library runs in processes of its own, started anew in every turn (A B C A B C), since ranks that spin in one would
take the processors from the others. In-place Allreduce of float32 in numpy's memory; ours on a bucket as training has
it, and on an ordinary tensor, which is copied in and out. In a turn a size gets some blocks of about 20 ms, timed as
`python -m ddpx bench` times them: after one repetition that brings the ranks together, the mean of a block's
repetitions on the slowest rank. mpirun places ranks as it does by default, told only that they may outnumber the cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # MPI's processes may not have ddpx
    from ddpx.gate import Promise

SIZES = "1KiB,8KiB,64KiB,1MiB,4MiB,25MiB,100MiB"
BLOCK_S, MAX_REPETITIONS = 0.02, 2000
LAUNCHERS = {
    "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"),
    "mpich": ("mpirun.mpich",),
}


# ---- On every rank: nothing here needs torch, which the MPI processes do not have ------------------------------------


def blocks(run: Callable[[], object], slowest: Callable[[float], float], count: int) -> list[float]:
    """Seconds of a repetition on the slowest rank, block by block."""
    run()
    estimate_s = slowest(_time(run, 2))
    repetitions = min(MAX_REPETITIONS, max(1, round(BLOCK_S / estimate_s)))
    return [slowest(_time(run, repetitions)) for _ in range(count)]


def _time(run: Callable[[], object], repetitions: int) -> float:
    run()
    began_s = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - began_s) / repetitions


def on_mpi_rank(sizes: list[int], count: int) -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    n = world.Get_size()
    found: dict[str, Any] = {"version": MPI.Get_library_version().splitlines()[0].strip("\0"), "mpi": {}}
    for nbytes in sizes:
        flat = np.full(nbytes // 4, world.Get_rank() + 1, dtype=np.float32)
        world.Allreduce(MPI.IN_PLACE, flat)
        assert (flat == n * (n + 1) // 2).all()
        flat[:] = 0
        run = partial(world.Allreduce, MPI.IN_PLACE, flat)
        found["mpi"][nbytes] = blocks(run, lambda seconds: world.allreduce(seconds, MPI.MAX), count)
    if world.Get_rank() == 0:
        print(json.dumps(found), flush=True)


def on_rank_of_ours(sizes: list[int], count: int) -> None:
    import torch
    import torch.distributed as dist
    import turns

    import ddpx

    rank, n = turns.join_ranks()
    communicator = ddpx.Communicator(transport="shared_memory")

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    found: dict[str, Any] = {"version": f"torch {torch.__version__}", "ddpx bucket": {}, "ddpx tensor": {}}
    calls = ddpx.Communicator(transport="shared_memory")
    for nbytes in sizes:
        bucket = communicator.empty(nbytes // 4, torch.float32)
        plan = communicator.plan_all_reduce(bucket)
        bucket.fill_(rank + 1)
        plan.run()
        assert bool((bucket == n * (n + 1) // 2).all())
        bucket.zero_()
        found["ddpx bucket"][nbytes] = blocks(plan.run, slowest, count)
        tensor = torch.zeros(nbytes // 4)
        found["ddpx tensor"][nbytes] = blocks(partial(calls.all_reduce, tensor), slowest, count)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    communicator.close()
    calls.close()
    dist.destroy_process_group()


# ---- The program -----------------------------------------------------------------------------------------------------


def launcher(library: str, python: str, ranks: int) -> list[str]:
    if library == "ddpx":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*LAUNCHERS[library], "-n", str(ranks), python]


def missing(library: str, python: str) -> str | None:
    """What this library lacks to run, in words."""
    program = LAUNCHERS[library][0]
    if shutil.which(program) is None:
        return f"{library} is NOT INSTALLED: there is no {program}"
    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{library} is NOT MEASURED: {python} has no mpi4py that works"
    if library not in done.stdout.lower().replace(" ", ""):
        return f"{library} is NOT MEASURED: the mpi4py of {python} is built on {done.stdout.splitlines()[0]}"
    return None


def run(library: str, python: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """One library's processes, once; what rank 0 printed."""
    command = [*launcher(library, python, ranks), __file__, "--worker", library, "--sizes", args.sizes]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if library != "ddpx":
        environment.pop("PYTHONPATH", None)
    command += ["--blocks", str(args.blocks)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def text_of(document: dict[str, Any]) -> str:
    import turns

    from ddpx.units import bytes_text, seconds_text

    parts = []
    for ranks, by_name in document["ranks"].items():
        names = list(by_name)
        libraries = [name for name in names if not name.startswith("ddpx")]
        lines = [[f"{ranks} ranks", *names, *(f"{name} / ddpx bucket" for name in libraries)]]
        for nbytes in by_name[names[0]]:
            medians = {name: statistics.median(by_name[name][nbytes]) for name in names}
            of_turns = document["blocks"]
            row = [bytes_text(int(nbytes)), *(seconds_text(medians[name]) for name in names)]
            for name in libraries:
                ours, theirs = (_by_turn(by_name[which][nbytes], of_turns) for which in ("ddpx bucket", name))
                ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
                row.append(f"{medians[name] / medians['ddpx bucket']:.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
            lines.append(row)
        parts.append(turns.markdown(lines))
    parts.append("Medians; in brackets the least and greatest ratio of a turn's medians.")
    versions = [f"{name}: {version}" for name, version in document["libraries"].items()]
    return "\n\n".join([*parts, "\n".join([*document["left_out"], *versions])])


def promises_of(document: dict[str, Any]) -> "list[Promise]":
    """With a core for each rank: ahead of MPI in large buffers, and close to it in small ones."""
    from ddpx.gate import Promise
    from ddpx.units import bytes_text

    promises = []
    by_name = document["ranks"].get("2", {})
    for library in by_name:
        if library.startswith("ddpx"):
            continue
        for nbytes, values in by_name[library].items():
            ours, theirs = statistics.median(by_name["ddpx bucket"][nbytes]), statistics.median(values)
            what = f"{bytes_text(int(nbytes))}, 2 ranks: {library}'s time over ours"
            if int(nbytes) >= 1 << 20:
                promises.append(Promise(what, theirs / ours, 2.5 if int(nbytes) >= 25 << 20 else 1.0))
            elif int(nbytes) < 64 << 10:
                what = f"{bytes_text(int(nbytes))}, 2 ranks: microseconds more than {library}"
                promises.append(Promise(what, 1e6 * (ours - theirs), 20.0, at_least=False))
    return promises


def _by_turn(values: list[float], blocks_a_turn: int) -> list[float]:
    return [statistics.median(values[at : at + blocks_a_turn]) for at in range(0, len(values), blocks_a_turn)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--openmpi", default="python3", metavar="PYTHON", help="with mpi4py on Open MPI (%(default)s)")
    parser.add_argument("--mpich", default="python3", metavar="PYTHON", help="with mpi4py on MPICH (%(default)s)")
    parser.add_argument("--ranks", default="2,4", help="(%(default)s)")
    parser.add_argument("--sizes", default=SIZES, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=5, help="of a size in a turn (%(default)s)")
    parser.add_argument("--worker", choices=("ddpx", *LAUNCHERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sizes = [_bytes(size) for size in args.sizes.split(",")]
        (on_rank_of_ours if args.worker == "ddpx" else on_mpi_rank)(sizes, args.blocks)
        return
    if args.out is None:
        parser.error("--out says where to write")
    import turns
    from tqdm import tqdm

    from ddpx.gate import Unmeasured

    left_out = [why for library in LAUNCHERS if (why := missing(library, getattr(args, library)))]
    for why in left_out:
        print(why, file=sys.stderr, flush=True)
    libraries = ["ddpx", *(library for library in LAUNCHERS if not missing(library, getattr(args, library)))]
    document: dict[str, Any] = {
        **turns.where(),
        "blocks": args.blocks,
        "left_out": left_out,
        "libraries": {},
        "ranks": {},
    }
    todo = [(ranks, library) for ranks in args.ranks.split(",") for _ in range(args.turns) for library in libraries]
    for ranks, library in tqdm(todo, disable=None, leave=False):
        found = run(library, getattr(args, library, ""), int(ranks), args)
        document["libraries"][library] = found.pop("version")
        for name, by_size in found.items():
            for nbytes, values in by_size.items():
                name_of = library if name == "mpi" else name
                document["ranks"].setdefault(ranks, {}).setdefault(name_of, {}).setdefault(nbytes, []).extend(values)
    unmeasured = [Unmeasured("all-reduce beside MPI", why) for why in left_out]
    turns.write(args.out, "mpi", document, text_of(document), promises_of(document), unmeasured)


def _bytes(text: str) -> int:
    """1KiB, 25MiB; as ddpx.units reads them, which the MPI processes may not have."""
    number, unit = text[:-3], text[-3:]
    return int(number) << {"KiB": 10, "MiB": 20}[unit]


if __name__ == "__main__":
    main()
