"""The six collectives as calls: what a user's arguments ask for, and how they run.

A `Call` is plain data, made and checked before anything is sent: a schedule's buffer, what to copy into it before the
schedule runs and what to copy out after. `Calls` runs them: plans are compiled at the first use of a call's text and
kept, together with one staged buffer in the transport's memory that all of them share. Tasks run one at a time, in
order.
"""

import datetime
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpx import check
from ddpx.errors import DeadlineExceeded, Error, Mismatch, PeerFailed
from ddpx.execute import Plan
from ddpx.group import Group, ranks_text
from ddpx.operations import HALVES
from ddpx.program import partial_sums_travel
from ddpx.schedule import Schedule, chunk_bounds
from ddpx.stream import Pending

if TYPE_CHECKING:
    from ddpx.communicator import Communicator

Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType
Copies = tuple[tuple[int, int, torch.Tensor], ...]  # (begin, end, tensor): its elements lie at [begin, end)

OPERATIONS = ("sum", "avg", "max", "min", "product")
MIN_STAGING_BYTES = 64 << 10
MAX_PLANS = 64

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADDABLE = (
    *(torch.float32, torch.float64, *HALVES),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of this rank on a flat buffer of `numel` elements of `dtype`.

    `text` is what all ranks must have in common. `pieces`: elements that each rank owns (all_to_all: by sender, then
    receiver) in collectives where chunks have owners. `in_place`: the buffer, where the user's tensor is one.
    """

    collective: str
    text: str
    dtype: torch.dtype
    numel: int
    loads: Copies
    stores: Copies
    operation: str = "sum"
    divisor: int = 1
    root: int = 0
    algorithm: str | None = None
    pieces: tuple[int, ...] | None = None
    in_place: torch.Tensor | None = None
    agreed: bool = False  # all ranks are known to make it


# ---- From arguments to calls -----------------------------------------------------------------------------------------


def all_reduce(group: Group, tensor: torch.Tensor, op: Op) -> Call:
    operation, divisor, words = _operation(op, tensor, group.world_size)
    wire = _to_add(tensor, operation)
    whole = ((0, wire.numel(), wire),)
    operation = _on_wire(operation, tensor)
    text = f"all_reduce({_words(tensor)}, op={words})"
    return Call("all_reduce", text, wire.dtype, wire.numel(), whole, whole, operation, divisor)


def reduce(group: Group, tensor: torch.Tensor, root: int, op: Op) -> Call:
    operation, divisor, words = _operation(op, tensor, group.world_size)
    wire = _to_add(tensor, operation)
    whole = ((0, wire.numel(), wire),)
    operation = _on_wire(operation, tensor)
    text = f"reduce({_words(tensor)}, dst={group.ranks[root]}, op={words})"
    stores = whole if group.rank == root else ()
    return Call("reduce", text, wire.dtype, wire.numel(), whole, stores, operation, divisor, root)


def broadcast(group: Group, tensor: torch.Tensor, root: int) -> Call:
    wire = _to_copy(tensor)
    whole = ((0, wire.numel(), wire),)
    loads, stores = (whole, ()) if group.rank == root else ((), whole)
    text = f"broadcast({_words(tensor)}, src={group.ranks[root]})"
    return Call("broadcast", text, wire.dtype, wire.numel(), loads, stores, root=root)


def all_gather_into_tensor(group: Group, output: torch.Tensor, source: torch.Tensor) -> Call:
    _same_dtype("all_gather_into_tensor", output, source)
    n, numel = group.world_size, source.numel()
    if output.numel() != n * numel:
        raise ValueError(
            f"all_gather_into_tensor: {n} ranks bring {numel} elements each, but the output has {output.numel()}"
        )
    text = f"all_gather_into_tensor({_words(source)} from each)"
    out, own = _to_copy(output), _to_copy(source)
    per_rank = own.numel()
    loads = ((group.rank * per_rank, (group.rank + 1) * per_rank, own),)
    stores = ((0, out.numel(), out),)
    return Call("all_gather", text, own.dtype, out.numel(), loads, stores, pieces=(per_rank,) * n)


def all_gather(group: Group, tensors: Sequence[torch.Tensor], source: torch.Tensor) -> Call:
    _one_for_each("all_gather", group, tensors)
    _same_dtype("all_gather", source, *tensors)
    if tensors[group.rank].numel() != source.numel():
        raise ValueError(
            f"all_gather: this rank brings {source.numel()} elements, "
            f"but its place in the list has {tensors[group.rank].numel()}"
        )
    text = f"all_gather({', '.join(_words(tensor) for tensor in tensors)})"
    own, wires = _to_copy(source), [_to_copy(tensor) for tensor in tensors]
    stores = _in_a_row(wires)
    begin, end, _ = stores[group.rank]
    pieces = tuple(wire.numel() for wire in wires)
    return Call("all_gather", text, own.dtype, sum(pieces), ((begin, end, own),), stores, pieces=pieces)


def reduce_scatter_tensor(group: Group, output: torch.Tensor, source: torch.Tensor, op: Op) -> Call:
    _same_dtype("reduce_scatter_tensor", output, source)
    n, numel = group.world_size, output.numel()
    if source.numel() != n * numel:
        raise ValueError(
            f"reduce_scatter_tensor: {n} ranks get {numel} elements each, but the input has {source.numel()}"
        )
    operation, divisor, words = _operation(op, source, n)
    out, whole = _to_add(output, operation), _to_add(source, operation)
    per_rank = out.numel()
    return Call(
        "reduce_scatter",
        f"reduce_scatter_tensor({_words(source)}, op={words})",
        out.dtype,
        whole.numel(),
        ((0, whole.numel(), whole),),
        ((group.rank * per_rank, (group.rank + 1) * per_rank, out),),
        _on_wire(operation, source),
        divisor,
        pieces=(per_rank,) * n,
    )


def reduce_scatter(group: Group, output: torch.Tensor, tensors: Sequence[torch.Tensor], op: Op) -> Call:
    _one_for_each("reduce_scatter", group, tensors)
    _same_dtype("reduce_scatter", output, *tensors)
    if tensors[group.rank].numel() != output.numel():
        raise ValueError(
            f"reduce_scatter: the output has {output.numel()} elements, "
            f"but this rank's part in the list {tensors[group.rank].numel()}"
        )
    operation, divisor, words = _operation(op, output, group.world_size)
    text = f"reduce_scatter({', '.join(_words(tensor) for tensor in tensors)}, op={words})"
    out, loads = _to_add(output, operation), _in_a_row([_to_add(tensor, operation) for tensor in tensors])
    begin, end, _ = loads[group.rank]
    pieces = tuple(end - begin for begin, end, _ in loads)
    operation = _on_wire(operation, output)
    return Call(
        "reduce_scatter", text, out.dtype, sum(pieces), loads, ((begin, end, out),), operation, divisor, pieces=pieces
    )


Sizes = tuple[int, ...]  # of the pieces that a rank sends to, or gets from, each rank


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all before its sizes are known: `kind` is what all ranks have in common, in words."""

    kind: str
    outputs: list[torch.Tensor]  # from each rank
    sources: list[torch.Tensor]  # for each rank
    even: bool

    @property
    def sizes(self) -> tuple[Sizes, Sizes]:
        """(elements sent to each rank, elements expected from each rank)."""
        return tuple(t.numel() for t in self.sources), tuple(t.numel() for t in self.outputs)


def all_to_all_single(
    group: Group,
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
) -> Exchange:
    _same_dtype("all_to_all_single", output, source)
    even = output_sizes is None and input_sizes is None
    if even and output.numel() != source.numel():
        raise ValueError(
            f"all_to_all_single: the output has {output.numel()} elements, the input {source.numel()}; "
            "pass output_split_sizes and input_split_sizes where pieces differ"
        )
    n = group.world_size
    kind = f"all_to_all_single({_words(source)})"
    if not even:
        kind = f"all_to_all_single({_name(source.dtype)}{['any', *source.shape[1:]]}, split)".replace("'", "")
    return Exchange(kind, _split(output, output_sizes, n, "output"), _split(source, input_sizes, n, "input"), even)


def all_to_all(group: Group, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Exchange:
    _one_for_each("all_to_all", group, outputs)
    _one_for_each("all_to_all", group, sources)
    _same_dtype("all_to_all", *outputs, *sources)
    kind = f"all_to_all({_name(sources[0].dtype)})"
    return Exchange(kind, [_to_copy(t) for t in outputs], [_to_copy(t) for t in sources], False)


def exchange_sizes(group: Group, exchange: Exchange, notes: torch.Tensor) -> Call:
    """The call that fills `notes`, (n, 2, n) integers, with every rank's `exchange.sizes`."""
    own = torch.tensor(exchange.sizes, device=notes.device)
    begin = group.rank * own.numel()
    numel = notes.numel()
    loads, stores = ((begin, begin + own.numel(), own),), ((0, numel, notes),)
    pieces = (own.numel(),) * group.world_size
    return Call("all_gather", f"the sizes of {exchange.kind}", notes.dtype, numel, loads, stores, pieces=pieces)


def exchange_pieces(group: Group, exchange: Exchange, notes: torch.Tensor | None) -> Call:
    """The all-to-all itself. Raises Mismatch, on every rank, unless each expects what the others send it."""
    n, rank = group.world_size, group.rank
    if notes is None:
        matrix = [exchange.sizes[0]] * n
        text = exchange.kind
    else:
        matrix = [tuple(sends) for sends in notes[:, 0].tolist()]
        _check_sizes(matrix, notes[:, 1].tolist())
        text = f"{exchange.kind} of {[list(row) for row in matrix]}"
    pieces = tuple(size for row in matrix for size in row)
    begins = [0, *accumulate(pieces)]

    def place(src: int, dst: int, tensor: torch.Tensor) -> tuple[int, int, torch.Tensor]:
        return begins[src * n + dst], begins[src * n + dst + 1], tensor

    loads = tuple(place(rank, dst, tensor) for dst, tensor in enumerate(exchange.sources))
    stores = tuple(place(src, rank, tensor) for src, tensor in enumerate(exchange.outputs))
    dtype = exchange.sources[0].dtype
    return Call("all_to_all", text, dtype, begins[-1], loads, stores, pieces=pieces, agreed=notes is not None)


def _check_sizes(sends: Sequence[Sequence[int]], expects: Sequence[Sequence[int]]) -> None:
    for src, sent in enumerate(sends):
        for dst, expected in enumerate(expects):
            if sent[dst] != expected[src]:
                raise Mismatch(
                    f"all_to_all: rank {src} has {sent[dst]} elements for rank {dst}, which expects {expected[src]}. "
                    f"Rank {src} sends {list(sent)}, rank {dst} expects {list(expected)}."
                )


def _split(tensor: torch.Tensor, sizes: Sequence[int] | None, n: int, what: str) -> list[torch.Tensor]:
    """`tensor` as all_to_all_single cuts it along its first dimension: in pieces of `sizes`, or n alike."""
    if tensor.dim() == 0:
        raise ValueError(f"all_to_all_single: the {what} has no dimension to cut along")
    rows = tensor.shape[0]
    if sizes is None:
        if rows % n:
            raise ValueError(f"all_to_all_single: the {what}'s first dimension, {rows}, is not divisible by {n} ranks")
        sizes = [rows // n] * n
    if len(sizes) != n or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all_single: {what} splits {list(sizes)} do not cut {rows} rows in pieces for {n} ranks"
        )
    return list(torch.split(_to_copy(tensor), list(sizes)))


def _operation(op: Op, tensor: torch.Tensor, world_size: int) -> tuple[str, int, str]:
    """(what the plan does, what to divide by afterwards, the name)."""
    name = (op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]).lower()
    if name not in OPERATIONS:
        raise ValueError(f"op is one of {', '.join(OPERATIONS)}, not {op!r}")
    dtype = tensor.dtype
    if dtype not in _ADDABLE and dtype != torch.bool and not dtype.is_complex:
        raise TypeError(f"cannot reduce {_name(dtype)}; known: {', '.join(map(_name, _ADDABLE))}, bool, complex")
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"avg of {_name(dtype)} is not a whole number; use op='sum', or a floating-point tensor")
    if name in ("max", "min", "product") and dtype.is_complex:
        raise TypeError(f"op={name} is not defined for {_name(dtype)} here")
    return ("sum", world_size, name) if name == "avg" else (name, 1, name)


