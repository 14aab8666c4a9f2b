"""The life of one gradient: hook, arena, bucket, launch, wait.

A *round* is one backward that has to be synchronised. It begins when a hook on the module's output fires, and ends in a
callback of the autograd engine. In between, each parameter's hook writes its gradient, divided by the number of ranks, into
the arena and re-attaches `param.grad` there; a bucket whose gradients are all written may launch.

Note: launch order. Buckets launch strictly in index order on every rank, whatever order they fill in, so that all ranks
run the same plans in the same order and no message can meet the wrong bucket.

Note: rehearsal. In the first round nothing is written before backward ends. It shows the order in which gradients arrive
(rank 0's counts for all), so the arena is laid out once, in that order. A parameter whose hook fires in a nested backward
(reentrant checkpointing) may fire again, so it always waits for the end of the round.

The three modes are this one machine with two switches: one bucket a parameter or fixed-size ones, and when they launch.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpx.bucket import Item, Layout, plan_buckets
from ddpx.communicator import Communicator
from ddpx.errors import Error, UnusedParameters
from ddpx.execute import Plan
from ddpx.stats import BucketStats, StepStats
from ddpx.stream import Pending
from ddpx.transport import IN_BACKWARD

Mode = Literal["naive", "bucketed", "overlapped"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How buckets are cut, and when they launch."""

    one_per_parameter: bool
    launch_when_full: bool
    wait_for_each: bool


POLICIES: dict[str, Policy] = {
    "naive": Policy(one_per_parameter=True, launch_when_full=False, wait_for_each=True),
    "bucketed": Policy(one_per_parameter=False, launch_when_full=False, wait_for_each=False),
    "overlapped": Policy(one_per_parameter=False, launch_when_full=True, wait_for_each=False),
}


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter's place: where its gradient lies, and what has happened to it in this round."""

    index: int
    name: str
    param: Parameter
    view: Tensor | None = None  # shaped as the parameter, in the arena
    buckets: tuple[int, ...] = ()
    written: bool = False  # in the arena, scaled
    nested: bool = False  # fired in a nested backward, so it may fire again
    local: bool = False  # has gradients that no round has reduced yet
    own_grad: Tensor | None = None  # the tensor to copy the mean to, where gradients are not views


@dataclass(slots=True, eq=False)
class Bucket:
    """A slice of an arena with its plan."""

    index: int
    flat: Tensor
    slots: tuple[Slot, ...]
    plan: Plan
    algorithm: str
    missing: int = 0
    pending: Pending | None = None
    ready_s: float = 0.0
    launched_s: float = 0.0
    waited_s: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Round:
    """One backward under way."""

    task: int  # autograd's number of this backward
    epoch: int
    began_s: float
    next_launch: int = 0
    arrivals: list[int] = field(default_factory=list)


