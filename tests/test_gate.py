"""Every promise stands beside what was measured, and a missed one is found."""

import json
from pathlib import Path

import pytest

from ddpx import bench, gate

MACHINE = bench.Machine(copy_bytes_per_s=25 << 20, add_s_per_byte=1e-10)  # 25 MiB in a second
OURS, MESSAGES = "shared_memory auto", "process_group auto"


def row(contender: str, nbytes: int, seconds: float) -> bench.Row:
    return bench.Row(contender, "", "", nbytes, 1, [seconds])


def test_all_reduce_is_held_against_torch_and_against_memory() -> None:
    rows = [row(bench.TORCH, 1 << 10, 8.0), row(OURS, 1 << 10, 1.0), row(MESSAGES, 1 << 10, 9.0)]
    rows += [row(bench.TORCH, 25 << 20, 6.9), row(OURS, 25 << 20, 1.25)]
    found = gate.of_all_reduce(rows, MACHINE, n=2, cores=2)
    assert [(promise.value, promise.bound, promise.holds) for promise in found] == [
        (8.0, 8.0, True),
        (pytest.approx(5.52), 7.0, False),
        (pytest.approx(8 / 9), 1.0, False),
        (pytest.approx(0.8), 0.75, True),
    ]


def test_many_more_ranks_than_cores_have_to_be_ahead_of_torch() -> None:
    rows = [row(bench.TORCH, 4 << 20, 2.0), row(OURS, 4 << 20, 1.0)]
    assert [promise.bound for promise in gate.of_all_reduce(rows, MACHINE, n=4, cores=2)] == [6.0]
    assert [promise.bound for promise in gate.of_all_reduce(rows, MACHINE, n=8, cores=2)] == [1.0]


def test_halves_may_take_half_as_long_again_as_fp32() -> None:
    times = {"float32": [row(OURS, 100, 2.0)], "bfloat16": [row(OURS, 50, 3.0)], "float16": [row(OURS, 50, 3.2)]}
    assert [promise.holds for promise in gate.of_halves(times, 2)] == [True, False]


def test_the_report_names_what_is_missed_and_what_was_not_measured() -> None:
    kept, missed = gate.Promise("steps", 0.9, 1.0, at_least=False), gate.Promise("sums", 5.5, 7.0)
    text, held = gate.report([kept, missed], [gate.Unmeasured("networks", "needs root")])
    lines = text.splitlines()
    assert not held
    assert "0.90" in lines[1] and "<= 1" in lines[1] and lines[1].endswith("holds")
    assert "5.50" in lines[2] and ">= 7" in lines[2] and lines[2].endswith("MISSED")
    assert lines[3:] == ["not measured: networks: needs root", "1 of 2 promises hold"]
    assert gate.report([kept], [])[1]


def script(folder: Path, name: str, text: str) -> gate.Script:
    (folder / f"{name}.py").write_text(text)
    return gate.Script(name, f"what {name} measures")


def test_scripts_in_profiles_leave_their_promises(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gate, "PROFILES", tmp_path)
    promise = gate.Promise("x", 1.0, 2.0)
    document = json.dumps(gate.as_document([promise], [gate.Unmeasured("y", "no network here")]))
    good = script(tmp_path, "good", f"import sys; open(sys.argv[-1] + '/good.json', 'w').write({document!r})")
    bad = script(tmp_path, "bad", "raise SystemExit('bad: run it as root')")
    silent = script(tmp_path, "silent", "")
    (tmp_path / "bad.json").write_text(document)  # of an earlier run, and not to be taken for this one's
    absent = gate.Script("absent", "what nobody has")
    promises, unmeasured = gate.of_profiles(tmp_path, [good, bad, silent, absent])
    assert promises == [promise]
    assert [missing.why for missing in unmeasured] == [
        "no network here",
        "bad: run it as root",
        "exit code 0 without a word",
        "needs a checkout: there is no profiles/ beside this package",
    ]


def test_every_script_that_the_gate_runs_is_there() -> None:
    assert all((gate.PROFILES / f"{script.name}.py").exists() for script in gate.SCRIPTS)
