"""python -m ddpx trace PATH...: where the time of each training step went, from torch.profiler's traces.

    python -m ddpx trace rank0.json.gz                        one rank
    python -m ddpx trace profiles/run/overlapped              all ranks of one run
    python -m ddpx trace profiles/run                         one run per sub-folder, side by side
    python -m ddpx trace before/ after/ --html report.html    two runs and their difference
    python -m ddpx trace run/ --gate 'exposed_ms<=5' --gate 'overlap>=0.8'

A folder is one run (its *.pt.trace.json[.gz], or else all its *.json[.gz]); files named one by one are one together.
Exit code: 0 all reported; 1 a gate failed, or part of the analysis was refused; 2 a file or an argument is no good.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import sys
from pathlib import Path

from ddpx.trace import report
from ddpx.trace.analyse import analyse_run, compare
from ddpx.trace.read import TraceError
from ddpx.trace.result import METRICS, RunReport

MODES = ("local", "torch", "naive", "bucketed", "overlapped")
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="trace files of one run, or a folder a run")
    parser.add_argument("--against", nargs="+", type=Path, metavar="PATH", help="traces of the run to compare with")
    parser.add_argument("--steps", metavar="A-B", help="only the steps with these numbers, such as 5-9")
    parser.add_argument("--step-name", default="ProfilerStep", help="annotation that marks a step (%(default)s)")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="how many gaps to list (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - for standard output, without text")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the steps")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    parser.add_argument("--dark", action="store_true", help="dark background in the PNG")
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="EXPR",
        help="exit with 1 unless it holds, as overlap>=0.8 or exposed_ms<=5 (mean over steps and ranks)",
    )


def _runs_of(paths: list[Path]) -> list[tuple[str, list[Path]]]:
    """(name, files) of each run that the paths name."""
    runs: list[tuple[str, list[Path]]] = []
    files = [path for path in paths if not path.is_dir()]
    if files:
        name = files[0].name if len(files) == 1 else files[0].parent.name or "traces"
        runs.append((name, files))
    for folder in (path for path in paths if path.is_dir()):
        found = _traces_in(folder)
        if found:
            runs.append((folder.name or str(folder), found))
            continue
        below = [(sub.name, _traces_in(sub)) for sub in sorted(folder.iterdir(), key=_mode_order) if sub.is_dir()]
        below = [pair for pair in below if pair[1]]
        if not below:
            raise TraceError(f"{folder}: no *.json or *.json.gz in it or in its sub-folders")
        runs += below
    return runs


def _mode_order(folder: Path) -> tuple[int, str]:
    """The order in which the modes of one training are read, simplest first; other folders by name."""
    mode = folder.name.split("-")[0]
    return (MODES.index(mode) if mode in MODES else len(MODES)), folder.name


def _traces_in(folder: Path) -> list[Path]:
    plain = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")) and path.is_file())
    return [path for path in plain if ".pt.trace.json" in path.name] or [
        path for path in plain if "perfetto" not in path.name and path.name != "report.json"
    ]


def _steps_of(text: str | None) -> range | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match or int(match.group(2) or match.group(1)) < int(match.group(1)):
        raise TraceError(f"--steps {text}: give a number or a range such as 5-9")
    return range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)


def _gates_of(expressions: list[str]) -> list[tuple[str, str, str, float]]:
    gates = []
    for expression in expressions:
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|<|>)\s*([\d.]+)\s*", expression)
        if not match or (match.group(1) not in METRICS and match.group(1) != "overlap"):
            known = ", ".join(["overlap", *METRICS])
            raise TraceError(f"--gate {expression}: give NAME<=NUMBER or NAME>=NUMBER, NAME one of {known}")
        gates.append((expression, match.group(1), match.group(2), float(match.group(3))))
    return gates


def _check(run: RunReport, gates: list[tuple[str, str, str, float]]) -> list[str]:
    failed = []
    for expression, name, sign, limit in gates:
        if run.blind and name not in ("step_ms", "compute_ms"):
            failed.append(f"gate {expression} failed in {run.name}: its traces don't show the communication")
            continue
        value = run.ratio("overlap") if name == "overlap" else run.mean(name)
        if value is None:
            failed.append(f"gate {expression} failed in {run.name}: it has no communication, so no overlap")
        elif not _COMPARE[sign](value, limit):
            failed.append(f"gate {expression} failed in {run.name}: {name} is {value:.4g}")
    return failed


def run(args: argparse.Namespace) -> int:
    """Do what the arguments ask; returns the exit code."""
    try:
        steps, gates = _steps_of(args.steps), _gates_of(args.gate)
        if args.top < 0:
            raise TraceError(f"--top {args.top}: give a number of gaps")
        sources = (_runs_of(args.against) if args.against else []) + _runs_of(args.paths)
        runs = []
        for name, paths in sources:
            runs.append(analyse_run(name, paths, args.top, steps, args.step_name))
    except (TraceError, OSError) as error:
        print(f"ddpx trace: {error}", file=sys.stderr)
        return 2
    names = [one.name for one in runs]
    if len(set(names)) < len(names):
        for one, (_, paths) in zip(runs, sources, strict=True):
            one.name = f"{paths[0].parent.parent.name}/{one.name}"
    pairs = [(runs[0], other, compare(runs[0], other)) for other in runs[1:]]

    document = {
        "format": "ddpx-trace-report",
        "version": 1,
        "runs": [report.run_dict(one) for one in runs],
        "differences": [report.difference_dict(*pair) for pair in pairs],
    }
    if args.json == "-":
        _print(json.dumps(document, indent=1))
    else:
        parts = [report.text(one, args.top) for one in runs]
        if len(runs) == 2:
            parts.append(report.difference_text(*pairs[0]))
        elif runs[2:]:
            parts.append(report.side_by_side_text(runs))
        _print("\n\n".join(parts))
    try:
        if args.json and args.json != "-":
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if args.html:
            from ddpx.trace.page import page

            args.html.write_text(page(runs, pairs), encoding="utf-8")
        if args.png:
            from ddpx.trace.draw import draw

            draw(runs, args.png, dark=args.dark)
    except OSError as error:
        print(f"ddpx trace: {error}", file=sys.stderr)
        return 2
    failed = [line for one in runs for line in _check(one, gates)]
    for line in failed:
        print(f"ddpx trace: {line}", file=sys.stderr)
    for one in runs:
        for problem in one.problems:
            print(f"ddpx trace: {one.name}: not reported: {problem}", file=sys.stderr)
    return 1 if failed or any(one.problems for one in runs) else 0


def _print(text: str) -> None:
    """Print to a reader that may have read enough (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ddpx trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))
