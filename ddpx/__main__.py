"""Collectives and traces from the command line.

    python -m ddpx simulate --algorithm ring --ranks 4 --show    the picture, the proof, who holds what step by step
    python -m ddpx cost --ranks 8 --bytes 25MiB --alpha 10us --bandwidth 50GB/s    one line per algorithm
    python -m ddpx whatif --ranks 8 --bytes 25MiB --slow-rank 3:5                  who suffers from a slow rank
    python -m ddpx bench --nproc 2                               measured on real processes, in turns with torch
    python -m ddpx bench --nproc 2 --gate                        each promised speed beside its bound
    python -m ddpx trace PATH...                                 where the time of each training step went

Each takes --help. Exit code: 0 done; 1 a check or a gate failed; 2 an argument is no good.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddpx.algorithms import build
from ddpx.cost import Fabric, best_by_size, closed_form, compare, count
from ddpx.schedule import COLLECTIVES, Schedule, interleave
from ddpx.units import bandwidth_text, bytes_text, parse_bandwidth, parse_bytes, parse_seconds, seconds_text, table
from ddpx.verify import ContractError, verify

MAX_RANKS = 1024  # past it a step list grows too long; `cost` answers by formula
MAX_BYTES = 1 << 50  # two algorithms that meet beyond it are as good as parallel


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2."""

    def __init__(self, command: str, doc: str) -> None:
        super().__init__(
            prog=f"python -m ddpx {command}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def quantity(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that keeps the words of the parser's ValueError."""

    def of(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return of


def ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the number of ranks is a whole number from 1 on, not '{text}'")
    return int(text)


# ---- simulate --------------------------------------------------------------------------------------------------------


def simulate(argv: Sequence[str]) -> int:
    """Draw an algorithm, prove it, run it on numbers in this process, and count what it sends."""
    from ddpx.simulate import show

    parser = Parser("simulate", simulate.__doc__ or "")
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce", help="(%(default)s)")
    parser.add_argument("--algorithm", default="ring", help="such as ring, tree, direct (%(default)s)")
    parser.add_argument("--ranks", type=quantity(ranks), default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--elements", type=int, metavar="E", help="numbers a rank brings (twice as many as ranks)")
    parser.add_argument("--root", type=int, default=0, metavar="R", help="of broadcast and reduce (%(default)s)")
    parser.add_argument("--op", default="sum", choices=["sum", "avg", "max", "min", "product"], help="(%(default)s)")
    parser.add_argument("--segments", type=int, metavar="K", help="of double_tree and chain")
    parser.add_argument("--local-size", type=int, metavar="P", help="ranks of a node, for hierarchical")
    parser.add_argument("--interleave", type=int, default=1, metavar="K", help="pipeline in K copies (%(default)s)")
    parser.add_argument("--show", action="store_true", help="who holds what after every step")
    parser.add_argument("--json", action="store_true", help="the moves and counts as JSON, nothing else")
    args = parser.parse_args(argv)
    if args.ranks > MAX_RANKS:
        parser.error(f"{args.ranks} ranks are too many to play; python -m ddpx cost answers by formula")
    elements = 2 * args.ranks if args.elements is None else args.elements
    if elements < 0:
        parser.error(f"--elements cannot be {elements}")
    options = {key: getattr(args, key) for key in ("segments", "local_size") if getattr(args, key) is not None}
    try:
        schedule = build(args.collective, args.algorithm, args.ranks, args.root, **options)
        schedule = interleave(schedule, args.interleave)
    except ValueError as error:
        parser.error(str(error))
    try:
        proof = verify(schedule)
    except ContractError as error:
        print(error, file=sys.stderr)
        return 1
    cut = elements * args.ranks if args.collective in ("all_gather", "all_to_all") else elements
    traffic = count(schedule, cut, 8)
    right = _play(schedule, elements, args.op)
    if args.json:
        moves = [[m.step, m.dst, list(m.srcs), m.lo, m.hi] for m in schedule.moves]
        print(
            json.dumps(
                {
                    "algorithm": schedule.algorithm,
                    "collective": schedule.collective,
                    "ranks": schedule.world_size,
                    "chunks": schedule.chunks,
                    "steps": schedule.steps,
                    "moves": moves,
                    "bytes_sent": traffic.sent,
                    "bytes_received": traffic.received,
                    "same_bits": proof.same_bits,
                    "right": right,
                }
            )
        )
        return 0 if right else 1
    print(schedule)
    if args.show:
        print(f"\n{show(schedule)}")
    print(
        f"\nproved: every rank's part counts once, {'the same bits on all ranks' if proof.same_bits else 'bits differ'}"
    )
    print(
        f"{elements} float64 a rank: {bytes_text(max(traffic.sent))} sent by the busiest sender, "
        f"{bytes_text(traffic.busiest)} through the busiest rank, {bytes_text(traffic.total)} in all"
    )
    print(f"played on whole numbers: {'equal to' if right else 'DIFFERENT FROM'} what the collective promises")
    return 0 if right else 1


def _play(schedule: Schedule, elements: int, op: str) -> bool:
    import numpy as np

    from ddpx.simulate import reference
    from ddpx.simulate import simulate as play

    n = schedule.world_size
    numel = elements - elements % n if schedule.collective == "all_to_all" else elements
    op = op if "reduce" in schedule.collective else "sum"  # the others add nothing
    inputs = [(np.arange(numel) * 7 + rank * 3) % 3 + 1.0 for rank in range(n)]
    outputs = play(schedule, inputs, op).outputs
    expected = reference(schedule.collective, inputs, op, schedule.root)
    return all(
        promised is None or (given is not None and np.array_equal(given, promised))
        for given, promised in zip(outputs, expected, strict=True)
    )


# ---- cost and whatif -------------------------------------------------------------------------------------------------


def _add_fabric(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce", help="(%(default)s)")
    parser.add_argument("--ranks", type=quantity(ranks), required=True, metavar="N")
    parser.add_argument("--bytes", type=quantity(parse_bytes), required=True, metavar="SIZE", help="such as 25MiB")
    parser.add_argument("--alpha", type=quantity(parse_seconds), default=10e-6, metavar="TIME", help="a message (10us)")
    parser.add_argument(
        "--bandwidth", type=quantity(parse_bandwidth), default=50e9, metavar="RATE", help="of a link (50GB/s)"
    )
    parser.add_argument(
        "--adding", type=quantity(parse_bandwidth), metavar="RATE", help="bytes a rank adds in a second (no limit)"
    )
    parser.add_argument("--local-size", type=int, default=1, metavar="P", help="ranks of a node, for hierarchical")
    parser.add_argument("--local-alpha", type=quantity(parse_seconds), metavar="TIME", help="a message within a node")
    parser.add_argument("--local-bandwidth", type=quantity(parse_bandwidth), metavar="RATE", help="within a node")
    parser.add_argument("--json", action="store_true", help="the same as JSON, nothing else")


def _fabric(args: argparse.Namespace) -> Fabric:
    return Fabric(
        args.alpha,
        1 / args.bandwidth,
        1 / args.adding if args.adding else 0.0,
        args.local_size,
        args.local_alpha,
        1 / args.local_bandwidth if args.local_bandwidth else None,
    )


def cost(argv: Sequence[str]) -> int:
    """What each algorithm sends and how long it takes, by formula, fastest first. Any number of ranks.

    A message of b bytes takes alpha + b / bandwidth; a rank sends one and receives one at the same time.
    """
    parser = Parser("cost", cost.__doc__ or "")
    _add_fabric(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw time against size, with the crossovers")
    args = parser.parse_args(argv)
    if args.local_size < 1:
        parser.error(f"--local-size cannot be {args.local_size}")
    fabric = _fabric(args)
    rows: list[dict[str, Any]] = []
    for choice in compare(args.ranks, args.bytes, fabric, args.collective):
        form = closed_form(args.collective, choice.algorithm, args.ranks, args.bytes, **choice.options)
        rows.append(
            {
                "algorithm": choice.algorithm,
                "options": dict(choice.options),
                "steps": form.steps,
                "bytes_sent": form.sent,
                "bytes_busiest": form.busiest,
                "bytes_total": form.total,
                "seconds": choice.time.total_s,
                "latency_s": choice.time.latency_s,
                "bandwidth_s": choice.time.bandwidth_s,
                "compute_s": choice.time.compute_s,
                "dominant": choice.time.dominant,
            }
        )
    plain = [row["algorithm"] for row in rows if row["algorithm"] != "hierarchical"]
    best = [pair for pair in best_by_size(args.ranks, fabric, plain, args.collective) if pair[0] < MAX_BYTES]
    if args.png is not None:
        from ddpx import crossover

        what = f"{args.collective} over {args.ranks} ranks, {_fabric_text(fabric)}"
        try:
            crossover.draw(args.png, args.collective, plain, args.ranks, fabric, what)
        except OSError as error:
            parser.error(f"cannot write {args.png}: {error.strerror}")
    if args.json:
        print(json.dumps({"rows": rows, "fastest_from_bytes": best}))
        return 0
    print(f"{args.collective} of {bytes_text(args.bytes)} over {args.ranks} ranks, {_fabric_text(fabric)}")
    lines = [["algorithm", "time", "steps", "sent by a rank", "busiest rank", "mostly"]]
    for row in rows:
        name = row["algorithm"] + "".join(f" {key.replace('_', ' ')} {value}" for key, value in row["options"].items())
        sizes = [bytes_text(row["bytes_sent"]), bytes_text(row["bytes_busiest"])]
        lines.append([name, seconds_text(row["seconds"]), str(row["steps"]), *sizes, row["dominant"]])
    print(table(lines))
    changes = ", then ".join(f"{name}" + (f" from {bytes_text(size)}" if size else "") for size, name in best)
    print(f"fastest by size: {changes}")
    return 0


def whatif(argv: Sequence[str]) -> int:
    """What slow ranks and slow links do to each algorithm, played message by message; least hurt first.

    --slow-rank 3:5 makes rank 3 send, receive and add 5 times slower; --slow-link 0-1:5 what rank 0 sends to rank 1.
    """
    from ddpx.simulate import effects

    parser = Parser("whatif", whatif.__doc__ or "")
    _add_fabric(parser)
    parser.add_argument("--slow-rank", action="append", default=[], metavar="R:FACTOR", help="may be repeated")
    parser.add_argument("--slow-link", action="append", default=[], metavar="A-B:FACTOR", help="may be repeated")
    args = parser.parse_args(argv)
    if args.ranks > MAX_RANKS:
        parser.error(f"{args.ranks} ranks are too many to play message by message; up to {MAX_RANKS} are not")
    slow_ranks: dict[int, float] = {}
    slow_links: dict[tuple[int, int], float] = {}
    try:
        for text in args.slow_rank:
            rank, factor = text.split(":")
            slow_ranks[int(rank)] = float(factor)
        for text in args.slow_link:
            link, factor = text.split(":")
            src, dst = link.split("-")
            slow_links[int(src), int(dst)] = float(factor)
    except ValueError:
        parser.error(f"'{text}' is not of the form 3:5 (rank:factor) or 0-1:5 (from-to:factor)")
    named = {*slow_ranks, *(rank for link in slow_links for rank in link)}
    if not named:
        parser.error("name a --slow-rank or a --slow-link")
    if outside := sorted(rank for rank in named if not 0 <= rank < args.ranks):
        parser.error(f"rank {outside[0]} is not among {args.ranks} ranks, 0 to {args.ranks - 1}")
    found = effects(args.ranks, args.bytes, _fabric(args), slow_ranks, slow_links, args.collective)
    if args.json:
        rows = [{"algorithm": e.algorithm, "healthy_s": e.healthy_s, "slow_s": e.slow_s} for e in found]
        print(json.dumps({"rows": rows}))
        return 0
    slow = [f"rank {rank} {factor:g}× slower" for rank, factor in slow_ranks.items()]
    slow += [f"link {src} to {dst} {factor:g}× slower" for (src, dst), factor in slow_links.items()]
    print(f"{args.collective} of {bytes_text(args.bytes)} over {args.ranks} ranks, {_fabric_text(_fabric(args))}")
    print(f"with {', '.join(slow)}:")
    lines = [["algorithm", "healthy", "then", "factor"]]
    lines += [[e.algorithm, seconds_text(e.healthy_s), seconds_text(e.slow_s), f"{e.factor:.2f}×"] for e in found]
    print(table(lines))
    return 0


def _fabric_text(fabric: Fabric) -> str:
    text = f"alpha {seconds_text(fabric.alpha_s)}, {bandwidth_text(1 / fabric.beta_s_per_byte)}"
    return text if fabric.local_size == 1 else f"{text}, nodes of {fabric.local_size}"


# ---- The others, imported when they are wanted -----------------------------------------------------------------------


def bench(argv: Sequence[str]) -> int:
    from ddpx import bench as module

    parser = Parser("bench", module.__doc__ or "")
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return module.run(args)
    except ValueError as error:
        parser.error(str(error))


def trace(argv: Sequence[str]) -> int:
    from ddpx.trace import cli

    parser = Parser("trace", cli.__doc__ or "")
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "simulate": simulate,
    "cost": cost,
    "whatif": whatif,
    "bench": bench,
    "trace": trace,
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if not argv or argv[0] not in COMMANDS:
        what = f"unknown command '{argv[0]}'" if argv else "no command"
        print(f"python -m ddpx: {what}; known: {', '.join(COMMANDS)} (see --help)", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main())
