"""What is said about modes follows from their steps: definitions, chance, table, report and picture."""

import json
import math

import pytest

from ddpx import compare, timeline
from ddpx.compare import BucketTimes, Phase, RankStep, Run, Step, Yardstick
from ddpx.mfu import Peak

YARDSTICK = Yardstick(512, "token", 1e9, "counted", Peak(1e12, "user"))


def rank_step(*spans: tuple[float, float], backward_ended_s: float = 10.0, seconds: float = 20.0) -> RankStep:
    """A step whose buckets were communicated in these spans."""
    buckets = tuple(BucketTimes(i, 100, start, start, start, end) for i, (start, end) in enumerate(spans))
    phases = (Phase("forward", 0, 4), Phase("backward", 4, backward_ended_s), Phase("optimizer", 15, seconds))
    return RankStep(2.0, seconds, backward_ended_s, phases, buckets)


def run_of(mode: str, *seconds: float, network: compare.Network = "own", losses: tuple[float, ...] = (3.0, 2.0)) -> Run:
    label = {"none": "no communication", "own": "this machine", "emulated": "emulated network (1ms,1GB/s)"}[network]
    run = Run(mode, network, label, losses=list(losses), validation_loss=2.5, algorithm="direct")
    overlap = None if network == "none" else 0.75
    run.steps = [Step(s, 2.0, 4e-3, 1e-3, 1e-3, overlap) for s in seconds]
    spans = {"local": (), "torch": ((5.0, 12.0),)}.get(mode, ((5.0, 8.0), (8.0, 12.0)))
    run.views = [[rank_step(*spans), rank_step(*spans)]] * len(seconds)
    return run


# ---- A step of all ranks


def test_step_is_that_of_the_slowest_rank() -> None:
    assert compare.summarise([rank_step(seconds=20), rank_step(seconds=25)]).seconds == 25


def test_time_in_which_a_rank_waits_for_a_peer_is_not_communication() -> None:
    step = compare.summarise([rank_step((2, 9)), rank_step((6, 9))])  # rank 0 came 4 s early
    assert (step.communication_s, step.peer_wait_s) == (3, 2)
    assert (step.exposed_s, step.overlap) == (0, 1)


def test_communication_after_backward_is_exposed() -> None:
    step = compare.summarise([rank_step((6, 8), (8, 12))] * 2)
    assert (step.communication_s, step.exposed_s) == (6, 2)
    assert step.overlap == pytest.approx(1 - 2 / 6)


def test_waiting_for_a_peer_after_backward_is_exposed_but_does_not_lower_overlap() -> None:
    early = rank_step((6, 13), backward_ended_s=8)
    late = rank_step((11, 13), backward_ended_s=13)
    step = compare.summarise([early, late])
    assert step.exposed_s == (5 + 0) / 2
    assert step.overlap == pytest.approx(1 - (2 + 0) / 2 / 2)


def test_serial_modes_overlap_nothing() -> None:
    assert compare.summarise([rank_step((10, 12), (12, 14))] * 2).overlap == 0


def test_without_communication_there_is_no_overlap_to_speak_of() -> None:
    assert compare.summarise([rank_step(), rank_step()]).overlap is None


# ---- Chance


def test_a_mode_that_always_wins_is_faster() -> None:
    slow, fast = run_of("naive", *[1.2] * 8), run_of("overlapped", *[1.0] * 8)
    assert compare.is_faster(fast, slow) and not compare.is_faster(slow, fast)


def test_few_steps_prove_nothing() -> None:
    assert not compare.is_faster(run_of("overlapped", *[1.0] * 5), run_of("naive", *[1.2] * 5))


def test_a_mode_that_wins_as_often_as_it_loses_is_not_faster() -> None:
    a = run_of("overlapped", *[1.0, 1.2] * 10)
    b = run_of("naive", *[1.1, 1.1] * 10)
    assert not compare.is_faster(a, b) and not compare.is_faster(b, a)


def test_one_small_loss_among_clear_wins_does_not_hide_them() -> None:
    a = run_of("overlapped", *[1.0] * 9, 1.01)
    b = run_of("naive", *[1.2 + 0.01 * i for i in range(9)], 1.0)
    assert compare.is_faster(a, b)


@pytest.mark.parametrize("n", [1, 5, 10])
def test_chance_counts_subsets(n: int) -> None:
    sums = [sum(k + 1 for k in range(n) if mask >> k & 1) for mask in range(2**n)]
    for most in (0, 1, n):
        assert compare._chance(n, most) == sum(total <= most for total in sums) / 2**n


def test_chance_by_the_normal_law_continues_the_exact_one() -> None:
    exact, normal = compare._chance(60, 600), compare._chance(61, 600 + 30)
    assert exact == pytest.approx(normal, rel=0.2)


# ---- Words


