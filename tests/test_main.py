"""python -m ddpx: what its commands print, and how they refuse."""

import json

import pytest

from ddpx.__main__ import COMMANDS, main
from ddpx.algorithms import build
from ddpx.units import bytes_text, parse_bandwidth, parse_bytes, parse_seconds, seconds_text


def test_simulate_shows_the_grid_and_who_holds_what(capsys):
    assert main(["simulate", "--algorithm", "ring", "--ranks", "4", "--show"]) == 0
    out = capsys.readouterr().out
    assert str(build("all_reduce", "ring", 4)) in out
    assert "after step 5" in out and "rank 3  all" in out
    assert "the same bits on all ranks" in out and "96 B sent by the busiest sender" in out
    assert "equal to what the collective promises" in out


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_simulate_plays_every_collective(capsys, collective):
    for op in ("sum", "avg", "product"):
        assert main(["simulate", "--collective", collective, "--algorithm", "direct", "--ranks", "3", "--op", op]) == 0
    assert "DIFFERENT" not in capsys.readouterr().out


def test_simulate_as_json_and_pipelined(capsys):
    arguments = ["--collective", "broadcast", "--algorithm", "chain", "--ranks", "5", "--root", "2", "--segments", "3"]
    assert main(["simulate", *arguments, "--interleave", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["right"] and found["ranks"] == 5 and len(found["bytes_sent"]) == 5


def cost(capsys, *arguments: str) -> dict[str, float]:
    assert main(["cost", *arguments, "--json"]) == 0
    return {row["algorithm"]: row["seconds"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_cost_of_64_ranks_at_10_us_and_50_gb_per_s(capsys):
    fabric = ["--ranks", "64", "--alpha", "10us", "--bandwidth", "50GB/s"]
    small, large = cost(capsys, *fabric, "--bytes", "4KB"), cost(capsys, *fabric, "--bytes", "1000MB")
    names = ("ring", "tree", "parameter_server")
    assert [round(small[name] * 1e3, 3) for name in names] == [1.260, 0.121, 1.270]
    assert [round(large[name] * 1e3, 3) for name in names] == [40.635, 240.120, 2521.260]


def test_cost_prints_one_line_for_each_algorithm(capsys):
    assert main(["cost", "--ranks", "8", "--bytes", "25MiB", "--alpha", "10us", "--bandwidth", "50GB/s"]) == 0
    out = capsys.readouterr().out
    assert "all_reduce of 25 MiB over 8 ranks, alpha 10.00 us, 50 GB/s" in out
    for name in ("ring", "tree", "double_tree", "doubling", "halving_doubling", "direct", "parameter_server"):
        assert sum(line.startswith(f"{name} ") for line in out.splitlines()) == 1
    assert "fastest by size: doubling, then" in out


def test_cost_answers_for_100_000_ranks_and_for_nodes(capsys):
    assert cost(capsys, "--ranks", "100000", "--bytes", "1GB")["ring"] == pytest.approx(2.04, abs=0.01)
    nodes = ["--local-size", "8", "--local-alpha", "2us", "--local-bandwidth", "300GB/s"]
    assert "hierarchical" in cost(capsys, "--ranks", "64", "--bytes", "1GB", *nodes)


def test_whatif_shows_what_a_slow_rank_does(capsys):
    assert main(["whatif", "--ranks", "4", "--bytes", "1MB", "--slow-rank", "3:5", "--slow-link", "0-1:2"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 5× slower, link 0 to 1 2× slower" in out
    assert any(line.startswith("ring ") and line.endswith("5.00×") for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no command; known: simulate, cost"),
        (["dance"], "unknown command 'dance'"),
        (["simulate", "--ranks", "0"], "a whole number from 1 on, not '0'"),
        (["simulate", "--ranks", "9999"], "python -m ddpx cost answers by formula"),
        (["simulate", "--algorithm", "star"], "unknown algorithm 'star' for all_reduce; known: ring"),
        (["simulate", "--root", "2"], "all_reduce has no root"),
        (["cost", "--ranks", "4"], "--bytes"),
        (["cost", "--ranks", "4", "--bytes", "huge"], "a size is a number of bytes such as 25MiB"),
        (["cost", "--ranks", "4", "--bytes", "1KB", "--bandwidth", "0GB/s"], "not zero"),
        (["whatif", "--ranks", "4", "--bytes", "1KB"], "name a --slow-rank or a --slow-link"),
        (["whatif", "--ranks", "4", "--bytes", "1KB", "--slow-rank", "x"], "'x' is not of the form 3:5"),
        (["whatif", "--ranks", "4", "--bytes", "1KB", "--slow-rank", "4:2"], "rank 4 is not among 4 ranks"),
        (["bench", "--sizes", "huge"], "a size is a number of bytes"),
        (["bench", "--sizes", "2"], "a buffer holds at least one element"),
        (["bench", "--algorithms", "star"], "unknown algorithm 'star'"),
        (["bench", "--nproc", "0"], "at least one rank"),
        (["bench", "--link", "slow"], "a link is LATENCY,BANDWIDTH"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_exit_code_2(capsys, arguments, text):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert text in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_on_one_screen(capsys, command):
    try:
        main([command, "--help"] if command else ["--help"])
    except SystemExit as stop:
        assert stop.code == 0
    assert 5 < len(capsys.readouterr().out.splitlines()) <= 50


def test_quantities_as_people_write_them():
    assert [parse_bytes(text) for text in ("25MiB", "4KB", "4kB", "1.5GiB", "12", "12B")] == [
        *(25 << 20, 4000, 4000, 3 << 29, 12, 12),
    ]
    assert [parse_seconds(text) for text in ("10us", "1.5ms", "0s")] == pytest.approx([1e-5, 1.5e-3, 0])
    assert [parse_bandwidth(text) for text in ("50GB/s", "10Gbit/s")] == [50e9, 1.25e9]
    assert [bytes_text(n) for n in (25 << 20, 45875200, 10**9, 48, 1000.5)] == [
        *("25 MiB", "43.75 MiB", "1 GB", "48 B", "1 KB"),
    ]
    assert [seconds_text(s) for s in (0, 1.26e-3, 9.9999e-4, 2.52126)] == [
        "0.000 us",
        "1.260 ms",
        "1.000 ms",
        "2.521 s",
    ]


def test_cost_draws_where_the_lines_cross(tmp_path, capsys):
    picture = tmp_path / "crossover.png"
    assert main(["cost", "--ranks", "8", "--bytes", "25MiB", "--png", str(picture)]) == 0
    assert "fastest by size" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
