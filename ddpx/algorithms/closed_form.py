"""What each algorithm sends, as formulas: answers for 100,000 ranks without building a schedule.

For n ranks and a buffer of S bytes, every formula states five things: the rounds that follow one another (whose sum is
the time), the bytes of the rank that sends most, the bytes sent and received by the busiest rank, and over all ranks
their bytes and their messages. `cost.count` reads the same numbers off a schedule, and tests hold the two against each
other. S / n is taken as a real number here, where a schedule has whole elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """`times` rounds, one after the other, in each of which the busiest rank handles `messages` of `nbytes` together,
    then adds `reduced` bytes.

    Partners lie in one aligned block of `span` ranks (0: anywhere), so that a node of a multiple of that many ranks
    keeps the round to itself. `all_cross`: all ranks of a node, not just one, send to other nodes.
    """

    times: int
    messages: int
    nbytes: float
    reduced: float = 0.0
    span: int = 0
    all_cross: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The closed form of one algorithm at one size. In all_to_all, S is the buffer of one rank."""

    rounds: tuple[Round, ...]
    steps: int
    sent: float  # bytes, by the rank that sends most
    busiest: float  # bytes sent and received by the rank that handles most
    total: float  # bytes, over all ranks
    posted: int  # messages, over all ranks
    added: float = 0.0  # bytes added up, over all ranks
    whole: bool = False  # some move is of several chunks (in hierarchical: with a ring between nodes)

    @property
    def messages(self) -> int:
        """Messages on the critical path, each of which costs one alpha."""
        return sum(r.times * r.messages for r in self.rounds)

    @property
    def critical_bytes(self) -> float:
        """Bytes on the critical path, each of which costs one beta."""
        return sum(r.times * r.nbytes for r in self.rounds)

    @property
    def reduced_bytes(self) -> float:
        """Bytes added on the critical path, each of which costs one gamma."""
        return sum(r.times * r.reduced for r in self.rounds)


def _form(rounds: Iterable[Round], sent: float, busiest: float, total: float, posted: int, added: float = 0.0) -> Form:
    kept = tuple(r for r in rounds if r.times)
    return Form(kept, sum(r.times for r in kept), sent, busiest, total, posted, added)


def _one_after_the_other(*forms: Form) -> Form:
    """Of parts in which the same rank is the busiest."""
    return Form(
        tuple(r for form in forms for r in form.rounds),
        sum(form.steps for form in forms),
        sum(form.sent for form in forms),
        sum(form.busiest for form in forms),
        sum(form.total for form in forms),
        sum(form.posted for form in forms),
        sum(form.added for form in forms),
        any(form.whole for form in forms),
    )


def _adding(form: Form) -> Form:
    """The same rounds run backwards: what was copied is added."""
    rounds = tuple(replace(r, reduced=r.nbytes) for r in form.rounds)
    return replace(form, rounds=rounds, added=form.total)


def _times(copies: int, form: Form) -> Form:
    """As many at once, on ranks of their own."""
    return replace(form, total=copies * form.total, posted=copies * form.posted, added=copies * form.added)


def _levels(n: int) -> int:
    return (n - 1).bit_length()


def set_bits_below(n: int) -> int:
    """Set bits in all of 0, 1, ..., n-1 together: what Bruck's all-to-all and a binomial scatter move, in chunks."""
    return sum(_with_bit(n, bit) for bit in range(n.bit_length()))


def _with_bit(n: int, bit: int) -> int:
    """How many of 0, 1, ..., n-1 have this bit set."""
    return (n >> (bit + 1) << bit) + max(0, n % (2 << bit) - (1 << bit))


# ---- Reduce-scatter and all-gather: every rank gets n-1 chunks of S/n, so (n-1)S in all ------------------------------


def _ring_all_gather(n: int, s: float) -> Form:
    part = s * (n - 1) / n
    return _form([Round(n - 1, 1, s / n)], part, 2 * part, s * (n - 1), n * (n - 1))


def _direct_all_gather(n: int, s: float) -> Form:
    part = s * (n - 1) / n
    rounds = [Round(int(n > 1), n - 1, part, all_cross=True)]
    return _form(rounds, part, 2 * part, s * (n - 1), n * (n - 1))