class Reducer:
    """Reduces the gradients of `parameters` over a communicator. Not a module: it holds no weights.

    It knows no algorithm: the communicator hands it a plan for each bucket. `find_unused` lets parameters go without a
    gradient; they count as zero where another rank has one, and keep their `grad` where no rank has.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        communicator: Communicator,
        mode: Mode,
        bucket_bytes: int,
        first_bucket_bytes: int | None = None,
        find_unused: bool = False,
        gradients_are_views: bool = True,
    ) -> None:
        self.communicator = communicator
        self.policy = POLICIES[mode]
        self.mode = mode
        self.find_unused = find_unused
        self.gradients_are_views = gradients_are_views
        self.slots = [Slot(index, name, param) for index, (name, param) in enumerate(parameters)]
        self.buckets: list[Bucket] = []
        self.arenas: dict[torch.dtype, Tensor] = {}
        self.forwards = 0  # training forwards since the last round
        self.epoch = 0
        self.rounds = 0
        self.expects_backward_anywhere = False
        self.last_step: StepStats | None = None
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._divisor = communicator.group.world_size
        self._round: Round | None = None
        self._rehearsed = False
        order = communicator.empty(len(self.slots), torch.int32)
        self._order = (order, communicator.plan_broadcast(order))
        self._used: tuple[Tensor, Plan] | None = None
        if find_unused and self._divisor > 1:
            used = communicator.empty(len(self.slots), torch.int32)
            self._used = (used, communicator.plan_all_reduce(used))
        me = weakref.ref(self)
        self._handles = [
            slot.param.register_post_accumulate_grad_hook(_gradient_hook(me, slot)) for slot in self.slots
        ]

    @property
    def rank(self) -> int:
        return self.communicator.group.rank

    # ---- The beginning of a round

    def enter(self, kind: int) -> int:
        """Enter the next epoch with the group. Ranks fail alone or together, but they count epochs alike."""
        self.epoch += 1
        self.communicator.begin(self.epoch, kind | self.forwards)
        if kind == IN_BACKWARD:
            self.forwards = 0
        return self.epoch

    def watch(self, outputs: Sequence[Tensor], counts: bool) -> None:
        """Make the backward through any of `outputs` a round. Called by the forward that made them.

        `counts`: a training forward, which ranks have to make in equal numbers between two rounds.
        """
        self.forwards += counts
        hook = _output_hook(weakref.ref(self))
        hooked = False
        for output in outputs:
            if output.requires_grad and not output.is_leaf:
                output.register_hook(hook)
                hooked = True
        self.expects_backward_anywhere = not hooked

    def _on_output_gradient(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._round is not None and self._round.task == task:
            return
        if not self._reaches_parameters():
            # torch.autograd.grad() for something else, such as a gradient penalty on the input. Its graph may be
            # differentiated again without passing through the output, so the next backward counts wherever it begins.
            self.expects_backward_anywhere = torch.is_grad_enabled()
            return
        self._begin(task)

    def _reaches_parameters(self) -> bool:
        """Whether the backward now running accumulates into a parameter (autograd.grad does not)."""
        for slot in self.slots:
            if not slot.param.requires_grad:
                continue
            with torch.enable_grad():
                node = slot.param.view_as(slot.param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # asked about a parameter that autograd.grad() was asked for
                continue
        return False

    def _begin(self, task: int) -> None:
        if self._round is not None:
            self._abandon("a backward began before the last one had ended")
        self._round = Round(task, self.enter(IN_BACKWARD), time.perf_counter())
        self.expects_backward_anywhere = False
        for slot in self.slots:
            slot.written = slot.nested = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            bucket.pending = None
        torch.autograd.Variable._execution_engine.queue_callback(_RoundEnd(self, self.epoch))

    # ---- A gradient arrives

    def _on_gradient(self, slot: Slot, param: Tensor) -> None:
        current = self._round
        task = torch._C._current_graph_task_id()
        if current is None:
            if not self.expects_backward_anywhere:
                slot.local = True
                return
            self._begin(task)
            current = self._round
            assert current is not None
        if task != current.task:
            if slot.written:
                self._fail_round(
                    f"rank {self.rank}: parameter {slot.name} got a second gradient in one backward, from inside a "
                    "reentrant checkpoint, after the first was on its way. Use use_reentrant=False there."
                )
            if not slot.nested:
                slot.nested = True
                current.arrivals.append(slot.index)
            return
        if slot.nested:
            return
        current.arrivals.append(slot.index)
        if self._rehearsed:
            self._write(slot, param.grad)
            self._count(slot)
            if self.policy.launch_when_full:
                self._launch_full_buckets(current)

    def _write(self, slot: Slot, grad: Tensor | None) -> None:
        """Put the gradient, divided by the number of ranks, into the arena; one pass."""
        view = slot.view
        assert view is not None
        slot.written = True
        slot.local = False
        if grad is None:
            view.zero_()
            return
        if grad is view:
            view.div_(self._divisor)
            return
        if grad.requires_grad:  # backward(create_graph=True)
            grad = grad.detach()
        torch.div(grad, self._divisor, out=view)
        if self.gradients_are_views:
            slot.param.grad = view
        else:
            slot.own_grad = grad

    def _count(self, slot: Slot) -> None:
        for number in slot.buckets:
            bucket = self.buckets[number]
            bucket.missing -= 1
            if not bucket.missing:
                bucket.ready_s = time.perf_counter()

    def _launch_full_buckets(self, current: Round) -> None:
        while current.next_launch < len(self.buckets) and not self.buckets[current.next_launch].missing:
            self._launch(self.buckets[current.next_launch])
            current.next_launch += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched_s = time.perf_counter()
        bucket.pending = self.communicator.start(bucket.plan.run)

    # ---- The end of a round

    def _end(self) -> None:
        current = self._round
        assert current is not None
        ended_s = time.perf_counter()
        try:
            if not self._rehearsed:
                self._lay_out(current.arrivals)
                self._rehearsed = True
                arrived = set(current.arrivals)
                for bucket in self.buckets:
                    bucket.missing = len(bucket.slots)
                for slot in self.slots:
                    if slot.index in arrived:
                        self._write(slot, slot.param.grad)
                        self._count(slot)
            used = self._settle_missing()
            waiting_s = time.perf_counter()
            while current.next_launch < len(self.buckets):
                bucket = self.buckets[current.next_launch]
                self._launch(bucket)
                current.next_launch += 1
                if self.policy.wait_for_each:
                    self._wait(bucket)
            for bucket in self.buckets:
                if not self.policy.wait_for_each:
                    self._wait(bucket)
            self._attach(used)
        except BaseException as error:
            self._fail_round(self._explain(error), error)
        done_s = time.perf_counter()
        self._round = None
        self.rounds += 1
        self.last_step = self._stats(current, ended_s, waiting_s, done_s)

    def _settle_missing(self) -> list[Slot] | None:
        """Deal with parameters that got no gradient. Returns the slots used here, or None when all were."""
        for slot in self.slots:
            if slot.nested and not slot.written:
                self._write(slot, slot.param.grad)
                self._count(slot)
        unused = [slot for slot in self.slots if not slot.written]
        if self._used is None:
            if not unused:
                return None
            if not self.find_unused:
                raise UnusedParameters(self._unused_text(unused))
        used = [slot for slot in self.slots if slot.written or slot.local]
        for slot in unused:
            self._write(slot, slot.param.grad)
            self._count(slot)
        return used

    def _attach(self, used: list[Slot] | None) -> None:
        """Point `param.grad` at the means, except where no rank used the parameter."""
        if used is not None:
            wanted = self._used_anywhere(used)
            for slot in self.slots:
                if slot.index in wanted and slot.param.grad is None:
                    slot.param.grad = slot.view if self.gradients_are_views else slot.view.clone()  # type: ignore[union-attr]
        if not self.gradients_are_views:
            for slot in self.slots:
                if slot.own_grad is not None:
                    slot.own_grad.copy_(slot.view)
                    slot.own_grad = None

    def _used_anywhere(self, used: list[Slot]) -> set[int]:
        mine = {slot.index for slot in used}
        if self._used is None:
            return mine
        counts, plan = self._used
        counts.zero_()
        counts[list(mine)] = 1
        self.communicator.wait(self.communicator.start(plan.run))
        return set(counts.nonzero().flatten().tolist())

    def _wait(self, bucket: Bucket) -> None:
        assert bucket.pending is not None
        before = time.perf_counter()
        try:
            self.communicator.wait(bucket.pending)
        except Error as error:
            if "It happened at" in str(error):  # a peer's words, which already say where
                raise
            raise type(error)(f"{error} It happened at {self._bucket_text(bucket)}.") from error
        bucket.waited_s = (before, time.perf_counter())

    # ---- Layout

    def _lay_out(self, arrivals: Sequence[int]) -> None:
        """Arenas and buckets in the order gradients arrived at rank 0. A collective."""
        seen = set(arrivals)
        order = [*arrivals, *(slot.index for slot in reversed(self.slots) if slot.index not in seen)]
        order = self._as_rank_0(order)
        items = [
            Item(slot.name, _wire_numel(slot.param), _wire(slot.param).itemsize, str(slot.param.dtype))
            for slot in self.slots
        ]
        layout = plan_buckets(
            items, order, self._bucket_bytes, self._first_bucket_bytes, self.policy.one_per_parameter
        )
        self._bind(layout)

    def _as_rank_0(self, order: list[int]) -> list[int]:
        flat, plan = self._order
        flat.copy_(torch.tensor(order))
        self.communicator.wait(self.communicator.start(plan.run))
        return flat.tolist()

    def _bind(self, layout: Layout) -> None:
        arenas = {}
        for slot in self.slots:
            name = str(slot.param.dtype)
            if name not in arenas:
                arenas[name] = self.communicator.empty(layout.arena_numel[name], _wire(slot.param))
        buckets_of = layout.buckets_of()
        for slot in self.slots:
            slot.view = _gradient_view(arenas[str(slot.param.dtype)], layout.offsets[slot.index], slot.param)
            slot.buckets = buckets_of.get(slot.index, ())
        self.arenas = {flat.dtype: flat for flat in arenas.values()}
        self.buckets = []
        for index, planned in enumerate(layout.buckets):
            flat = arenas[planned.arena][planned.begin : planned.end]
            plan = self.communicator.plan_all_reduce(flat)
            slots = tuple(self.slots[item] for item in planned.items)
            self.buckets.append(Bucket(index, flat, slots, plan, self.communicator.choose(flat.nbytes)))

    # ---- Failures

    def forward_failed(self, error: BaseException) -> None:
        """The module's forward raised in a step the peers may be waiting in: tell them."""
        self.enter(IN_BACKWARD)
        self.communicator.fail(f"rank {self.rank} failed in its forward: {type(error).__name__}: {error}")

    def _abandon(self, reason: str) -> None:
        """This rank's backward stopped before its end."""
        self._round = None
        self.communicator.fail(f"rank {self.rank} failed in its backward: {reason}. Its own output says more.")

    def _fail_round(self, message: str, error: BaseException | None = None) -> None:
        self._round = None
        self.communicator.fail(message)
        if error is not None:
            raise error
        raise Error(message)

    def _explain(self, error: BaseException) -> str:
        return str(error) if isinstance(error, Error) else f"rank {self.rank} failed: {type(error).__name__}: {error}"

    def _unused_text(self, unused: list[Slot]) -> str:
        names = [slot.name for slot in unused]
        first = min((number for slot in unused for number in slot.buckets), default=0)
        total = len(self.buckets[first].slots) if self.buckets else len(self.slots)
        lacking = sum(not slot.written for slot in self.buckets[first].slots) if self.buckets else len(unused)
        return (
            f"rank {self.rank}: bucket {first} still lacks {lacking} of {total} gradients at the end of backward. "
            f"Without a gradient: {_names_text(names)}.\n"
            "Every parameter must reach the loss; or pass find_unused_parameters=True."
        )

    def _bucket_text(self, bucket: Bucket) -> str:
        return f"bucket {bucket.index} ({_names_text([slot.name for slot in bucket.slots])})"

    # ---- Numbers and the end

    def _stats(self, current: Round, ended_s: float, waiting_s: float, done_s: float) -> StepStats:
        buckets = []
        for bucket in self.buckets:
            pending = bucket.pending
            assert pending is not None
            started_s, finished_s = pending.started_s, pending.ended_s
            buckets.append(
                BucketStats(
                    bucket.index,
                    bucket.flat.nbytes,
                    bucket.algorithm,
                    bucket.ready_s,
                    bucket.launched_s,
                    started_s,
                    finished_s,
                    *bucket.waited_s,
                    bucket.plan.peer_wait_s,
                    bucket.plan.last_peer,
                )
            )
        return StepStats(self.rounds, current.began_s, ended_s, waiting_s, done_s, tuple(buckets))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.communicator.close()


