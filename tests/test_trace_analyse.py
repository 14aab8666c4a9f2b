"""Where a step's time goes: against an oracle that paints microseconds, and on traces made to have one answer."""

import dataclasses
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import (
    COMM,
    MAIN,
    all_reduce,
    event,
    kernel,
    launch,
    note,
    op,
    step,
    thread_name,
    write,
)

from ddpx.trace import lanes
from ddpx.trace import rank as one_rank
from ddpx.trace.analyse import analyse_run, compare
from ddpx.trace.read import TraceError
from ddpx.trace.result import METRICS, bus_factor

SAMPLE = Path(__file__).parents[2] / "shared" / "data" / "a100_nccl_rank0.json.gz"


def run_of(tmp_path, *ranks, **options):
    """Analyse one run from the events of each of its ranks."""
    world_size = options.pop("world_size", len(ranks))
    backend = options.pop("backend", "gloo")
    paths = [
        write(tmp_path / f"rank{i}.json", events, i, world_size, backend) for i, events in enumerate(ranks) if events
    ]
    return analyse_run("run", paths, **options)


def parts(step_report):
    """(compute only, overlapped, exposed, gap) in microseconds."""
    return tuple(ns / 1000 for ns in dataclasses.astuple(step_report.split))


def painted(some):
    return {t for start, end in some for t in range(start, end)}


span = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
spans = st.lists(span, max_size=10)


@settings(max_examples=150, deadline=None)
@given(
    ops=spans, helper=spans, on_comm_thread=spans, waits=st.lists(span, max_size=3), comm=spans,
    own_comm=st.lists(span, max_size=2), edges=st.lists(st.integers(0, 70), min_size=2, max_size=6, unique=True),
    small=st.booleans(), order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_cpu_steps_split_as_painting_every_microsecond_says(
    tmp_path_factory, ops, helper, on_comm_thread, waits, comm, own_comm, edges, small, order
):
    edges = sorted(edges)
    steps = list(zip(edges[::2], edges[1::2], strict=False))
    if not steps:
        return
    events = [op(*one, tid=MAIN) for one in ops] + [op(*one, tid=300) for one in helper]
    events += [op(*one, tid=COMM) for one in on_comm_thread]
    events += [note(*one, "ddpx:wait", ddpx_bucket=0) for one in waits]
    events += [all_reduce(*one) for one in comm] + [all_reduce(*one, tid=MAIN) for one in own_comm]
    events += [step(i, *one) for i, one in enumerate(steps)] + [thread_name(COMM, "ddpx comm")]
    order.shuffle(events)
    path = write(tmp_path_factory.mktemp("paint") / "t.json", events, world_size=1)
    saved = lanes.ROWS_IN_MEMORY, one_rank.PIECE
    if small:  # spill rows to a file and cut steps into pieces
        lanes.ROWS_IN_MEMORY, one_rank.PIECE = 2, 2
    try:
        (rank,) = analyse_run("run", [path]).ranks
    finally:
        lanes.ROWS_IN_MEMORY, one_rank.PIECE = saved
    busy = (painted(ops) - painted(waits) - painted(own_comm)) | painted(helper)
    sent = painted(comm) | painted(own_comm)
    for report, one in zip(rank.steps, steps, strict=True):
        line = painted([one])
        expected = (len(line & busy - sent), len(line & busy & sent), len(line & sent - busy), len(line - busy - sent))
        assert parts(report) == expected
        assert report.split.duration == report.end - report.start == 1000 * len(line)
        assert sum(report.idle.values()) == report.split.exposed + report.split.gap
    holes = {t for one in steps for t in painted([one])} - busy
    assert sum(hole.length for hole in rank.holes if len(rank.holes) < 10) in (0, 1000 * len(holes))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), small=st.booleans())
