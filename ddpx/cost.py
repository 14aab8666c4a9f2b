"""What a collective sends and how long it should take: counted from its schedule, or by formula for any world size.

The model: a message of b bytes takes alpha + b * beta; adding b bytes takes b * gamma. A rank sends and receives at the
same time, but all that it sends in a step passes one port, and all that it receives another. What a rank sends to one
peer in one step is one message. Two ways lead to a time:

- `timeline` plays a schedule message by message; a rank begins a step when its own part of the last one is done.
  Slow ranks and slow links go in here. For up to about 1,000 ranks.
- `predict` adds up the rounds of the algorithm's closed form (`algorithms.closed_form`); at once for 100,000 ranks.

On a fabric of one kind of link they agree, but for double_tree, where the formula takes the pipeline as full all the
time and is up to a quarter too slow. Where some hops of a round stay in a node and others leave it, it prices all of
them as leaving.

Note: processors as the network. Where ranks send each other messages on one host, no wire is busy but its processors,
and `predict` takes another sum (`timeline` doesn't know it; it plays ranks that have their own). A message costs alpha
at each end, and it matters little which rank pays: n ranks on c processors are through with all their ends no sooner
than after messages * 2 alpha / c, nor before the steps of the longest chain, alpha each. Bytes a rank passes one by
one, in and out: beta for those of the busiest rank. Long chunks travel in segments, so a step begins while the last
one is under way, and of the bytes of the chain only one segment of each step, a quarter, comes on top; all of them
where messages are of several chunks, which are not cut (`ddpx.messages`). What is added costs gamma, for the mean
rank's, longer where ranks wait for a processor. So on few processors tree, which sends the fewest messages, is the best
for small buffers, and ring, which has no busiest rank, for large ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpx.algorithms.closed_form import FORMS, Form, Round
from ddpx.schedule import Schedule, chunk_bounds

# Numbers of segments that `choose` tries for pipelined algorithms.
SEGMENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PIPELINED = ("double_tree", "chain")
SEGMENTS_ON_THE_WAY = 4  # in which ddpx.messages lets a long chunk travel


@dataclass(frozen=True, slots=True)
class Fabric:
    """What links cost. With `local_size` > 1, consecutive ranks share a node, whose inner links have their own numbers.

    `nics`: network ports of a node, shared by its ranks (0: one for each rank). `concurrent`: the messages of one step
    start together, so that a rank pays alpha once a step: one-sided reads. `ranks_per_core`, if not 0: messages cost
    processor time, and so many ranks share a processor; see Note: processors as the network.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    local_size: int = 1
    local_alpha_s: float | None = None
    local_beta_s_per_byte: float | None = None
    nics: int = 0
    concurrent: bool = False
    ranks_per_core: float = 0.0

    def link(self, local: bool) -> tuple[float, float]:
        """(alpha, beta) inside a node or between nodes; inside is like between where not given."""
        if not local:
            return self.alpha_s, self.beta_s_per_byte
        alpha = self.alpha_s if self.local_alpha_s is None else self.local_alpha_s
        beta = self.beta_s_per_byte if self.local_beta_s_per_byte is None else self.local_beta_s_per_byte
        return alpha, beta


# ---- Counted from a schedule -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What crosses between ranks, in bytes by rank; `messages` are those sent, empty ones not counted."""

    steps: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sent)

    @property
    def busiest(self) -> int:
        """Bytes sent and received together by the rank that handles most."""
        return max(sent + received for sent, received in zip(self.sent, self.received, strict=True))


def count(schedule: Schedule, numel: int, itemsize: int = 1) -> Traffic:
    """Count what `schedule` sends for `numel` elements of `itemsize` bytes.

    `numel` is the size of what the schedule's chunks cut up: of a rank's buffer, except in all_to_all, whose chunks are
    those of all ranks together.
    """
    n = schedule.world_size
    sent, received, messages = [0] * n, [0] * n, [0] * n
    for step in _transfers(schedule, numel, itemsize):
        for (src, dst), nbytes in step.sizes.items():
            sent[src] += nbytes
            received[dst] += nbytes
            messages[src] += 1
    return Traffic(schedule.steps, tuple(sent), tuple(received), tuple(messages))