def _circulant_all_gather(n: int, s: float) -> Form:
    part = s * (n - 1) / n
    hops = [1 << i for i in range(_levels(n))]
    rounds = [Round(1, 1, min(h, n - h) * s / n, all_cross=True) for h in hops]
    form = _form(rounds, part, 2 * part, s * (n - 1), n * len(hops))
    return replace(form, whole=n > 3)


def _doubling_all_gather(n: int, s: float) -> Form:
    core = 1 << (n.bit_length() - 1)
    extra = n - core
    hops = [1 << i for i in range(core.bit_length() - 1)]
    # Rank 0 is the busiest: below 2 * extra, a core rank carries two chunks.
    blocks = [(hop + min(hop, extra)) * s / n for hop in hops]
    rounds = [Round(int(extra > 0), 1, s / n)]
    rounds += [
        Round(1, 1, block, span=0 if extra else 2 * hop, all_cross=True)
        for hop, block in zip(hops, blocks, strict=True)
    ]
    rounds.append(Round(int(extra > 0), 1, s * (n - 1) / n))
    sent = sum(blocks) + (s * (n - 1) / n if extra else 0)
    # At each doubling step rank 0 gets the neighbouring block, which is smaller where the doubled chunks end.
    got = [(hop + min(hop, max(0, extra - hop))) * s / n for hop in hops]
    posted = core * len(hops) + 2 * extra
    busiest = sent + sum(got) + (s / n if extra else 0)
    return replace(_form(rounds, sent, busiest, s * (n - 1), posted), whole=n > 2)


def _backwards(all_gather: Callable[[int, float], Form]) -> Callable[[int, float], Form]:
    return lambda n, s: _adding(all_gather(n, s))


def _halving_reduce_scatter(n: int, s: float) -> Form:
    form = _adding(_doubling_all_gather(n, s))
    core = 1 << (n.bit_length() - 1)
    # Backwards rank 0 sends what it got: the busiest sender is then the rank that hands in all but its own chunk.
    return form if n == core else replace(form, sent=max(s * (n - 1) / n, form.busiest - form.sent))


# ---- Broadcast and reduce --------------------------------------------------------------------------------------------


def _tree_broadcast(n: int, s: float) -> Form:
    k = _levels(n)
    return _form([Round(1, 1, s, span=2 << i) for i in reversed(range(k))], k * s, k * s, (n - 1) * s, n - 1)


def _tree_reduce(n: int, s: float) -> Form:
    return replace(_adding(_tree_broadcast(n, s)), sent=s if n > 1 else 0.0)


def _direct_broadcast(n: int, s: float) -> Form:
    all_of_it = (n - 1) * s
    return _form([Round(int(n > 1), n - 1, all_of_it)], all_of_it, all_of_it, all_of_it, n - 1)


def _direct_reduce(n: int, s: float) -> Form:
    return replace(_adding(_direct_broadcast(n, s)), sent=s if n > 1 else 0.0)


def _chain_broadcast(n: int, s: float, segments: int = 8) -> Form:
    if n == 1:
        return _form([], 0, 0, 0, 0)
    rounds = [Round(n - 2 + segments, 1, s / segments)]
    return _form(rounds, s, 2 * s if n > 2 else s, (n - 1) * s, (n - 1) * segments)


def _chain_reduce(n: int, s: float, segments: int = 8) -> Form:
    return _adding(_chain_broadcast(n, s, segments))


def _double_tree_broadcast(n: int, s: float, segments: int = 4) -> Form:
    """At every step an inner rank of one tree feeds two children and gets a segment of each tree, at most."""
    if n == 1:
        return _form([], 0, 0, 0, 0)
    steps = (n - 1).bit_length() + segments - 1
    busiest = {2: s, 3: 1.5 * s}.get(n, 2 * s)
    posted = min(2, n - 1) * (n - 1) * segments
    return _form([Round(steps, min(2, n - 1), s / segments)], s, busiest, (n - 1) * s, posted)


def _double_tree_reduce(n: int, s: float, segments: int = 4) -> Form:
    return _adding(_double_tree_broadcast(n, s, segments))