def test_gpu_steps_split_as_painting_every_microsecond_says(tmp_path_factory, seed, small):
    rng = random.Random(seed)
    edges = sorted(rng.sample(range(80), 6))
    steps = list(zip(edges[::2], edges[1::2], strict=True))
    events, rows = [step(i, *one) for i, one in enumerate(steps)], []
    for stream, name in ((7, "gemm"), (8, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"), (9, "add")):
        t = 0
        for i in range(rng.randrange(6)):
            t += rng.randrange(14)
            end = t + rng.randrange(10)
            at = rng.randrange(t + 1)
            rows.append((t, end, at, stream))
            events += [kernel(t, end, 100 * stream + i, name, stream), launch(at, 100 * stream + i)]
            t = end
    if not any(stream != 8 for *_, stream in rows):
        return
    rng.shuffle(events)
    path = write(tmp_path_factory.mktemp("paint") / "t.json", events, world_size=1, backend="nccl")
    saved, one_rank.PIECE = one_rank.PIECE, 2 if small else one_rank.PIECE
    done = [
        max([end] + [row[1] for row in rows if row[2] >= start and (i == 2 or row[2] < steps[i + 1][0])])
        for i, (start, end) in enumerate(steps)
    ]
    begin = max([steps[0][0]] + [row[1] for row in rows if row[2] < steps[0][0]])
    windows = []
    for (start, _), end in zip(steps, done, strict=True):
        windows.append((max(start, begin), end))
        begin = end
    try:
        if any(end <= start for start, end in windows):
            with pytest.raises(TraceError, match="no time of its own"):
                analyse_run("run", [path])
            return
        (rank,) = analyse_run("run", [path]).ranks
    finally:
        one_rank.PIECE = saved
    busy = painted(row[:2] for row in rows if row[3] != 8)
    sent = painted(row[:2] for row in rows if row[3] == 8)
    for report, one in zip(rank.steps, windows, strict=True):
        line = painted([one])
        expected = (len(line & busy - sent), len(line & busy & sent), len(line & sent - busy), len(line - busy - sent))
        assert (report.start, report.end) == (1000 * one[0], 1000 * one[1])
        assert parts(report) == expected
        assert sum(report.idle.values()) == report.split.exposed + report.split.gap


# One rank ------------------------------------------------------------------------------------------------------------


def test_waiting_inside_a_backward_operator_is_not_computing(tmp_path):
    events = [
        step(0, 0, 100),
        op(0, 80, "autograd::engine::evaluate_function: AccumulateGrad"),
        note(20, 60, "ddpx:wait", ddpx_bucket=0),
        all_reduce(20, 60, 4000, bucket=0),
    ]
    (rank,) = run_of(tmp_path, events).ranks
    assert parts(rank.steps[0]) == (40, 0, 40, 20)


def test_a_blocking_collective_on_the_training_thread_hides_under_nothing(tmp_path):
    events = [step(0, 0, 100), op(0, 100, "Backward"), all_reduce(30, 90, 4000, bucket=0, tid=MAIN)]
    run = run_of(tmp_path, events)
    assert parts(run.ranks[0].steps[0]) == (40, 0, 60, 0)
    assert run.ratio("overlap") == 0


def test_what_runs_on_the_communication_thread_is_no_compute_and_its_sends_are_no_collectives(tmp_path):
    events = [step(0, 0, 100), op(0, 50), all_reduce(40, 90, 4000, bucket=0)]
    events += [op(60, 70, "aten::add_", COMM), note(42, 50, "gloo:send", COMM), note(41, 52, "gloo:recv", 201)]
    (rank,) = run_of(tmp_path, events).ranks
    assert parts(rank.steps[0]) == (40, 10, 40, 10)
    assert [item.event.kind for item in rank.collectives] == ["all_reduce"]


def test_causes_of_holes_on_a_cpu(tmp_path):
    events = [step(0, 0, 200), op(0, 10, "aten::mm"), op(50, 60, "aten::add"), op(110, 120), op(190, 200)]
    events += [
        note(10, 45, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        all_reduce(60, 100, 4000, bucket=0),
        note(60, 108, "ddpx:wait", ddpx_bucket=0),
        note(120, 190, "Optimizer.step#SGD.step"),
    ]
    (rank,) = run_of(tmp_path, events).ranks
    told = [(hole.length, hole.cause, hole.parts) for hole in rank.holes]
    assert told == [
        (70_000, "host", {"host": 70_000}),
        (50_000, "communication", {"communication": 48_000, "host": 2_000}),
        (40_000, "data loading", {"data loading": 35_000, "host": 5_000}),
    ]
    assert (rank.holes[2].before, rank.holes[2].after) == ("aten::mm", "aten::add")
    assert rank.holes[0].within == "Optimizer.step#SGD.step"


def test_causes_of_holes_on_a_gpu(tmp_path):
    events = [step(0, 0, 200)]
    events += [launch(0, 1), kernel(5, 20, 1), launch(1, 2), kernel(30, 40, 2)]  # launched early, ran late
    events += [launch(65, 3), kernel(70, 80, 3)]  # the host was late, by 25
    events += [event("gpu_memcpy", "Memcpy HtoD", 80, 95, 7, 0, correlation=4), launch(3, 4)]
    events += [launch(4, 5), kernel(100, 180, 5)]
    events += [event("cuda_runtime", "cudaStreamSynchronize", 10, 62, correlation=9)]
    (rank,) = run_of(tmp_path, events, backend="nccl").ranks
    told = [(hole.start // 1000, hole.length // 1000, hole.parts) for hole in sorted(rank.holes, key=lambda h: h.start)]
    assert told == [
        (0, 5, {"other": 5000}),
        (20, 10, {"other": 10_000}),
        (40, 30, {"host": 25_000, "other": 5_000}),
        (80, 20, {"copy": 15_000, "other": 5_000}),
        (180, 20, {"host": 20_000}),
    ]
    assert next(hole.sync for hole in rank.holes if hole.start == 40_000) == "cudaStreamSynchronize"


def test_gpu_steps_stretch_to_the_end_of_what_they_launched(tmp_path):
    events = [step(0, 0, 50), step(1, 60, 100), launch(10, 1), kernel(20, 80, 1), launch(70, 2), kernel(90, 150, 2)]
    (rank,) = run_of(tmp_path, events, backend="nccl").ranks
    assert [(one.start // 1000, one.end // 1000, one.host // 1000) for one in rank.steps] == [
        (0, 80, 50),
        (80, 150, 40),
    ]
    assert "host steps end before their device work" in rank.notes[-1]


@pytest.mark.parametrize("how", ["annotation with bucket", "unnamed kernels", "annotation without shadow"])
def test_a_collective_made_of_plain_kernels_counts_by_its_annotation(tmp_path, how):
    """ddpx on CUDA: copies and reduce kernels on a stream of their own, under the host's annotation."""
    args = {"External id": 77} | ({} if how == "unnamed kernels" else {"ddpx_bucket": 2, "bytes": 8000})
    events = [step(0, 0, 100), launch(1, 1), kernel(10, 60, 1), note(5, 15, "nccl:all_reduce", COMM, **args)]
    events += [launch(6, 2, COMM), event("gpu_memcpy", "Memcpy PtoP", 20, 30, 40, 0, correlation=2)]
    events += [launch(8, 3, COMM), kernel(35, 70, 3, "reduce", 40)]
    if how != "annotation without shadow":
        events.append(event("gpu_user_annotation", "nccl:all_reduce", 20, 70, 40, 0, **{"External id": 77}))
    (rank,) = run_of(tmp_path, events, backend="nccl").ranks
    assert parts(rank.steps[0]) == (10, 40, 10, 40)
    (item,) = rank.collectives
    assert (item.event.bucket, item.event.size) == ((None, None) if how == "unnamed kernels" else (2, 8000))


def test_bytes_of_collectives_as_nccl_tests_counts_them(tmp_path):
    names = {"Collective name": "_allgather_base", "In msg nelems": 100, "Out msg nelems": 400, "dtype": "BFloat16"}
    events = [step(0, 0, 100), launch(0, 1), kernel(1, 2, 1), launch(3, 2), launch(3, 3)]
    events += [
        kernel(10, 20, 2, "ncclDevKernel_AllGather_RING_LL(x)", 40, **names, **{"Group size": 4}),
        kernel(30, 40, 3, "ncclDevKernel_Generic_4(x)", 40),
    ]
    rows = run_of(tmp_path, events, backend="nccl", world_size=4).rows
    assert [(row.kind, row.size, row.group_size) for row in rows] == [("all_gather", 800, 4), ("other", None, 4)]
    assert rows[0].algbw == 800 / 10e-6 and rows[0].busbw == pytest.approx(800 / 10e-6 * 3 / 4)
    assert rows[1].algbw is None and rows[1].busbw is None
    assert [bus_factor(kind, 4) for kind in ("all_reduce", "reduce_scatter", "broadcast", "barrier")] == [
        1.5, 0.75, 1, None,
    ]  # fmt: skip
    gather = note(10, 20, "gloo:all_gather", COMM, **{"Input Dims": [[10, 5]], "Input type": ["c10::Half"]})
    (row,) = run_of(tmp_path, [step(0, 0, 50), gather, op(0, 1)], world_size=3).rows
    assert row.size == 10 * 5 * 2 * 3


def test_slowdown_compares_an_operator_with_itself(tmp_path):
    events = [step(0, 0, 4000), all_reduce(2000, 4000)]
    shape = {"Input Dims": [[8, 8]], "Input type": ["float"]}
    for i in range(20):
        events += [op(100 * i, 100 * i + 40, **shape), op(2000 + 100 * i, 2000 + 100 * i + 60, **shape)]
    events = sorted([*events, op(45, 99, "aten::once")], key=lambda one: one["ts"])
    (rank,) = run_of(tmp_path, events).ranks
    assert rank.slowdown == 1.5 and rank.slowdown_ms == pytest.approx(20 * 0.02)
    assert [(row.name, row.alone_us, row.with_comm_us) for row in rank.slowdowns] == [("aten::mm", 40, 60)]
    few = [step(0, 0, 4000), all_reduce(2000, 4000), op(0, 40, **shape), op(2000, 2060, **shape)]
    assert run_of(tmp_path, few).ranks[0].slowdown is None


def test_hidden_of_hideable_leaves_out_each_steps_last_collective(tmp_path):
    events = [step(0, 0, 100), op(0, 60), all_reduce(20, 50, bucket=0), all_reduce(55, 95, bucket=1)]
    run = run_of(tmp_path, events)
    assert run.ratio("overlap") == pytest.approx(35 / 70) and run.ratio("hideable") == 1
    assert run.ranks[0].steps[0].tail == 35_000


# Several ranks -------------------------------------------------------------------------------------------------------


def late(by, rank, steps=5):
    """Two buckets a step; rank 1 computes longer by `by`, so rank 0 waits in its first bucket."""
    events = []
    for k in range(steps):
        t = 1000 * k
        mine = by if rank == 1 else 0
        events += [step(k, t, t + 900), op(t, t + 100 + mine), op(t + 100 + by, t + 300 + by)]
        events += [
            all_reduce(t + 100 + mine, t + 200 + by, 4000, bucket=0),
            all_reduce(t + 310 + by, t + 360 + by, 8000, bucket=1),
        ]
    return events


def test_waiting_for_a_peer_is_told_from_transfer_and_the_straggler_named(tmp_path):
    run = run_of(tmp_path, late(200, 0), late(200, 1))
    assert [(row.label, row.transfer_ms, row.wait_ms) for row in run.rows] == [
        ("bucket 0", pytest.approx(0.1), pytest.approx(0.1)),
        ("bucket 1", pytest.approx(0.05), 0),
    ]
    assert [step.idle["peer"] for step in run.ranks[0].steps] == [200_000] * 5
    assert [step.idle["peer"] for step in run.ranks[1].steps] == [0] * 5
    assert run.straggler.startswith("rank 1 arrives last at 5 of 10 collectives and costs the others 0.2 ms a step")
    assert "0.2 ms a step more than the others computing" in run.straggler
    (hole,) = [hole for hole in run.ranks[0].holes if hole.cause == "peer" and hole.step == 0]
    assert hole.parts == {"peer": 200_000, "communication": 0}


def test_balanced_ranks_have_no_straggler(tmp_path):
    assert run_of(tmp_path, late(0, 0), late(0, 1)).straggler is None


def test_one_long_stall_is_named_with_its_place(tmp_path):
    slow = [[], []]
    for rank in (0, 1):
        for k in range(6):
            t, stall = 2000 * k, 800 if k == 3 else 0
            mine = stall if rank == 1 else 0
            slow[rank] += [step(k, t, t + 1500), op(t, t + 100 + mine)]
            slow[rank] += [all_reduce(t + 100 + mine, t + 200 + stall, bucket=b) for b in (0,)]
    run = run_of(tmp_path, *slow)
    assert "at most 0.8 ms, at bucket 0 of step 3" in run.straggler and run.straggler.startswith("rank 1")


def test_ranks_are_matched_by_bucket_not_by_time(tmp_path):
    one = [step(0, 0, 100), op(0, 90), all_reduce(10, 20, 4000, 0), all_reduce(30, 60, 8000, 1, tid=201)]
    two = [step(0, 0, 100), op(0, 90), all_reduce(31, 41, 4000, 0), all_reduce(30, 60, 8000, 1, tid=201)]
    run = run_of(tmp_path, one, two)
    assert not run.problems and [row.wait_ms for row in run.rows] == [0, 0]


def test_what_cannot_be_compared_is_refused_by_name(tmp_path):
    base = late(0, 0)
    fewer = [one for one in base if one.get("args", {}).get("ddpx_bucket") != 1 or one["ts"] > 1000]
    cases = [
        ([base, None, base], "rank 1 of 3 missing"),
        ([base, fewer], "unequal numbers of collectives in step 0: rank 0 has 2, rank 1 has 1"),
        ([base, late(0, 1, steps=4)], "steps don't line up: rank 0 has steps 0-4, rank 1 has steps 0-3"),
        (
            [base, [all_reduce(50, 60, 12, 9) if "ddpx_bucket" in one.get("args", {}) else one for one in base]],
            "unequal numbers of collectives",
        ),
        (
            [[step(0, 0, 9), op(1, 2), all_reduce(3, 4, 400, 0)], [step(0, 0, 9), op(1, 2), all_reduce(3, 4, 800, 0)]],
            "all_reduce of 400 bytes (bucket 0) on rank 0 but all_reduce of 800 bytes (bucket 0) on rank 1",
        ),
        ([base, [step(k, 1000 * k, 1000 * k + 900) for k in range(5)] + [op(1, 2)]], "rank 1: no communication"),
    ]
    for ranks, reason in cases:
        run = run_of(tmp_path, *ranks)
        assert len(run.problems) >= 1 and reason in " ".join(run.problems)
        assert not run.arrivals and run.straggler is None
        assert all(row.transfer_ms is None for row in run.rows)
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([op(0, 1)], r"no steps: none of its 1 events is named ProfilerStep#N"),
        ([step(0, 0, 10), step(1, 5, 15)], r"steps 0 and 1 overlap"),
        ([step(3, 0, 10), step(3, 20, 30)], r"step 3 is there twice"),
        ([step(0, 0, 10), launch(1, 5)], r"has 1 kernel launches but no GPU kernels"),
        ([step(0, 0, 10), note(1, 2, "nccl:all_reduce")], r"has 1 NCCL calls but no GPU kernels"),
        ([step(0, 0, 10), op(8, 3)], r"1 events have a negative duration"),
        (
            [step(0, 0, 9), event("user_annotation", "ProfilerStep#0", 0, 9, MAIN, 2)],
            r"several processes \(a merged file\)",
        ),
    ],
)  # fmt: skip
def test_traces_without_sound_steps_are_refused_by_name(tmp_path, events, reason):
    with pytest.raises(TraceError, match=rf"rank0\.json: .*{reason}"):
        run_of(tmp_path, events)


def test_the_same_rank_twice_is_refused(tmp_path):
    paths = [write(tmp_path / name, late(0, 0), 0, 2) for name in ("a.json", "b.json")]
    with pytest.raises(TraceError, match="rank 0 is there twice: .*a.json and .*b.json"):
        analyse_run("run", paths)


def test_ranks_without_distributed_info_are_numbered_by_file_name(tmp_path):
    for number in (1, 0):
        text = write(tmp_path / "x.json", late(0, number), number).read_text()
        (tmp_path / f"trace_rank{number}.json").write_text(re.sub(r'"distributedInfo": \{.*?\}', '"x": 1', text))
    run = analyse_run("run", sorted(tmp_path.glob("trace_rank*")))
    assert [rank.rank for rank in run.ranks] == [0, 1] and "numbered by file names" in run.notes[0]


def test_steps_that_overlap_by_rounding_alone_are_not_refused(tmp_path):
    run = run_of(tmp_path, [step(0, 0, 101), step(1, 100, 200), op(0, 150), all_reduce(120, 160)])
    assert [parts(one) for one in run.ranks[0].steps] == [(100, 0, 0, 0), (20, 30, 10, 40)]


def test_own_step_names_and_a_choice_of_steps(tmp_path):
    events = [note(100 * k, 100 * k + 90, f"train_step#{k}") for k in range(5)] + [op(10, 20), all_reduce(20, 30)]
    run = run_of(tmp_path, events, step_name="train_step", only=range(1, 3))
    assert run.step_numbers == [1, 2]
    with pytest.raises(TraceError, match="none of the steps asked for is in it; it has 0-4"):
        run_of(tmp_path, events, step_name="train_step", only=range(7, 9))


def test_a_difference_within_noise_is_not_called_clear(tmp_path):
    runs = []
    for shift in (0, 100):
        folder = tmp_path / str(shift)
        folder.mkdir()
        events = []
        for k, noise in enumerate((0, 30, -30, 10)):
            t = 10_000 * k
            events += [step(k, t, t + 2000 + noise), op(t, t + 1000 + shift), all_reduce(t + 1200, t + 1300 + noise)]
        runs.append(run_of(folder, events, world_size=2))
    told = {one.metric: (round(one.delta, 6), one.is_clear) for one in compare(*runs)}
    assert told["compute_ms"] == (0.1, True) and told["step_ms"] == (0, False) and told["exposed_ms"][0] == 0
    assert set(told) == set(METRICS)


# A real trace --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"the sample trace {SAMPLE.name} is not in ../shared/data")
def test_the_a100_sample_gives_htas_overlap_and_sums_on_every_step():
    run = analyse_run("sample", [SAMPLE])
    (rank,) = run.ranks
    assert round(100 * rank.hta_overlap, 2) == 14.31  # what Holistic Trace Analysis prints, last step dropped
    assert [one.number for one in rank.steps] == [4, 5, 6]
    for one, host_ns in zip(rank.steps, (222_442_191, 219_726_905, 224_936_243), strict=True):
        assert one.split.duration == one.end - one.start == one.host == host_ns
        assert sum(one.idle.values()) == one.split.exposed + one.split.gap
    shares = [one.split.overlapped / (one.split.overlapped + one.split.exposed) for one in rank.steps]
    assert [round(share, 3) for share in shares] == [0.152, 0.143, 0.165]
    assert [(row.kind, row.size) for row in run.rows[2:]] == [
        ("all_reduce", size) for size in (8196000, 31502336, 26255360, 26550272, 9724160)
    ]
    assert not run.problems and "one of 2 ranks" in run.notes[0]