def test_finding_names_the_gain_and_calls_the_network_emulated() -> None:
    runs = [
        run_of("local", *[0.9] * 10, network="none"),
        run_of("naive", *[2.0] * 10, network="emulated"),
        run_of("overlapped", *[1.0] * 10, network="emulated"),
    ]
    text = compare.finding(runs, 2)
    assert text.startswith("On an emulated network (1ms,1GB/s) a step takes 1000 ms overlapped instead of 2000 ms")
    assert "50% less" in text and "75% of its communication" in text and "900 ms without any" in text


def test_finding_claims_nothing_that_chance_may_have_made() -> None:
    text = compare.finding([run_of("naive", *[1.0, 1.3] * 4), run_of("overlapped", *[1.1, 1.0] * 4)], 2)
    assert "no more than chance" in text
    assert "2 steps are too few to tell" in compare.finding(
        [run_of("naive", 9.0, 9.0), run_of("overlapped", 1.0, 1.0)], 2
    )


def test_finding_admits_a_loss() -> None:
    text = compare.finding([run_of("naive", *[1.0] * 10), run_of("overlapped", *[1.5] * 10)], 2)
    assert "1500 ms overlapped, more than 1000 ms naive" in text


def test_one_process_has_nothing_to_compare() -> None:
    assert "One process" in compare.finding([run_of("overlapped", 1.0)], 1)


def test_equal_losses_are_said_to_be_equal_to_the_last_bit() -> None:
    text, worst = compare.agreement([run_of("naive", 1.0), run_of("overlapped", 1.0)])
    assert worst == 0 and "the same to the last bit at all 2 steps" in text


def test_local_is_left_out_of_the_agreement() -> None:
    runs = [run_of("local", 1.0, network="none", losses=(9.0, 9.0)), run_of("naive", 1.0), run_of("torch", 1.0)]
    assert compare.agreement(runs)[1] == 0


@pytest.mark.parametrize(
    ("losses", "worst", "said"),
    [((3.0, 2.002), 1e-3, "agree to 1.0e-03"), ((3.0, 3.0), 0.5, "DISAGREE"), ((math.nan, 2.0), math.nan, "DISAGREE")],
)
def test_differing_losses_are_shown(losses: tuple[float, float], worst: float, said: str) -> None:
    text, difference = compare.agreement([run_of("naive", 1.0), run_of("overlapped", 1.0, losses=losses)])
    assert difference == pytest.approx(worst, nan_ok=True)
    assert said in text


# ---- Table, report, picture


def all_modes() -> list[Run]:
    return [
        run_of("local", *[0.9] * 8, network="none"),
        *(run_of(mode, *[1.0] * 8) for mode in ("torch", "naive", "overlapped")),
        *(run_of(mode, *[1.5] * 8, network="emulated") for mode in ("naive", "overlapped")),
    ]


def test_table_has_a_line_a_run_and_says_what_is_emulated() -> None:
    lines = compare.table(all_modes(), YARDSTICK).splitlines()
    assert [line.split()[0] for line in lines[1:10]] == [
        "no", "local", "this", "torch", "naive", "overlapped", "emulated", "naive", "overlapped",
    ]  # fmt: skip
    assert lines[7] == "emulated network (1ms,1GB/s)"
    assert compare.NO_TORCH_NOTE in lines[10]


def test_ratio_of_mfus_is_the_inverse_ratio_of_step_times() -> None:
    runs = compare.report(all_modes(), YARDSTICK, 2)["runs"]
    local, naive = runs[0], runs[4]
    assert naive["mfu"] / local["mfu"] == pytest.approx(local["step_s"] / naive["step_s"])
    assert naive["mfu_of_local"] == pytest.approx(0.9 / 1.5)


def test_report_is_json_and_marks_emulated_runs() -> None:
    content = json.loads(json.dumps(compare.report(all_modes(), YARDSTICK, 2)))
    assert [run["emulated"] for run in content["runs"]] == [False] * 4 + [True] * 2
    assert content["runs"][5]["buckets"][1]["exposed_s"] == 2
    assert content["peak_source"] == "user"


def test_an_unknown_peak_is_not_guessed() -> None:
    nothing = Yardstick(512, "token", 1e9, "counted", None)
    assert "n/a" in compare.table(all_modes(), nothing)
    assert compare.report(all_modes(), nothing, 2)["runs"][0]["mfu"] is None


def test_console_line_of_a_single_mode_tells_exposed_and_overlap() -> None:
    run = run_of("overlapped", 0.0413)
    step = Step(0.0413, 3.21, 0.02, 0.0, 0.0021, 0.87)
    assert compare.console_line(120, [run], step) == "step 120  loss 3.210  41.3 ms  exposed 2.1 ms  overlap 0.87"


def test_hidden_and_exposed_parts_are_drawn_apart() -> None:
    run = run_of("overlapped", 1.0)
    early, late = rank_step((2, 12)), rank_step((8, 12))
    assert list(timeline.bars(run, [early, late])) == [("peer", 2, 8), ("hidden", 8, 10), ("exposed", 10, 12)]


def test_picture_is_drawn_with_and_without_communication(tmp_path) -> None:
    for name, runs in {"all": all_modes(), "alone": all_modes()[:1]}.items():
        timeline.draw(runs, "gpt nano", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
