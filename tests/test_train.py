"""The program: what is wrong is said in a line before anything starts, and one run leaves all it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from ddpx import profile

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--model", "mlp", "--batch", "1", "--sequence", "16", "--warmup", "1"]


# ---- Arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--batch", "-3"], "--batch must be at least 1, not -3"),
        (["--lr", "0"], "--lr must be above zero, not 0.0"),
        (["--lr", "nan"], "--lr must be above zero, not nan"),
        (["--bucket-mb", "-1"], "--bucket-mb must be above zero, not -1.0"),
        (["--batch", "many"], "argument --batch: invalid int value: 'many'"),
        (["--modes", "naive,fast"], "--modes: no mode is called 'fast'; there are local, torch, naive"),
        (["--modes", ""], "--modes: no mode is called ''"),
        (["--model", "vgg"], "argument --model: invalid choice: 'vgg'"),
        (["--size", "huge"], "gpt has no size 'huge'; its sizes are nano, small, medium"),
        (["--algorithm", "magic"], "argument --algorithm: invalid choice: 'magic'"),
        (["--transport", "pigeon"], "argument --transport: invalid choice: 'pigeon'"),
        (["--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
        (["--device", "cuda"], "--device cuda: local rank 0 has no GPU"),
        (["--data", "no/such/file"], "there is no file or folder no/such/file"),
        (["--data", "{empty}"], "is empty"),
        (["--data", "{short}", "--sequence", "64"], "a sequence of 64 needs 65"),
        (["--model", "resnet", "--data", "{short}"], "--data: resnet trains on synthetic images"),
        (["--sequence", "99999999"], "Give more data or a shorter sequence"),
        (["--out", "{short}"], "is a file"),
        (["--out", "{short}/below"], "is a file"),
        (["--log", "{folder}"], "is a folder"),
        (["--wat"], "unrecognized arguments: --wat"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"a few words")
    places = {name: str(tmp_path / name) for name in ("empty", "short")} | {"folder": str(tmp_path)}
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as left:
        train.parse([argument.format(**places) for argument in arguments])
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("train.py: error: ") and said in lines[0]


@pytest.mark.parametrize("link", ["fast", "1ms", "1ms,0GB/s", "-1us,1GB/s", "1us,1GB"])
def test_a_link_that_cannot_be_read_is_refused(
    link: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        train.parse([f"--link={link}"])
    assert left.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_every_rank_leaves_and_rank_0_alone_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        train.parse(["--steps", "0"])
    assert left.value.code == 2 and capsys.readouterr().err == ""


def test_default_run_emulates_ten_gigabits_between_ranks_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args, corpus = train.parse([])
    assert args.link.seconds(1_250_000) == pytest.approx(50e-6 + 1e-3)
    assert corpus is not None and "standard library" in corpus.name
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # several hosts have a network of their own
    assert train.parse([])[0].link is None


# ---- Runs


def launch(*arguments: str, ranks: int = 2, code: int = 0) -> str:
    """Run train.py on some ranks; returns what it printed."""
    several = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    result = subprocess.run(
        [sys.executable, *several, "train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """One run on two ranks with everything on: its folder, what it printed, and its report."""
    out = tmp_path_factory.mktemp("train") / "out"
    (out / "naive").mkdir(parents=True)
    (out / "naive" / "host_7.1.pt.trace.json.gz").write_bytes(b"of an earlier run")
    text = launch(*SMALL, "--steps", "3", "--profile", "--step-log", str(out / "steps.jsonl"), "--out", str(out))
    return out, text, json.loads((out / "report.json").read_text())


MODES = ["local", "torch", "naive", "bucketed", "overlapped", "naive", "bucketed", "overlapped"]


@pytest.mark.processes
@pytest.mark.slow
class TestWholeRun:
    def test_every_mode_takes_the_same_steps_with_the_same_losses(self, whole) -> None:
        _, text, report = whole
        assert [run["mode"] for run in report["runs"]] == MODES
        assert [run["emulated"] for run in report["runs"]] == [False] * 5 + [True] * 3
        assert all(len(run["losses"]) == 4 and len(run["steps_s"]) == 3 for run in report["runs"])
        assert report["losses_agree"]["worst_relative_difference"] == 0  # a sum of two has no order
        assert "Losses of torch, naive, bucketed, overlapped are the same to the last bit at all 4 steps." in text

    def test_validation_loss_is_that_of_the_same_weights(self, whole) -> None:
        losses = [run["validation_loss"] for run in whole[2]["runs"] if run["mode"] != "local"]
        assert len(set(losses)) == 1 and 0 < losses[0] < 10

    def test_settings_come_first_and_the_finding_last(self, whole) -> None:
        lines = [line for line in whole[1].splitlines() if not re.match(r"[WE]\d{4} |\*{5}", line)]
        assert lines[0].startswith("ranks    2 on cpu")
        assert any("over shared memory, buckets of 4 MiB" in line for line in lines[:9])
        assert whole[2]["finding"] in whole[1]

    def test_table_has_each_mode_on_its_network(self, whole) -> None:
        table = whole[1].split("step ms")[1]
        positions = [table.index(label) for label in ("no communication", "this machine (", "emulated network (50us,")]
        assert positions == sorted(positions)
        assert table.count("  overlapped ") == 2 and table.count("torch is left out here") == 1

    def test_a_line_a_step_and_a_json_line_a_step_and_mode(self, whole) -> None:
        out, text, report = whole
        assert len(re.findall(r"^step \d+  loss \d", text, re.MULTILINE)) == 4
        lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
        assert [(line["step"], line["mode"]) for line in lines] == [(step, mode) for step in range(4) for mode in MODES]
        last = lines[-1]
        assert last["seconds"] == report["runs"][-1]["steps_s"][-1]
        assert len(last["ranks"]) == 2 and last["ranks"][0]["buckets"][0]["ended_s"] > 0

    def test_numbers_are_in_their_bounds(self, whole) -> None:
        for run in whole[2]["runs"]:
            if run["mode"] in ("naive", "bucketed"):
                assert run["overlap"] == 0 and run["exposed_s"] >= run["communication_s"] > 0
            if run["mode"] == "overlapped":
                assert 0 <= run["overlap"] <= 1
            assert 0 < run["mfu"] < 2
        assert whole[2]["peak_source"] == "measured-gemm"

    def test_emulated_network_takes_at_least_its_time(self, whole) -> None:
        report = whole[2]
        nbytes = sum(bucket["bytes"] for bucket in report["runs"][6]["buckets"])
        assert report["runs"][6]["communication_s"] >= nbytes / 1.25e9

    def test_picture_and_traces_are_written(self, whole) -> None:
        out, _, _ = whole
        assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
        folders = ["local", "torch", "naive", "bucketed", "overlapped", "naive-emulated", "overlapped-emulated"]
        for name in folders:
            ranks = sorted(path.name.split(".")[0] for path in (out / name).glob(profile.PATTERN))
            assert ranks == ["host_0", "host_1"], name  # and none of the earlier run
            assert (out / f"merged_{name}.perfetto.json.gz").exists()


@pytest.mark.processes
@pytest.mark.slow
def test_accumulation_bf16_tree_and_messages_train_like_torch(tmp_path: Path) -> None:
    options = ["--accumulate", "2", "--dtype", "bf16", "--algorithm", "tree", "--transport", "process_group"]
    text = launch(
        *SMALL, "--steps", "2", *options, "--modes", "torch,naive,overlapped", "--link", "none", "--out", str(tmp_path)
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert [run["algorithm"] for run in report["runs"]] == ["", "tree", "tree"]
    assert report["losses_agree"]["worst_relative_difference"] == 0
    assert "tree over process group" in text


@pytest.mark.processes
@pytest.mark.slow
def test_one_process_trains_without_a_launcher(tmp_path: Path) -> None:
    text = launch(*SMALL, "--steps", "2", "--out", str(tmp_path), ranks=1)
    assert "One process has nobody to communicate with" in text
    assert re.search(r"^  overlapped .* -  +-  +-  +-$", text, re.MULTILINE)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [run["mode"] for run in report["runs"]] == MODES[:5]
    losses = [run["losses"] for run in report["runs"]]
    assert all(loss == losses[0] for loss in losses)


@pytest.mark.processes
@pytest.mark.slow
def test_images_train_and_a_single_mode_prints_its_communication(tmp_path: Path) -> None:
    arguments = ["--model", "resnet", "--batch", "2", "--steps", "2", "--warmup", "1"]
    text = launch(*arguments, "--modes", "overlapped", "--link", "none", "--out", str(tmp_path))
    assert re.search(r"^step 2  loss \d\.\d+  [\d.]+ ms  exposed [\d.]+ ms  overlap [\d.]+$", text, re.MULTILINE)
    assert "images/s" in text
