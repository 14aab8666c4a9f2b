"""Traces show ddpx's communication as what it is, and open in the tools that people have."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpx
from ddpx import profile
from ddpx.trace.analyse import analyse_run

BUCKET_MB = 0.25
LINK, ALPHA_S = "2ms,1GB/s", 2e-3
CLOCKS_S = 20e-6  # by which the profiler's clock may part from perf_counter over the length of a slice
MODES = ("naive", "bucketed", "overlapped")
pytestmark = pytest.mark.processes


class Model(nn.Module):
    """Six layers of 256 KiB and their biases; slow enough forward and backward to hide something under."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


PARAMETERS = 6 * (256 * 256 + 256) + 2 * 256


def record_mode(rank: int, world_size: int, folder: str, mode: str) -> dict[str, Any]:
    """Trace one mode on this rank; returns what the live statistics said, and whether the annotations went away."""
    for _ in range(rank):  # ranks count their backward operators apart
        torch.ones(1, requires_grad=True).exp()
    torch.manual_seed(0)
    model = ddpx.DDPX(Model(), mode=mode, bucket_cap_mb=BUCKET_MB, link=LINK)
    x = torch.randn(2000, 256)
    live = []

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()
        stats = model.stats()
        assert stats is not None
        buckets_s = [bucket.ended_s - bucket.started_s for bucket in stats.buckets]
        live.append({"exposed_s": stats.exposed_s, "buckets_s": buckets_s})

    step()
    before = (model.reducer.communicator, [bucket.plan for bucket in model.reducer.buckets])
    with profile.record(Path(folder), rank, model) as end_of_step:
        for _ in range(profile.STEPS):
            step()
            end_of_step()
    after = (model.reducer.communicator, [bucket.plan for bucket in model.reducer.buckets])
    step()
    return {"live": live[2:-1], "restored": before == after, "buckets": len(before[1])}


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """By mode: the folder with both ranks' traces, and what each rank said."""
    folders = {mode: tmp_path_factory.mktemp("traces") / mode for mode in MODES}
    return {mode: (folder, ranks(2).run(record_mode, str(folder), mode)) for mode, folder in folders.items()}


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def traces_of(folder: Path) -> list[Path]:
    return sorted(folder.glob(profile.PATTERN))


@pytest.mark.parametrize("mode", MODES)
def test_each_bucket_is_one_collective_with_its_number_and_bytes(recorded, mode: str) -> None:
    folder, said = recorded[mode]
    for path in traces_of(folder):
        slices = [e for e in events_of(path) if e.get("ph") == "X" and e["name"] == "gloo:all_reduce"]
        counts = Counter(event["args"]["ddpx_bucket"] for event in slices)
        assert counts == dict.fromkeys(range(said[0]["buckets"]), profile.ACTIVE_STEPS)
        step_bytes = sum(event["args"]["bytes"] for event in slices) / profile.ACTIVE_STEPS
        assert 4 * PARAMETERS <= step_bytes <= 4 * PARAMETERS + 64 * 14  # parameters start on cache lines
        assert all(len(event["args"]["Input Dims"]) == 1 for event in slices)


def test_communication_stands_on_a_thread_of_its_own_without_inner_operators(recorded) -> None:
    events = events_of(traces_of(recorded["overlapped"][0])[0])
    names = {e["args"]["name"]: e["tid"] for e in events if e.get("ph") == "M" and e["name"] == "thread_name"}
    comm, compute = names["ddpx comm"], names["ddpx compute"]
    on_comm = {event["name"] for event in events if event.get("ph") == "X" and event["tid"] == comm}
    assert on_comm == {"gloo:all_reduce", "gloo:broadcast"}
    on_compute = {event["name"] for event in events if event.get("ph") == "X" and event["tid"] == compute}
    assert {"ddpx:launch", "ddpx:wait", "aten::addmm"} <= on_compute
    assert {"name": "rank 0"} in [e["args"] for e in events if e.get("name") == "process_name"]