# ---- Hooks hold the reducer weakly, so that a dropped wrapper frees its arena -------------------------------------------


def _gradient_hook(reducer: "weakref.ref[Reducer]", slot: Slot) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner._on_gradient(slot, param)

    return hook


def _output_hook(reducer: "weakref.ref[Reducer]") -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner._on_output_gradient()

    return hook


class _RoundEnd:
    """Called by the autograd engine when backward has ended; dropped by it, uncalled, when backward raised."""

    def __init__(self, reducer: Reducer, epoch: int) -> None:
        self._reducer: Reducer | None = reducer
        self._epoch = epoch

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        if reducer is not None and reducer._round is not None and reducer._round.epoch == self._epoch:
            reducer._end()

    def __del__(self) -> None:
        reducer: Any = self._reducer
        if reducer is not None and reducer._round is not None and reducer._round.epoch == self._epoch:
            reducer._abandon("it raised an exception")


# ---- Shapes ------------------------------------------------------------------------------------------------------------


def _wire(param: Tensor) -> torch.dtype:
    """The dtype a gradient travels in: complex numbers as pairs of real ones."""
    return param.dtype.to_real() if param.dtype.is_complex else param.dtype


def _wire_numel(param: Tensor) -> int:
    return param.numel() * (2 if param.dtype.is_complex else 1)


def _gradient_view(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """A tensor shaped and, where the parameter is dense, strided as `param`, on the arena's memory at `offset`.

    Not a view to autograd, so that `grad.detach_()` works on it.
    """
    stride = param.stride() if _is_dense(param) else torch.empty(param.shape, device="meta").stride()
    if param.dtype.is_complex:
        offset //= 2
    base = flat.view(param.dtype) if param.dtype.is_complex else flat
    result = torch.empty(0, dtype=param.dtype, device=flat.device)
    if not param.numel():
        return torch.empty_like(param, requires_grad=False)
    return result.set_(base.untyped_storage(), base.storage_offset() + offset, param.shape, stride)  # type: ignore[call-overload]


def _is_dense(param: Tensor) -> bool:
    """Whether the parameter fills its memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(param.shape, param.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _names_text(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
