"""Advice comes true: the number it predicts is found when it is followed, within the error it states."""

import random

import pytest
from trace_files import all_reduce, op, step, write

from ddpx.trace.advise import advise, fit
from ddpx.trace.analyse import analyse_run

MB = 1_000_000
MIB = 1 << 20
ALPHA_US, BETA_US = 300.0, 250.0  # a collective takes ALPHA_US + BETA_US a MB
BACKWARD_US = 60_000


def training(folder, buckets, overlapped, seed, alpha=ALPHA_US, beta=BETA_US, steps=8):
    """Analyse a made-up run: backward yields `buckets` (bytes) evenly, and one link carries them in order."""
    folder.mkdir()
    rng = random.Random(seed)
    events = []
    for k in range(steps):
        t = 200_000 * k
        done, link = 0, t
        events.append(op(t, t + BACKWARD_US, "aten::mm"))
        end = t + BACKWARD_US
        for index, size in enumerate(buckets):
            done += size
            ready = t + BACKWARD_US * done / sum(buckets) if overlapped else t + BACKWARD_US
            start = max(link, ready)
            link = start + (alpha + beta * size / MB) * rng.uniform(0.98, 1.02)
            events.append(all_reduce(round(start, 3), round(link, 3), size, index))
        end = max(end, round(link, 3))
        events.append(op(end, end + 2000, "aten::add_"))
        events.append(step(k, t, end + 2500))
    return analyse_run("run", [write(folder / "rank0.json", events, world_size=1)])


def advice(run, words):
    return next((one for one in advise(run) if words in one.sentence), None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [250.0, 900.0])
def test_a_smaller_last_bucket_leaves_what_was_predicted(tmp_path, seed, beta):
    before = training(tmp_path / "a", [8 * MIB, 16 * MIB, 31 * MIB], True, seed, beta=beta)
    told = advice(before, "last bucket would leave")
    assert "bucket 2 (32.5 MB) leaves" in told.sentence and told.change == "bucket_cap_mb=4"
    after = training(tmp_path / "b", [8 * MIB, 16 * MIB, 27 * MIB, 4 * MIB], True, seed + 9, beta=beta)
    saved = before.mean("exposed_ms") - after.mean("exposed_ms")
    assert told.error_ms < 0.15 * before.mean("exposed_ms")
    assert saved == pytest.approx(told.saves_ms, abs=told.error_ms)


def test_a_last_bucket_that_queues_behind_others_is_left_alone(tmp_path):
    run = training(tmp_path / "a", [8 * MIB, 16 * MIB, 31 * MIB], True, 0, beta=3000)
    assert advice(run, "last bucket would leave") is None


@pytest.mark.parametrize("seed", range(3))
def test_fewer_larger_buckets_save_what_was_predicted(tmp_path, seed):
    sizes = [MIB // 4 * (1 + i % 5) for i in range(40)]
    before = training(tmp_path / "a", sizes, False, seed, alpha=400, beta=100)
    told = advice(before, "all-reduces of")
    assert "40 all-reduces of 786 kB on average cost 0.4" in told.sentence
    merged = [25 * MIB, sum(sizes) - 25 * MIB]
    after = training(tmp_path / "b", merged, False, seed + 9, alpha=400, beta=100)
    saved = before.mean("exposed_ms") - after.mean("exposed_ms")
    assert saved == pytest.approx(told.saves_ms, abs=2 * told.error_ms)


def test_overlapping_cannot_do_better_than_the_bound_it_is_given(tmp_path):
    buckets = [4 * MIB] * 8
    before = training(tmp_path / "a", buckets, False, 1)
    told = advice(before, "runs while nothing computes")
    assert told.error_ms is None and "mode overlapped" in told.change
    after = training(tmp_path / "b", buckets, True, 1)
    saved = before.mean("step_ms") - after.mean("step_ms")
    assert 0.7 * told.saves_ms < saved <= told.saves_ms + 1e-6


def test_what_isnt_worth_a_hundredth_of_a_step_is_not_said(tmp_path):
    run = training(tmp_path / "a", [MIB, MIB // 4], True, 0, alpha=10, beta=100)
    assert advise(run) == []


def test_a_line_needs_sizes_that_differ():
    assert fit([(100, 1.0), (110, 1.1), (120, 1.2), (130, 1.3)]) is None
    line = fit([(100, 1.1), (200, 1.2), (300, 1.3), (400, 1.4)])
    assert line.alpha_ms == pytest.approx(1) and line.at(1000) == pytest.approx(2)
    assert line.spread_ms == pytest.approx(0, abs=1e-9)