@pytest.mark.parametrize("mode", MODES)
def test_arrows_lead_from_launch_to_collective_to_wait(recorded, mode: str) -> None:
    folder, said = recorded[mode]
    events = events_of(traces_of(folder)[1])
    arrows = [event for event in events if event.get("cat") == "ddpx" and event["ph"] in "sf"]
    assert len(arrows) == 2 * 2 * said[0]["buckets"] * profile.ACTIVE_STEPS
    slices = [e for e in events if e.get("ph") == "X" and e["name"] in ("ddpx:launch", "ddpx:wait", "gloo:all_reduce")]

    def under(end: dict[str, Any]) -> dict[str, Any]:
        (found,) = [
            e for e in slices if e["tid"] == end["tid"] and e["ts"] - 1e-3 <= end["ts"] <= e["ts"] + e["dur"] + 1e-3
        ]
        return found

    by_id: dict[int, dict[str, dict[str, Any]]] = {}
    for end in arrows:
        by_id.setdefault(end["id"], {})[end["ph"]] = under(end)
    kinds = Counter((ends["s"]["name"], ends["f"]["name"]) for ends in by_id.values())
    each = said[0]["buckets"] * profile.ACTIVE_STEPS
    assert kinds == {("ddpx:launch", "gloo:all_reduce"): each, ("gloo:all_reduce", "ddpx:wait"): each}
    assert all(ends["s"]["args"]["ddpx_bucket"] == ends["f"]["args"]["ddpx_bucket"] for ends in by_id.values())


def test_counter_of_buckets_in_flight_begins_and_ends_at_none(recorded) -> None:
    for mode, most in (("naive", 1), ("bucketed", recorded["bucketed"][1][0]["buckets"])):
        events = events_of(traces_of(recorded[mode][0])[0])
        counts = [event["args"]["buckets"] for event in events if event["ph"] == "C"]
        assert (min(counts), max(counts), counts[-1]) == (0, most, 0)


@pytest.mark.parametrize("mode", MODES)
def test_derived_row_adds_up_to_the_communication(recorded, mode: str) -> None:
    events = events_of(traces_of(recorded[mode][0])[0])
    us = Counter()
    for event in events:
        if event.get("ph") == "X" and event["name"] in ("comm hidden", "comm EXPOSED", "gloo:all_reduce"):
            us[event["name"]] += event["dur"]
        elif event.get("name") == "gloo:broadcast":
            us["gloo:all_reduce"] += event["dur"]
    assert us["comm hidden"] + us["comm EXPOSED"] == pytest.approx(us["gloo:all_reduce"], abs=1)
    assert (us["comm hidden"] > 0) == (mode == "overlapped")


@pytest.mark.parametrize("mode", MODES)
def test_live_exposed_time_agrees_with_the_trace(recorded, mode: str) -> None:
    """As far as it must: a thread that loses the processor between a clock and a slice's edge parts the two figures."""
    folder, said = recorded[mode]
    run = analyse_run(mode, traces_of(folder))
    for path, rank, live_steps in zip(traces_of(folder), run.ranks, (of["live"] for of in said), strict=True):
        slices = sorted((e for e in events_of(path) if e.get("ph") == "X"), key=lambda e: e["ts"])
        windows = [e for e in slices if e["name"].startswith("ProfilerStep#")]
        for window, step, live in zip(windows, rank.steps, live_steps, strict=True):
            inside = [e for e in slices if window["ts"] <= e["ts"] < window["ts"] + window["dur"]]
            buckets = [e for e in inside if e["name"] == "gloo:all_reduce"]
            for bucket, live_s in zip(buckets, live["buckets_s"], strict=True):
                assert ALPHA_S - CLOCKS_S <= bucket["dur"] * 1e-6 <= live_s + CLOCKS_S
            if mode != "overlapped":  # all of it, in both
                shared = [e for e in inside if e["name"] == "gloo:broadcast"]
                traced_us = sum(e["dur"] for e in [*buckets, *shared])
                assert step.split.exposed * 1e-3 == pytest.approx(traced_us, abs=1)
                assert live["exposed_s"] == pytest.approx(sum(live["buckets_s"]))
            # When the first wait begins, backward has ended; whatever communication comes after that is exposed.
            ended = min(e["ts"] for e in inside if e["name"] == "ddpx:wait" and "ddpx_bucket" in e["args"])
            after_s = 1e-6 * sum(max(0.0, e["ts"] + e["dur"] - max(e["ts"], ended)) for e in buckets)
            assert after_s <= step.split.exposed * 1e-9 + CLOCKS_S
            assert after_s <= live["exposed_s"] + len(buckets) * CLOCKS_S