def _on_wire(operation: str, tensor: torch.Tensor) -> str:
    """bools travel as bytes of 0 and 1, whose sum is `or` and whose product is `and`."""
    return {"sum": "max", "product": "min"}.get(operation, operation) if tensor.dtype == torch.bool else operation


def _to_add(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """The same memory in a type that plans add."""
    tensor = _plain(tensor)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def _to_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size: copies need no other types."""
    tensor = _plain(tensor)
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a collective needs tensors, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"collectives take dense tensors, not {tensor.layout}")
    return tensor.detach()


def _one_for_each(what: str, group: Group, tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) != group.world_size:
        raise ValueError(f"{what}: a list of {len(tensors)} tensors for {group.world_size} ranks")


def _same_dtype(what: str, *tensors: torch.Tensor) -> None:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(dtypes) > 1:
        raise ValueError(f"{what}: tensors of different types: {', '.join(map(_name, dtypes))}")


def _in_a_row(tensors: Sequence[torch.Tensor]) -> Copies:
    places, begin = [], 0
    for tensor in tensors:
        places.append((begin, begin + tensor.numel(), tensor))
        begin += tensor.numel()
    return tuple(places)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)}{list(tensor.shape)}"


# ---- Running them ----------------------------------------------------------------------------------------------------


class Work:
    """A collective under way, as torch.distributed's: leave its tensors alone until `wait` has returned."""

    def __init__(self, call: Call, pending: Pending | None, wait: Callable[[Pending, float | None], None]) -> None:
        self._call: Call | None = call  # on CUDA, its tensors must outlive the work on the device
        self._pending, self._wait = pending, wait

    def is_completed(self) -> bool:
        return self._pending is None or self._pending.done()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return once the collective is done (on CUDA: order the current stream after it); raise what went wrong."""
        if self._pending is not None:
            self._wait(self._pending, timeout.total_seconds() if timeout else None)
        self._call = None
        return True


@dataclass(frozen=True, slots=True)
class _Ready:
    """A call's plan and buffer, and its text as a number that peers compare."""

    plan: Plan
    flat: torch.Tensor
    header: int
    staged: bool


class Calls:
    """The calls of one communicator, in order; not for use by several threads at once.

    Memory is bounded: one buffer, the largest call rounded up to a power of two, and the last `MAX_PLANS` plans. All
    ranks make the same calls, so they keep and drop the same ones.
    """

    def __init__(self, communicator: "Communicator", check_each: bool) -> None:
        self._communicator = communicator
        self._check_each = check_each
        self._plans: OrderedDict[str, _Ready] = OrderedDict()
        self._staging: torch.Tensor | None = None
        self._number = 0
        self._last: Pending | None = None
        self._failure: str | None = None

    def run(self, call: Call, async_op: bool = False) -> Work | None:
        """Run a call: now, or with `async_op` on the communication stream. A collective."""
        communicator = self._communicator
        for _, _, tensor in (*call.loads, *call.stores):
            if tensor.device.type != communicator.device.type:
                raise ValueError(
                    f"{call.text}: a tensor on {tensor.device}, but this communicator is for {communicator.device}"
                )
        if self._failure is not None:
            raise Error(f"this communicator failed before, and its ranks may be out of step: {self._failure}")
        self._number += 1
        number = self._number
        if communicator.transport is None:
            _copy_alone(call)
            return Work(call, None, self._wait) if async_op else None
        ready = self._plans.get(call.text)
        if ready is None:
            ready = self._prepare(number, call)
        elif self._check_each:
            self._agree(number, call)
        self._plans.move_to_end(call.text)
        if not async_op and self._idle() and communicator.device.type == "cpu":
            self._execute(number, call, ready)
            return None
        self._last = communicator.start(lambda: self._execute(number, call, ready))
        work = Work(call, self._last, self._wait)
        if async_op:
            return work
        work.wait()
        return None

    def forget(self, flat: torch.Tensor) -> None:
        """Drop the plans that run in `flat`, which is about to be released."""
        storage = flat.untyped_storage().data_ptr()
        for text, ready in list(self._plans.items()):
            if not ready.staged and ready.flat.untyped_storage().data_ptr() == storage:
                del self._plans[text]

    def close(self) -> None:
        self._plans.clear()
        self._staging = None

    def _idle(self) -> bool:
        return self._last is None or self._last.done()

    def _wait(self, pending: Pending, timeout_s: float | None) -> None:
        if timeout_s is None:
            self._communicator.wait(pending)
        else:
            pending.wait(self._communicator.poll, timeout_s)

    # First use

    def _prepare(self, number: int, call: Call) -> _Ready:
        """Agree on the call, find room for it and compile its plan. A collective."""
        communicator = self._communicator
        if self._last is not None:
            self._wait(self._last, None)  # what is agreed on here must not overtake what is under way
        header = int.from_bytes(hashlib.blake2b(call.text.encode(), digest_size=8).digest(), "little")
        communicator.enter(number, header)
        if not call.agreed or self._check_each:
            self._agree(number, call)
        nbytes = call.numel * call.dtype.itemsize
        schedule = communicator.schedule(call.collective, nbytes, call.algorithm, call.root)
        dtype = _wire_dtype(call, schedule)
        staged = call.in_place is None or dtype != call.dtype
        flat = self._room(call.numel, dtype) if staged or call.in_place is None else call.in_place
        places = None if call.pieces is None else _places(call.pieces, schedule.chunks)
        plan = communicator.compile(schedule, flat, call.operation, places)
        ready = self._plans[call.text] = _Ready(plan, flat, header, staged)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return ready

    def _agree(self, number: int, call: Call) -> None:
        try:
            self._number, problem = check.agree(self._communicator.group, number, call.text)
        except Error as error:
            raise self._failed(number, call, error) from error
        if problem:  # all ranks know, and nothing was sent: the next call may be right
            raise Mismatch(problem)

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) of the staged buffer, which grows when it is too small: then the plans in it are gone."""
        nbytes = numel * dtype.itemsize
        if self._staging is None or self._staging.numel() < nbytes:
            for text in [text for text, ready in self._plans.items() if ready.staged]:
                del self._plans[text]
            transport = self._communicator.transport
            assert transport is not None
            if self._staging is not None:
                transport.release(self._staging)
            self._staging = None
            size = max(MIN_STAGING_BYTES, 1 << (nbytes - 1).bit_length())
            self._staging = transport.empty(size, torch.uint8, self._communicator.device)
        return self._staging[:nbytes].view(dtype)

    # Each use

    def _execute(self, number: int, call: Call, ready: _Ready) -> None:
        if self._failure is not None:
            raise Error(f"an earlier call of this communicator failed: {self._failure}")
        communicator = self._communicator
        try:
            communicator.enter(number, ready.header)
            flat = ready.flat
            if ready.staged:
                for begin, end, tensor in call.loads:
                    flat[begin:end].view(tensor.shape).copy_(tensor)
            ready.plan.run()
            if not ready.staged:
                if call.divisor > 1:
                    flat.div_(call.divisor)
                return
            for begin, end, tensor in call.stores:
                result = flat[begin:end]
                if call.divisor > 1:
                    result.div_(call.divisor)
                tensor.copy_(result.view(tensor.shape))
        except Exception as error:
            raise self._failed(number, call, error) from error

    def _failed(self, number: int, call: Call, error: Exception) -> Error:
        """What to raise for `error`, once the peers know and have told in which call they were."""
        communicator, group = self._communicator, self._communicator.group
        absent = communicator.absent()  # before the others hear of it and leave
        self._failure = f"{call.text}: {error}"
        communicator.announce(f"rank {group.rank} failed in {call.text}: {error}{_not_come(absent)}")
        try:
            calls = check.heard(group, number, call.text)
        except RuntimeError:  # the store is gone, with the rank that kept it
            calls = {group.rank: ""}
        if len(set(calls.values())) > 1:
            return Mismatch(check.differing(calls))
        words = str(error) if isinstance(error, PeerFailed) else f"{call.text}: {error}"
        if isinstance(error, DeadlineExceeded | PeerFailed):
            words += _not_come(absent or [rank for rank in range(group.world_size) if rank not in calls])
        return (type(error) if isinstance(error, Error) else Error)(words)


def _not_come(ranks: list[int]) -> str:
    return f" {ranks_text(ranks).capitalize()} did not come to this call." if ranks else ""


def _wire_dtype(call: Call, schedule: Schedule) -> torch.dtype:
    """Halves are averaged, and travel as partial sums, in fp32, so that each result is rounded once."""
    if call.dtype not in HALVES:
        return call.dtype
    travel = schedule.world_size > 2 and partial_sums_travel(schedule)
    return torch.float32 if travel or call.divisor > 1 else call.dtype


def _places(pieces: Sequence[int], chunks: int) -> list[tuple[int, int]]:
    """Where each chunk lies when the piece of each owner is cut in equally many."""
    places, begin = [], 0
    for size in pieces:
        places += [(begin + lo, begin + hi) for lo, hi in chunk_bounds(size, chunks // len(pieces))]
        begin += size
    return places


def _copy_alone(call: Call) -> None:
    """What the call does in a group of one."""
    for (_, _, source), (_, _, out) in zip(call.loads, call.stores):
        if out.data_ptr() != source.data_ptr():
            out.copy_(source.view(out.shape))


def root_of(group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """A rank inside the group, from torch.distributed's two ways of naming it: globally or in the group."""
    if (rank is None) == (group_rank is None):
        raise ValueError(f"give one of {name} (a global rank) and group_{name} (a rank of the group)")
    if rank is not None:
        if rank not in group.ranks:
            raise ValueError(f"{name}={rank} is not in the group, which has {ranks_text(group.ranks)}")
        return group.ranks.index(rank)
    assert group_rank is not None
    if not 0 <= group_rank < group.world_size:
        raise ValueError(f"group_{name}={group_rank} is not in the group, which has {group.world_size} ranks")
    return group_rank


def group_of(group: Any) -> dist.ProcessGroup | None:
    """The process group that a ProcessGroup, a dimension of a DeviceMesh, or None stands for."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            names = ", ".join(group.mesh_dim_names or ()) or f"{group.ndim} dimensions"
            raise ValueError(f"this mesh has {names}: pass one dimension of it, as mesh['name']")
        return group.get_group()
    raise TypeError(f"a group is a ProcessGroup, a dimension of a DeviceMesh or None, not {type(group).__name__}")