def _scatter_gather_broadcast(n: int, s: float) -> Form:
    part = s * (n - 1) / n
    hops = [1 << i for i in reversed(range(_levels(n)))]
    scatter = [Round(1, 1, min(hop, n - hop) * s / n, span=2 * hop) for hop in hops]
    total = set_bits_below(n) * s / n + (n - 1) * s
    form = _form([*scatter, Round(n - 1, 1, s / n)], 2 * part, 3 * part, total, (n + 1) * (n - 1))
    return replace(form, whole=n > 3)


def _scatter_gather_reduce(n: int, s: float) -> Form:
    forwards = _scatter_gather_broadcast(n, s)
    half = 1 << max(0, _levels(n) - 1)
    gathered = max(n - half, half // 2) * s / n if n > 1 else 0  # by the rank with most ranks below it
    ring = [replace(r, reduced=r.nbytes) for r in forwards.rounds[-1:]]
    up = list(reversed(forwards.rounds[:-1]))
    sent = s * (n - 1) / n + gathered
    rounds = (*ring, *up)
    return replace(forwards, rounds=rounds, sent=sent, added=s * (n - 1))


# ---- All-reduce ------------------------------------------------------------------------------------------------------


def _ring(n: int, s: float) -> Form:
    """2(n-1) steps of S/n: no rank sends more than 2(n-1)/n S, and none can send less."""
    return _one_after_the_other(_adding(_ring_all_gather(n, s)), _ring_all_gather(n, s))


def _tree(n: int, s: float) -> Form:
    """2k rounds of the whole buffer."""
    both = _one_after_the_other(_tree_reduce(n, s), _tree_broadcast(n, s))
    up = tuple(reversed(both.rounds[: _levels(n)]))
    return replace(both, sent=_levels(n) * s, rounds=up + both.rounds[_levels(n) :])


def _double_tree(n: int, s: float, segments: int = 4) -> Form:
    """Reduce and broadcast overlap in steps, but not on the links of an inner rank, which carries both.

    Bytes are exact, the time is an upper bound: ranks have less to do while the pipeline fills and drains. So is the
    number of messages: two segments that go the same way at the same step are one.
    """
    if n == 1:
        return _form([], 0, 0, 0, 0)
    if n == 2:
        return _form([Round(segments + 1, 1, s / segments, s / segments)], s, 2 * s, 2 * s, 2 * segments, added=s)
    height = (n - 1).bit_length()
    up = Round(height + segments - 1, 2, s / segments, s / segments)
    sent = {2: s, 3: 1.5 * s}.get(n, 2 * s)
    steps, added, posted = 2 * height + segments - 1, (n - 1) * s, 4 * (n - 1) * segments
    return Form((up, replace(up, reduced=0.0)), steps, sent, 2 * sent, 2 * added, posted, added)


def _doubling(n: int, s: float) -> Form:
    """log2 n rounds of the whole buffer, in both directions at once; 2 more if n is not a power of two."""
    bits = n.bit_length() - 1
    core, folds = 1 << bits, int(n > 1 << bits)
    swaps = [Round(1, 1, s, s, span=0 if folds else 2 << i, all_cross=True) for i in range(bits)]
    swapped, folded = core * bits, n - core
    sent = (bits + folds) * s
    rounds = [Round(folds, 1, s, s), *swaps, Round(folds, 1, s)]
    posted = swapped + 2 * folded
    return _form(rounds, sent, 2 * sent, posted * s, posted, added=(swapped + folded) * s)


def _halving_doubling(n: int, s: float) -> Form:
    """As a ring in bytes, as two trees in steps; 2 rounds of the whole buffer more if n is not a power of two."""
    core = 1 << (n.bit_length() - 1)
    extra = n - core
    folds = int(extra > 0)
    out = _doubling_all_gather(core, s)
    back = tuple(reversed(_adding(out).rounds))
    swaps = tuple(replace(r, span=0 if folds else r.span) for r in back + out.rounds)
    sent = 2 * out.sent + folds * s
    rounds = [Round(folds, 1, s, s), *swaps, Round(folds, 1, s)]
    total, posted = 2 * out.total + 2 * extra * s, 2 * out.posted + 2 * extra
    return replace(_form(rounds, sent, 2 * sent, total, posted, added=total / 2), whole=n > 2)


def _circulant(n: int, s: float) -> Form:
    return _one_after_the_other(_adding(_circulant_all_gather(n, s)), _circulant_all_gather(n, s))


def _direct(n: int, s: float) -> Form:
    return _one_after_the_other(_adding(_direct_all_gather(n, s)), _direct_all_gather(n, s))


def _parameter_server(n: int, s: float) -> Form:
    """2(n-1) whole messages pass the link of rank 0, each at its own alpha: n-1 in, n-1 out."""
    both = _one_after_the_other(_direct_reduce(n, s), _direct_broadcast(n, s))
    return replace(both, sent=(n - 1) * s)


def _hierarchical(
    n: int, s: float, local_size: int = 8, inner: str = "direct", outer: str = "ring", **outer_options: Any
) -> Form:
    """Equal nodes of p ranks: inside on all of S, between nodes p times at once on S/p (or once on S), inside again."""
    p = min(local_size, n)
    if n % p:
        raise ValueError(f"the closed form needs equal nodes, and {n} is no multiple of local_size {p}.")
    m = n // p

    def inside(collective: str, algorithm: str = inner) -> Form:
        form = FORMS[collective][algorithm](p, s)
        return _times(m, replace(form, rounds=tuple(replace(r, span=r.span or p) for r in form.rounds)))

    def between(size: float, all_cross: bool) -> Form:
        form = FORMS["all_reduce"][outer](m, size, **outer_options)
        return replace(form, rounds=tuple(replace(r, span=0, all_cross=all_cross) for r in form.rounds))

    if inner in FORMS["reduce_scatter"]:
        rails = _times(p, between(s / p, all_cross=True))
        both = _one_after_the_other(inside("reduce_scatter"), rails, inside("all_gather"))
        return replace(both, whole=both.whole or 1 < p < n)
    leaders = between(s, all_cross=False)
    if inner in FORMS["reduce"]:
        whole = _one_after_the_other(inside("reduce"), leaders, inside("broadcast"))
        # In the reduce it is the other ranks that send.
        return replace(whole, sent=leaders.sent + inside("broadcast").sent)
    return _one_after_the_other(inside("all_reduce"), leaders, inside("broadcast", "tree"))


# ---- All-to-all: S is what one rank has for all ----------------------------------------------------------------------


def _direct_all_to_all(n: int, s: float) -> Form:
    return _direct_all_gather(n, s)


def _pairwise_all_to_all(n: int, s: float) -> Form:
    part = s * (n - 1) / n
    return _form([Round(n - 1, 1, s / n, all_cross=True)], part, 2 * part, n * part, n * (n - 1))


def _bruck_all_to_all(n: int, s: float) -> Form:
    rounds = [Round(1, 1, _with_bit(n, bit) * s / n, all_cross=True) for bit in range(_levels(n))]
    sent = set_bits_below(n) * s / n
    return _form(rounds, sent, 2 * sent, n * sent, n * _levels(n))


FORMS: dict[str, dict[str, Callable[..., Form]]] = {
    "all_reduce": {
        "ring": _ring,
        "tree": _tree,
        "double_tree": _double_tree,
        "doubling": _doubling,
        "halving_doubling": _halving_doubling,
        "circulant": _circulant,
        "direct": _direct,
        "parameter_server": _parameter_server,
        "hierarchical": _hierarchical,
    },
    "reduce_scatter": {
        "ring": _backwards(_ring_all_gather),
        "halving_doubling": _halving_reduce_scatter,
        "circulant": _backwards(_circulant_all_gather),
        "direct": _backwards(_direct_all_gather),
    },
    "all_gather": {
        "ring": _ring_all_gather,
        "halving_doubling": _doubling_all_gather,
        "circulant": _circulant_all_gather,
        "direct": _direct_all_gather,
    },
    "broadcast": {
        "tree": _tree_broadcast,
        "double_tree": _double_tree_broadcast,
        "chain": _chain_broadcast,
        "scatter_gather": _scatter_gather_broadcast,
        "direct": _direct_broadcast,
    },
    "reduce": {
        "tree": _tree_reduce,
        "double_tree": _double_tree_reduce,
        "chain": _chain_reduce,
        "scatter_gather": _scatter_gather_reduce,
        "direct": _direct_reduce,
    },
    "all_to_all": {"direct": _direct_all_to_all, "pairwise": _pairwise_all_to_all, "bruck": _bruck_all_to_all},
}