def timeline(
    schedule: Schedule,
    numel: int,
    itemsize: int,
    fabric: Fabric,
    slow_ranks: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
) -> tuple[float, ...]:
    """When each rank finishes, in seconds after all have started together.

    `slow_ranks={3: 5.0}` makes everything that rank 3 sends, receives and adds take 5 times as long;
    `slow_links={(0, 1): 5.0}` what rank 0 sends to rank 1.
    """
    n = schedule.world_size
    slow = [1.0] * n
    for rank, factor in (slow_ranks or {}).items():
        slow[rank] = factor
    links, ports = slow_links or {}, _Ports(n, fabric)
    done = [0.0] * n
    free: dict[int, float] = {}  # from when on; of the ports that ranks share, which may still be busy
    for step in _transfers(schedule, numel, itemsize):
        # All messages of a step share a port fairly, so they are through together: [begin, latency, transfer] by port.
        busy: dict[int, list[float]] = {}
        messages = []
        for (src, dst), nbytes in step.sizes.items():
            local = ports.node[src] == ports.node[dst]
            alpha, beta = fabric.link(local)
            factor = max(slow[src], slow[dst], links.get((src, dst), 1.0))
            latency, transfer = alpha * factor, nbytes * beta * factor
            out, into = ports.between(src, dst, local)
            ready = done[src]
            both = ready if ready > done[dst] else done[dst]
            for names, begin in ((out, ready), (into, both)):
                for name in names:
                    use = busy.get(name)
                    if use is None:
                        busy[name] = [begin, latency, transfer]
                    else:
                        use[0] = min(use[0], begin)
                        use[1] = max(use[1], latency) if fabric.concurrent else use[1] + latency
                        use[2] += transfer
            messages.append((src, dst, both + latency + transfer, out, into))
        ends = {}
        for name, (begin, latency, transfer) in busy.items():
            ends[name] = max(begin, free.get(name, 0.0)) + latency + transfer
            if name >= ports.shared:
                free[name] = ends[name]
        sent, landed = {r: done[r] for r in step.ranks}, {r: done[r] for r in step.ranks}
        for src, dst, alone, out, into in messages:
            left = ends[out[0]] if len(out) == 1 else max(ends[out[0]], ends[out[1]])
            sent[src] = max(sent[src], left)
            landed[dst] = max(landed[dst], alone, left, *(ends[name] for name in into))
        for rank in step.ranks:
            adding = step.reduced.get(rank, 0) * fabric.gamma_s_per_byte * slow[rank]
            done[rank] = max(sent[rank], landed[rank] + adding)
    return tuple(done)