def test_annotations_end_with_the_recording(recorded) -> None:
    assert all(said["restored"] for _, of_ranks in recorded.values() for said in of_ranks)


def test_merged_file_has_all_ranks_apart_and_a_name_that_tensorboard_ignores(recorded, tmp_path: Path) -> None:
    folder, _ = recorded["overlapped"]
    assert profile.merge(folder, tmp_path / "merged.perfetto.json.gz") == 2
    merged = events_of(tmp_path / "merged.perfetto.json.gz")
    steps = Counter(event["pid"] for event in merged if event["name"].startswith("ProfilerStep#"))
    assert sorted(steps.values()) == [profile.ACTIVE_STEPS] * 2
    ids = [{e["id"] for e in events_of(path) if e.get("cat") == "ddpx" and "id" in e} for path in traces_of(folder)]
    both = {event["id"] for event in merged if event.get("cat") == "ddpx" and "id" in event}
    assert len(both) == len(ids[0]) + len(ids[1])
    assert not list(tmp_path.glob("*.pt.trace.json*"))


def test_torch_accepts_its_traces(recorded, tmp_path: Path) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="this torch has no trace validator")
    for mode, (folder, _) in recorded.items():
        profile.merge(folder, tmp_path / f"{mode}.json.gz")
        for path in (*traces_of(folder), tmp_path / f"{mode}.json.gz"):
            passed, violations = validator.validate_trace(str(path))
            assert passed, violations
            assert all("name" in event and ("cat" in event or event["ph"] != "X") for event in events_of(path))


PLUGIN = """
import json, os, sys
os.environ["TORCH_PROFILER_START_METHOD"] = "fork"
from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader
run = RunLoader("run", sys.argv[1], io.Cache()).load()
views = [view.display_name for profile in run.profiles.values() for view in profile.views]
whole = next(profile for (worker, _), profile in run.profiles.items() if worker == "All")
print(json.dumps({"views": views, "overlap": whole.steps_to_overlap["data"], "comm": whole.comm_ops["data"]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tensorboard_shows_the_distributed_view_and_no_false_overlap(recorded, mode: str) -> None:
    pytest.importorskip("torch_tb_profiler", reason="needs the viewer extra")
    folder, said = recorded[mode]
    command = [sys.executable, "-W", "ignore", "-c", PLUGIN, str(folder)]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert "Distributed" in shown["views"]
    assert set(shown["overlap"]) == {"all", "1", "2", "3"}  # no communication outside of a step
    overlaps = [overlapped for step in shown["overlap"].values() for _, overlapped, _, _ in step.values()]
    assert any(overlap > 0 for overlap in overlaps) == (mode == "overlapped")  # on a busy machine not in every step
    for table in shown["comm"].values():
        ((name, calls, nbytes, *_),) = [row for row in table["rows"] if row[0] == "gloo:all_reduce"]
        assert (name, calls) == ("gloo:all_reduce", said[0]["buckets"] * profile.ACTIVE_STEPS)
        assert nbytes >= 4 * PARAMETERS * profile.ACTIVE_STEPS
