"""What we promise about speed, each promise beside what was measured: `python -m ddpx bench --gate`.

All-reduce is measured by the bench itself. Training steps, the wrapper's own cost, memory and slow networks are
measured by the scripts in profiles/, which stand in a checkout and write their promises into the JSON they leave.
What can't be measured here (no checkout, not root, no MPI) is listed with the reason, and counts neither way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpx.units import bytes_text, parse_bytes, table

if TYPE_CHECKING:
    from ddpx.bench import Machine, Row

PROFILES = Path(__file__).resolve().parents[1] / "profiles"
PROFILE_S = 900.0


@dataclass(frozen=True, slots=True)
class Promise:
    """A measured ratio and what it must not fall below, or with `at_least` False must not exceed."""

    what: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def cells(self) -> list[str]:
        sign = ">=" if self.at_least else "<="
        return [self.what, f"{self.value:.2f}", f"{sign} {self.bound:g}", "holds" if self.holds else "MISSED"]


@dataclass(frozen=True, slots=True)
class Unmeasured:
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Script:
    """A script in profiles/ that leaves `name`.json in the folder it is given."""

    name: str
    what: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0  # started by torchrun; 0: it starts its own


SCRIPTS = (
    Script("wrapper_cost", "the wrapper's own cost", ("--seconds", "10"), ranks=2),
    Script("configurations", "training steps", ("--seconds", "6", "--rounds", "20"), ranks=2),
    Script("memory", "peak memory", ("--models", "gpt:small", "--turns", "1")),
    Script("slow_network", "networks of 1 and 4 Gbit/s, and hosts of two ranks", ("--seconds", "10")),
    Script("mpi", "Open MPI and MPICH", ("--turns", "2")),
)

# Torch's time over ours, by size: in shared memory, and by messages.
SHARED = {"1KiB": 8.0, "8KiB": 8.0, "64KiB": 8.0, "1MiB": 6.0, "4MiB": 6.0, "25MiB": 7.0, "100MiB": 7.0}
MESSAGES = {"1KiB": 1.0, "8KiB": 1.0, "64KiB": 1.0, "1MiB": 0.9, "4MiB": 0.9, "25MiB": 0.9, "100MiB": 0.9}
BOUNDS = {"shared_memory auto": SHARED, "sockets auto": MESSAGES, "process_group auto": MESSAGES}
LIMIT_AT, LIMIT = "25MiB", 0.75  # the share of the memory's speed to reach with two ranks
HALVES_AT, HALVES = "25MiB", 1.5  # the most that bf16 and fp16 take, as a multiple of fp32's time for as many elements
SIZES = ",".join(SHARED)


def of_all_reduce(rows: Sequence[Row], machine: Machine, n: int, cores: int) -> list[Promise]:
    """Promises about fp32 all-reduce, for the sizes and contenders that were measured."""
    promises = []
    medians = {(row.contender, row.nbytes): row.median_s for row in rows}
    for contender, bounds in BOUNDS.items():
        for size, bound in bounds.items():
            nbytes = parse_bytes(size)
            ours, torchs = medians.get((contender, nbytes)), medians.get(("torch all_reduce", nbytes))
            if ours and torchs:
                least = 1.0 if n > 2 * cores else bound
                promises.append(
                    Promise(f"{bytes_text(nbytes)}, {n} ranks: torch's time over {contender}", torchs / ours, least)
                )
    reached = medians.get(("shared_memory auto", parse_bytes(LIMIT_AT)))
    if n == 2 and reached:
        share = machine.limit_s(parse_bytes(LIMIT_AT), n) / reached
        promises.append(Promise(f"{LIMIT_AT}, 2 ranks: share of the memory's speed", share, LIMIT))
    return promises


def of_halves(by_dtype: Mapping[str, Sequence[Row]], n: int) -> list[Promise]:
    """Promises about the time of halves, each dtype's rows being of as many elements as fp32's."""
    times = {dtype: {row.contender: row.median_s for row in rows} for dtype, rows in by_dtype.items()}
    ours = "shared_memory auto"
    return [
        Promise(
            f"{HALVES_AT} of float32, {n} ranks: {dtype}'s time over it",
            took[ours] / times["float32"][ours],
            HALVES,
            False,
        )
        for dtype, took in times.items()
        if dtype != "float32"
    ]


def of_profiles(out: Path, scripts: Iterable[Script] = SCRIPTS) -> tuple[list[Promise], list[Unmeasured]]:
    """Run the scripts in profiles/, one after the other, and read the promises they leave under `out`."""
    promises: list[Promise] = []
    unmeasured: list[Unmeasured] = []
    for script in scripts:
        path = PROFILES / f"{script.name}.py"
        if not path.exists():
            unmeasured.append(Unmeasured(script.what, "needs a checkout: there is no profiles/ beside this package"))
            continue
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(script.ranks)]
        command = [sys.executable, *(launcher if script.ranks else []), str(path), *script.arguments]
        found, why = _document(script, [*command, "--out", str(out)], out)
        if found is None:
            unmeasured.append(Unmeasured(script.what, why))
        else:
            promises += [Promise(**promise) for promise in found["promises"]]
            unmeasured += [Unmeasured(**missing) for missing in found.get("unmeasured", [])]
    return promises, unmeasured


def _document(script: Script, command: Sequence[str], out: Path) -> tuple[dict[str, Any] | None, str]:
    """What the script left, or None and why it left nothing."""
    print(f"measuring {script.what}: {' '.join(command[1:])}", flush=True)
    path = out / f"{script.name}.json"
    path.unlink(missing_ok=True)  # one of an earlier gate
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROFILE_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"had not ended after {PROFILE_S:.0f} s"
    if done.returncode or not path.exists():
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return None, said[-1] if said else f"exit code {done.returncode} without a word"
    return json.loads(path.read_text(encoding="utf-8")), ""


def report(promises: Sequence[Promise], unmeasured: Sequence[Unmeasured]) -> tuple[str, bool]:
    """Each promise beside its bound, and whether all hold."""
    text = table([["promised", "measured", "bound", ""], *(promise.cells() for promise in promises)])
    for missing in unmeasured:
        text += f"\nnot measured: {missing.what}: {missing.why}"
    missed = sum(not promise.holds for promise in promises)
    text += f"\n{len(promises) - missed} of {len(promises)} promises hold"
    return text, not missed


def as_document(promises: Sequence[Promise], unmeasured: Sequence[Unmeasured] = ()) -> dict[str, Any]:
    """Promises as a profile's JSON holds them."""
    return {"promises": [asdict(p) for p in promises], "unmeasured": [asdict(u) for u in unmeasured]}