class _Ports:
    """Ports by number: of rank r, r to send and n + r to receive; from `shared` on, those of nodes."""

    def __init__(self, world_size: int, fabric: Fabric) -> None:
        n, size, nics = world_size, fabric.local_size, fabric.nics
        self.node = [rank // size for rank in range(n)]
        self.shared = 2 * n
        self._own = [((rank,), (n + rank,)) for rank in range(n)]
        # To other nodes a message also passes a port of its node, which local ranks may share.
        place = [2 * (self.node[rank] * nics + rank % size % nics) if nics else 0 for rank in range(n)]
        self._far = [((r, self.shared + place[r]), (n + r, self.shared + place[r] + 1)) for r in range(n)]
        self._nics = nics

    def between(self, src: int, dst: int, local: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ports that a message leaves by and those it comes in by."""
        if local or not self._nics:
            return self._own[src][0], self._own[dst][1]
        return self._far[src][0], self._far[dst][1]


def slowdown(
    schedule: Schedule,
    numel: int,
    itemsize: int,
    fabric: Fabric,
    slow_ranks: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
) -> float:
    """How many times longer the collective takes with these slow ranks and links."""
    healthy = max(timeline(schedule, numel, itemsize, fabric))
    return max(timeline(schedule, numel, itemsize, fabric, slow_ranks, slow_links)) / healthy if healthy else 1.0


@dataclass(slots=True)
class _Step:
    """What crosses in one step: bytes by (src, dst), bytes added by rank, and the ranks that take part."""

    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    reduced: dict[int, int] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


def _transfers(schedule: Schedule, numel: int, itemsize: int) -> Iterable[_Step]:
    bounds = chunk_bounds(numel, schedule.chunks)
    for moves in schedule.by_step():
        step = _Step()
        for m in moves:
            nbytes = (bounds[m.hi - 1][1] - bounds[m.lo][0]) * itemsize
            if nbytes == 0:
                continue
            for src in m.srcs:
                if src != m.dst:
                    step.sizes[src, m.dst] = step.sizes.get((src, m.dst), 0) + nbytes
            step.ranks.update(m.srcs)
            step.ranks.add(m.dst)
            if len(m.srcs) > 1:
                step.reduced[m.dst] = step.reduced.get(m.dst, 0) + nbytes * (len(m.srcs) - 1)
        yield step


# ---- By formula ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, by what they are spent on: alpha, beta and gamma terms."""

    latency_s: float
    bandwidth_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.latency_s + self.bandwidth_s + self.compute_s

    @property
    def dominant(self) -> str:
        """The largest term: latency, bandwidth or compute."""
        terms = {"latency": self.latency_s, "bandwidth": self.bandwidth_s, "compute": self.compute_s}
        return max(terms, key=terms.__getitem__)


def closed_form(collective: str, algorithm: str, world_size: int, nbytes: float, **options: Any) -> Form:
    """Steps and bytes of an algorithm by formula; `nbytes` is one rank's buffer. ValueError for an unknown name."""
    if collective not in FORMS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(FORMS)}.")
    if algorithm not in FORMS[collective]:
        known = ", ".join(FORMS[collective])
        raise ValueError(f"unknown algorithm {algorithm!r} for {collective}; known: {known}.")
    if world_size < 1 or nbytes < 0:
        raise ValueError(f"world_size must be at least 1 and nbytes at least 0, got {world_size} and {nbytes}.")
    return FORMS[collective][algorithm](world_size, nbytes, **options)


def predict(collective: str, algorithm: str, world_size: int, nbytes: float, fabric: Fabric, **options: Any) -> Time:
    """The time of an algorithm on `fabric` by formula, whatever the number of ranks.

    hierarchical takes `fabric.local_size` where `local_size` is not given and the fabric has nodes.
    """
    if algorithm == "hierarchical" and "local_size" not in options and fabric.local_size > 1:
        options = {**options, "local_size": fabric.local_size}
    form = closed_form(collective, algorithm, world_size, nbytes, **options)
    if fabric.ranks_per_core:
        return _on_processors(form, world_size, fabric)
    latency, bandwidth, compute = 0.0, 0.0, 0.0
    for r in form.rounds:
        alpha, beta, share = _round_link(r, world_size, fabric)
        messages = 1 if fabric.concurrent else r.messages
        latency += r.times * share * messages * alpha
        bandwidth += r.times * share * r.nbytes * beta
        compute += r.times * r.reduced * fabric.gamma_s_per_byte
    return Time(latency, bandwidth, compute)


def _on_processors(form: Form, world_size: int, fabric: Fabric) -> Time:
    """See Note: processors as the network."""
    ends = 2 * form.posted / world_size * fabric.ranks_per_core
    waiting = max(1.0, fabric.ranks_per_core)
    alone = form.critical_bytes if form.whole else form.critical_bytes / SEGMENTS_ON_THE_WAY
    return Time(
        fabric.alpha_s * max(form.steps, ends),
        fabric.beta_s_per_byte * (form.busiest + alone),
        fabric.gamma_s_per_byte * form.added / world_size * waiting,
    )


def _round_link(r: Round, world_size: int, fabric: Fabric) -> tuple[float, float, float]:
    """(alpha, beta, how many ranks share a port) of a round."""
    size = fabric.local_size
    local = world_size <= size or (r.span > 0 and size % r.span == 0)
    crossing = min(size, world_size) if r.all_cross else 1
    share = max(1.0, crossing / fabric.nics) if fabric.nics and not local else 1.0
    return *fabric.link(local), share


# ---- Choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """An algorithm with its options and its predicted time."""

    algorithm: str
    options: Mapping[str, Any]
    time: Time


def compare(
    world_size: int,
    nbytes: float,
    fabric: Fabric,
    collective: str = "all_reduce",
    algorithms: Iterable[str] | None = None,
) -> list[Choice]:
    """All algorithms for one size, fastest first, pipelined ones with the best number of segments.

    hierarchical is among them if the fabric has nodes that all ranks fill.
    """
    choices = []
    for algorithm in algorithms or FORMS[collective]:
        options: list[dict[str, Any]] = [{}]
        if algorithm == "hierarchical":
            if not 1 < fabric.local_size < world_size or world_size % fabric.local_size:
                continue
            options = [{"local_size": fabric.local_size}]
        elif algorithm in _PIPELINED:
            options = [{"segments": segments} for segments in SEGMENTS]
        times = [Choice(algorithm, o, predict(collective, algorithm, world_size, nbytes, fabric, **o)) for o in options]
        choices.append(min(times, key=lambda choice: choice.time.total_s))
    return sorted(choices, key=lambda choice: choice.time.total_s)


def choose(
    world_size: int,
    nbytes: float,
    fabric: Fabric,
    collective: str = "all_reduce",
    algorithms: Iterable[str] | None = None,
) -> Choice:
    """The fastest algorithm by the model. Choose when plans are made: at run time, another choice means other bits."""
    choices = compare(world_size, nbytes, fabric, collective, algorithms)
    if not choices:
        raise ValueError(f"none of the algorithms can run on {world_size} ranks of this fabric.")
    return choices[0]


def crossover(
    a: str, b: str, world_size: int, fabric: Fabric, collective: str = "all_reduce", **options: Any
) -> float | None:
    """The size in bytes at which `a` and `b` take equally long; None if one is faster at every size above 0.

    Both times are straight lines in the size, so the answer is exact. `options` go to both.
    """
    (a0, a1), (b0, b1) = (_line(name, world_size, fabric, collective, options) for name in (a, b))
    if a1 == b1:
        return None
    size = (b0 - a0) / (a1 - b1)
    return size if size > 0 else None


def best_by_size(
    world_size: int,
    fabric: Fabric,
    algorithms: Sequence[str],
    collective: str = "all_reduce",
) -> list[tuple[float, str]]:
    """(from this size on, in bytes, this algorithm is the fastest), ascending; pipelined ones with default segments."""
    lines = {name: _line(name, world_size, fabric, collective, {}) for name in algorithms}
    size, name = 0.0, min(lines, key=lambda name: lines[name])
    best = [(size, name)]
    while True:
        intercept, slope = lines[name]
        meets = [
            ((other0 - intercept) / (slope - other1), other1, other)
            for other, (other0, other1) in lines.items()
            if other1 < slope
        ]
        if not meets:
            return best
        size, _, name = min(meets)
        best.append((max(size, 0.0), name))


def _line(
    algorithm: str, world_size: int, fabric: Fabric, collective: str, options: Mapping[str, Any]
) -> tuple[float, float]:
    """(seconds at size 0, seconds per byte)."""
    taken = {key: value for key, value in options.items() if key != "segments" or algorithm in _PIPELINED}
    at_one = predict(collective, algorithm, world_size, 1.0, fabric, **taken)
    return at_one.latency_s, at_one.bandwidth_s + at_one.compute_s


# ---- Fitting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One measurement: a collective of `nbytes` per rank took `seconds`."""

    algorithm: str
    world_size: int
    nbytes: int
    seconds: float
    collective: str = "all_reduce"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """Links that explain measurements; `residuals[i]` is (predicted - measured) / measured of sample i."""

    fabric: Fabric
    residuals: tuple[float, ...]

    @property
    def rms(self) -> float:
        return math.sqrt(sum(r * r for r in self.residuals) / len(self.residuals))

    @property
    def worst(self) -> float:
        """The residual farthest from 0."""
        return max(self.residuals, key=abs)


def fit(samples: Sequence[Sample], like: Fabric | None = None) -> Fit:
    """The alpha and beta that make the sum of squared relative errors smallest; neither is below 0.

    Relative errors, so that microseconds count as much as seconds. All else (gamma, concurrent) is taken from `like`,
    whose links must be of one kind. Raises ValueError if the samples cannot tell alpha from beta: fewer than two sizes.
    """
    like = like or Fabric(0.0, 0.0)
    if like.local_size != 1:
        raise ValueError("fit finds one alpha and one beta: fit links inside nodes and between them separately.")
    if not samples or any(sample.seconds <= 0 for sample in samples):
        raise ValueError("fit needs measurements that took longer than 0 s.")
    only_alpha, only_beta = (
        replace(like, alpha_s=1.0, beta_s_per_byte=0.0),
        replace(like, alpha_s=0.0, beta_s_per_byte=1.0),
    )
    rows = []
    for s in samples:
        messages = _predicted(s, only_alpha).latency_s
        of_bytes = _predicted(s, only_beta)
        rows.append((messages / s.seconds, of_bytes.bandwidth_s / s.seconds, 1 - of_bytes.compute_s / s.seconds))
    # Normal equations of x * alpha + y * beta = z.
    xx, xy, yy = (sum(p * q for p, q in pairs) for pairs in _pairs(rows))
    xz, yz = sum(x * z for x, _, z in rows), sum(y * z for _, y, z in rows)
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:
        raise ValueError("fit needs samples of at least two sizes, to tell alpha from beta.")
    alpha, beta = (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant
    if alpha < 0:
        alpha, beta = 0.0, max(0.0, yz / yy)
    elif beta < 0:
        alpha, beta = max(0.0, xz / xx), 0.0
    fabric = replace(like, alpha_s=alpha, beta_s_per_byte=beta)
    residuals = tuple(_predicted(s, fabric).total_s / s.seconds - 1 for s in samples)
    return Fit(fabric, residuals)


def _pairs(rows: Sequence[tuple[float, float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(x, x) for x, _, _ in rows], [(x, y) for x, y, _ in rows], [(y, y) for _, y, _ in rows]


def _predicted(sample: Sample, fabric: Fabric) -> Time:
    return predict(sample.collective, sample.algorithm, sample.world_size, sample.nbytes, fabric, **sample.options)
