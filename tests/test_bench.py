"""The bench measures right sums, and says what its numbers say."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddpx import bench
from ddpx.__main__ import main
from ddpx.cost import Fabric, predict

SETTINGS = bench.Settings(
    sizes=(4, 4096), algorithms=("ring", "auto"), transports=bench.TRANSPORT_NAMES, dtype="float32", rounds=3,
    seconds=0.1, link=None,
)  # fmt: skip
MACHINE = bench.Machine(copy_bytes_per_s=10e9, add_s_per_byte=1e-10)


def row(contender: str, nbytes: int, *seconds: float) -> bench.Row:
    transport, _, algorithm = contender.partition(" ")
    if contender == bench.TORCH:
        transport, algorithm = "gloo", ""
    return bench.Row(contender, transport, algorithm, nbytes, 1, list(seconds))


def measured(rank: int, n: int) -> tuple[list[bench.Row], bench.Machine]:
    return bench.measure(SETTINGS)


def test_every_contender_is_measured_at_every_size_in_turns(ranks):
    first, second = ranks(2).run(measured)
    assert first == second  # the slowest rank's times, known to all
    rows, machine = first
    names = [bench.TORCH, *(f"{t} {a}" for t in bench.TRANSPORT_NAMES for a in ("ring", "auto"))]
    assert [(r.contender, r.nbytes) for r in rows] == [(name, size) for size in SETTINGS.sizes for name in names]
    assert all(len(r.rounds) == 3 and min(r.rounds) > 0 for r in rows)
    assert machine.copy_bytes_per_s > 0


@pytest.mark.processes
def test_it_starts_its_own_ranks_and_leaves_text_json_csv_and_a_picture(tmp_path: Path):
    command = [sys.executable, "-m", "ddpx", "bench", "--nproc", "2", "--sizes", "1KiB,64KiB", "--out", str(tmp_path)]
    command += ["--algorithms", "ring,direct", "--transports", "shared_memory", "--seconds", "0.1", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 KiB, 2 ranks, 3 rounds" in done.stdout and "shared_memory direct" in done.stdout
    assert "fastest changes, measured" in done.stdout and "alpha" in done.stdout
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["ranks"] == 2 and len(document["rows"]) == 6
    assert set(document["fits"]["shared_memory"]) >= {"alpha_s", "beta_s_per_byte", "rms", "residuals"}
    with (tmp_path / "bench.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6 * 3
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_it_joins_the_ranks_that_torchrun_started(tmp_path: Path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["bench", "--nproc", "2"])
    assert "torchrun has started them already" in capsys.readouterr().err
    code = main(["bench", "--gate", "--sizes", "1KiB", "--seconds", "0.1", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "1 KiB, 1 ranks: torch's time over shared_memory auto" in out and "of float32" in out
    assert code == (1 if "MISSED" in out else 0)


@pytest.mark.parametrize("transport", bench.TRANSPORT_NAMES)
def test_the_fit_finds_the_fabric_that_made_the_numbers_and_predicts_them(transport):
    crowd = 4 / len(os.sched_getaffinity(0)) if transport == "process_group" else 0.0
    fabric = Fabric(50e-6, 1 / 2e9, MACHINE.add_s_per_byte, concurrent=transport != "sockets", ranks_per_core=crowd)
    names, sizes = ("ring", "tree", "direct", "doubling"), (1 << 10, 1 << 16, 1 << 22)
    rows = [
        row(f"{transport} {name}", size, predict("all_reduce", name, 4, size, fabric).total_s)
        for size in sizes
        for name in names
    ]
    found = bench.fit_rows(rows, 4, MACHINE)[transport]
    assert found.fabric.alpha_s == pytest.approx(50e-6) and found.fabric.beta_s_per_byte == pytest.approx(1 / 2e9)
    assert all(r.predicted_s == pytest.approx(r.median_s) for r in rows)
    (crossing,) = bench.predicted_crossings({transport: found}, transport, ("ring", "tree"), 4)
    assert (crossing.before, crossing.after) == ("tree", "ring")


def test_crossings_lie_where_the_lines_of_the_picture_meet():
    rows = [row("x tree", 1 << 10, 1.0), row("x ring", 1 << 10, 4.0)]
    rows += [row("x tree", 1 << 14, 4.0), row("x ring", 1 << 14, 1.0)]
    (crossing,) = bench.measured_crossings(rows, "x")
    assert (crossing.before, crossing.after, crossing.nbytes) == ("tree", "ring", pytest.approx(1 << 12))
    assert bench.measured_crossings(rows[:2], "x") == []


def test_medians_spread_and_bandwidths():
    one = row("shared_memory ring", 1000, *[float(second) for second in range(11)])
    assert one.median_s == 5 and one.spread_s == (1, 9)
    text = bench.report([row(bench.TORCH, 4 << 20, 8e-3), row("x ring", 4 << 20, 2e-3)], {}, MACHINE, 4)
    assert "4.00×" in text and "2.1 GB/s" in text and "3.15 GB/s" in text  # algbw, and 1.5 times that


def test_the_limit_counts_every_byte_that_must_be_read_or_written():
    # Whatever the number of ranks: each reads n slices of 1/n and writes n, and a copy does both at 10 GB/s.
    assert MACHINE.limit_s(10**9, 2) == MACHINE.limit_s(10**9, 4) == pytest.approx(0.1)
    assert MACHINE.limit_s(10**9, 1) == 0
