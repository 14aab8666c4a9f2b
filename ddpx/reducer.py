"""The life of one gradient: hook, arena, bucket, launch, wait.

A *round* is one backward that has to be synchronised. It begins when a hook on the module's output fires, and ends in a
callback of the autograd engine. In between, each parameter's hook writes its gradient, divided by the number of ranks,
into the arena and re-attaches `param.grad` there; a bucket whose gradients are all written may launch.

Note: launch order. Buckets launch strictly in index order on every rank, whatever order they fill in, so that all ranks
run the same plans in the same order and no message can meet the wrong bucket.

Note: rehearsal. In the first round nothing is written before backward ends. It shows the order in which gradients
arrive (rank 0's counts for all), so the arena is laid out once, in that order. A parameter whose hook fires in a nested
backward (reentrant checkpointing) may fire again, so it always waits for the end of the round.

The three modes are this one machine with two switches: one bucket a parameter or fixed-size ones, and when they launch.
"""

import contextlib
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpx.arena import Bucket, Slot, bind, bind_alone, items_of, names_text
from ddpx.bucket import plan_buckets
from ddpx.comm_hooks import GradBucket, HookRunner, run_allreduce
from ddpx.communicator import Communicator
from ddpx.drift import ReplicaCheck
from ddpx.errors import Error, NonFiniteGradient, PeerFailed, PeerLost, UnusedParameters
from ddpx.execute import Plan
from ddpx.guard import Footprint
from ddpx.phases import PhaseBoard
from ddpx.skips import Skips
from ddpx.sparse import SparseMean
from ddpx.stats import BucketStats, PhaseTimes, StepStats
from ddpx.transport import IN_BACKWARD, IN_FORWARD, header_of

Mode = Literal["naive", "bucketed", "overlapped"]
NonFinite = Literal["ignore", "warn", "error"]


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


@dataclass(frozen=True, slots=True)
class Options:
    """How gradients are reduced, as every rank has to agree on it.

    `find_unused` lets parameters go without a gradient; they count as zero where another rank has one, and keep their
    `grad` where no rank has. `static` adds a promise: each rank's set of them stays that of its first round.
    `exclude_unused` adds another: what no rank used in the first round is left out of all later ones.
    """

    mode: Mode = "overlapped"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int | None = None
    bucket_bytes_list: tuple[int, ...] = ()
    find_unused: bool = False
    static: bool = False
    exclude_unused: bool = False
    gradients_are_views: bool = True
    wire_dtype: torch.dtype | None = None  # of floating-point gradients in buckets; None: as their parameters
    nonfinite: NonFinite = "ignore"
    check_replicas_every: int = 0  # rounds; 0: never


@dataclass(slots=True)
class Round:
    """One backward under way."""

    task: int  # autograd's number of this backward
    epoch: int
    began_s: float
    next_launch: int = 0
    arrivals: list[int] = field(default_factory=list)
    small: list[Slot] = field(default_factory=list)  # arrived, and to be written together
    shadow: bool = False  # this rank has no inputs and brings zeros
    lays_out: bool = False  # in this round the arena is laid out


NO_TASK = -1
UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."


class Reducer:
    """Reduces the gradients of `parameters` over a communicator. Not a module: it holds no weights.

    It knows no algorithm: the communicator hands it a plan for each bucket. `sparse` are parameters with sparse
    gradients, `last` those expected to get theirs after all others. `replicated` are compared over the ranks now and
    then.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        communicator: Communicator,
        options: Options,
        sparse: Set[Parameter] = frozenset(),
        last: Set[str] = frozenset(),
        replicated: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        self.communicator = communicator
        self.options = options
        self.policy = POLICIES[options.mode]
        self.mode = options.mode
        self.find_unused = options.find_unused
        self.static = options.static
        self.gradients_are_views = options.gradients_are_views
        self.slots = [Slot(index, name, param, param in sparse) for index, (name, param) in enumerate(parameters)]
        self.buckets: list[Bucket] = []
        self.arenas: dict[str, Tensor] = {}
        self.is_fresh = False  # there has been a forward since the last round
        self._skips = Skips()
        self.frozen_forwards = 0  # training forwards since then in which all parameters were frozen
        self.buffers_digest = 0  # of the buffers that forwards share; see ddpx.buffers
        self.epoch = 0
        self.rounds = 0
        self.expects_backward_anywhere = False
        self.has_local = False  # some slot may have gradients that no round has reduced
        self._older: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._early_task, self._early = NO_TASK, list[Slot]()  # gradients of a backward that is no round yet
        self.watches_steps = False  # for steps on local gradients
        self._footprint: Footprint | None = None  # of the last local backward
        self.is_alone = True  # no other live wrapper reduces the same parameters
        self.joining = False  # inside a join context, where ranks without inputs have old parameters
        self.forward_s = 0.0  # spent in forwards since the last round, without waiting for buffers
        self._phases = PhaseBoard(communicator) if communicator.group.world_size > 1 else None
        self._done_s = time.perf_counter()  # when the last round ended
        self._record: tuple[Round, float, float, float] | None = None  # the last round, not yet made into numbers
        self._last_step: StepStats | None = None
        self.last_arrivals: list[int] = []
        self.last_error = ""
        self.before_round: Callable[[], None] | None = None
        self.after_round: Callable[[], None] | None = None
        self._hook: HookRunner | None = None
        self._last = last
        self._writes_together = options.nonfinite == "ignore"
        self._divisor: float = communicator.group.world_size
        self._round: Round | None = None
        self._rehearsed = False
        self._first_unused: set[int] | None = None  # where that is allowed: what had no gradient in the first round
        self.graph_changed = False  # and whether that has been otherwise since
        order = communicator.empty(len(self.slots), torch.int32)
        self._order = (order, communicator.plan_broadcast(order))
        self._used: tuple[Tensor, Plan] | None = None
        if options.find_unused:
            self.allow_unused()
        self._sparse = SparseMean(communicator) if any(slot.sparse for slot in self.slots) else None
        self._replicas: ReplicaCheck | None = None
        if options.check_replicas_every and communicator.group.world_size > 1:
            self._replicas = ReplicaCheck(communicator, replicated, options.check_replicas_every)
        self._notice_other_reducers()
        me = weakref.ref(self)
        self._handles = [slot.param.register_post_accumulate_grad_hook(_gradient_hook(me, slot)) for slot in self.slots]

    def allow_unused(self) -> None:
        """From here on parameters may go without a gradient. A collective."""
        self.find_unused = True
        if self._used is None and self.communicator.group.world_size > 1:
            used = self.communicator.empty(len(self.slots), torch.int32)
            self._used = (used, self.communicator.plan_all_reduce(used))

    def set_hook(self, runner: HookRunner, divergence_is_meant: bool) -> None:
        """Give buckets, of whole parameters and not divided, to a communication hook from the next round on."""
        self._hook = runner
        self._divisor = 1
        self._rehearsed = False  # lay out anew
        if divergence_is_meant:
            self._replicas = None

    @property
    def hook_name(self) -> str:
        return self._hook.name if self._hook is not None else ""

    def set_epochs_per_round(self, epochs: int) -> None:
        """How many epochs a round takes from here on, alike on all ranks: 2 where forwards share buffers."""
        if self._replicas is not None:
            self._replicas.epochs_per_round = epochs

    def set_divisor(self, ranks: int) -> None:
        """Gradients are divided by `ranks` from here on; a communication hook divides by itself."""
        self._divisor = ranks if self._hook is None else 1

    def _notice_other_reducers(self) -> None:
        """Where an older wrapper still hooks the same parameters, nobody can tell whose gradients are local."""
        for slot in self.slots:
            for hook in (slot.param._post_accumulate_grad_hooks or {}).values():
                other = getattr(hook, "ddpx_reducer", _nobody)()
                if other is not None and other is not self and other._handles:
                    other.is_alone = self.is_alone = False
                    self._older.add(other)
                    other._older.add(self)

    def _others(self) -> "list[Reducer]":
        """Live reducers of other wrappers that share parameters with this one."""
        return [] if self.is_alone else list(self._older)

    @property
    def rank(self) -> int:
        return self.communicator.group.rank

    # ---- The beginning of a round

    def enter(self, kind: int | None) -> int:
        """Enter the next epoch with the group. Ranks fail alone or together, but they count epochs alike.

        A rank that enters only to say that it failed has no `kind` (None): there is nothing for peers to compare.
        """
        if self._phases is not None:
            self._phases.settle()
        with contextlib.suppress(*((Error,) if kind is None else (PeerLost, PeerFailed))):
            self.communicator.settle()
        self.epoch += 1
        counts = kind == IN_BACKWARD and not self.joining
        is_fresh, skipped = counts and self.is_fresh, self._skips.count() if counts else 0
        header = None
        if kind is not None:
            header = header_of(kind, self.rounds, is_fresh, self.frozen_forwards, self.buffers_digest, skipped)
        self.communicator.begin(self.epoch, header)
        if kind != IN_FORWARD:
            self._skips = Skips()
            self.is_fresh, self.frozen_forwards = False, 0
        return self.epoch

    def watch(self, outputs: Sequence[Tensor], is_training: bool) -> None:
        """Make the backward through any of `outputs` a round. Called by the forward that made them."""
        self.is_fresh = True
        hook = _output_hook(weakref.ref(self))
        hooked = watch(outputs, hook)
        if is_training:
            self._skips.forward(hook)
        # A parameter may be an output itself, and the loss come from it alone.
        bare = self.find_unused and any(output.requires_grad and output.is_leaf for output in outputs)
        self.expects_backward_anywhere = bare or not hooked

    def on_output_gradient(self) -> None:
        """A backward has come to an output."""
        task = torch._C._current_graph_task_id()
        if self._round is not None and self._round.task == task:
            return
        if not reached_of([slot.param for slot in self.slots]):
            # torch.autograd.grad() for something else, such as a gradient penalty on the input. Its graph may be
            # differentiated again without passing through the output, so the next backward counts wherever it begins.
            self.expects_backward_anywhere = torch.is_grad_enabled()
            return
        self._begin(task)

    def _begin(self, task: int) -> None:
        if self._round is not None:
            self._abandon("a backward began before the last one had ended")
        if any(other._round is not None for other in self._others()):
            message = (
                f"rank {self.rank}: two DDPX wrappers reduce parameter {self.slots[0].name} or another one in the same "
                "backward, which would average it twice. Wrap the module that holds both, once."
            )
            self.fail_outside(message)
            raise Error(message)
        self._open(task)
        torch.autograd.Variable._execution_engine.queue_callback(_RoundEnd(self, self.epoch))
        if self._early_task == task:  # used outside the module, behind its output: their gradients came first
            assert self._round is not None
            for slot in self._early:
                self._arrive(self._round, slot)
        self._early_task, self._early = NO_TASK, []

    def _open(self, task: int, is_shadow: bool = False) -> None:
        """A new round, in an epoch of its own; what `_end` closes."""
        if self.before_round is not None and not is_shadow:
            self.before_round()
        self._last_step, self._record = self.last_step, None
        self._round = Round(task, self.enter(IN_BACKWARD), time.perf_counter(), shadow=is_shadow)
        self.expects_backward_anywhere = False
        for slot in self.slots:
            slot.written = slot.arrived = slot.nested = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            bucket.pending = None
        if self._replicas is not None and not self.joining:
            self._replicas.start(self.epoch, self.rounds + 1)

    def sync_now(self) -> None:
        """A round without a backward: reduce what `param.grad` holds on each rank. A collective."""
        self.is_fresh = False
        self._open(NO_TASK)
        assert self._round is not None
        self._round.arrivals = [slot.index for slot in self.slots if slot.param.grad is not None]
        self._write_arrivals(self._round)
        self._end()

    def shadow(self) -> None:
        """Take part in a round with zeros, on a rank that has no inputs left."""
        self._open(NO_TASK, is_shadow=True)
        self._end()

    # ---- A gradient arrives

    def _on_gradient(self, slot: Slot, param: Tensor) -> None:
        current = self._round
        task = torch._C._current_graph_task_id()
        if current is None:
            if not self.expects_backward_anywhere:
                slot.local = self.has_local = True
                if self._early_task != task:
                    self._early_task, self._early = task, []
                    self._footprint = Footprint() if self.watches_steps else None
                if self._footprint is not None:
                    self._footprint.add(slot)
                self._early.append(slot)
                return
            self._begin(task)
            current = self._round
            assert current is not None
        if param.grad is None:  # autograd came by without a gradient
            return
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
        self._arrive(current, slot)

    def _arrive(self, current: Round, slot: Slot) -> None:
        """The gradient of `slot` is complete, as far as this backward goes."""
        if slot.nested or slot.arrived:
            return
        current.arrivals.append(slot.index)
        if not self._rehearsed:
            return
        if _has_foreign_hook(slot.param):
            slot.nested = True  # a user's hook may still change it in place, so it is written when backward has ended
            return
        slot.arrived = True
        if slot.is_small and self._writes_together:
            current.small.append(slot)
        else:
            self._write(slot, slot.param.grad)
        for number in slot.buckets:
            bucket = self.buckets[number]
            bucket.missing -= 1
            if not bucket.missing:
                bucket.ready_s = time.perf_counter()
                if self.policy.launch_when_full:
                    self._launch_full_buckets(current)

    def _write_small(self, current: Round) -> None:
        """Write the small gradients that have arrived: one call copies them, one a run of neighbours divides them."""
        slots, current.small = current.small, []
        grads = [slot.param.grad for slot in slots]
        if torch.is_grad_enabled() or any(g is None or g is s.view or g.is_sparse for g, s in zip(grads, slots)):
            for slot, grad in zip(slots, grads, strict=True):
                self._write(slot, grad)
            return
        torch._foreach_copy_([slot.view for slot in slots], grads)  # type: ignore[arg-type, misc]
        if self._divisor != 1:
            for arena, begin, end in _runs(slots):
                arena[begin:end].div_(self._divisor)
        for slot in slots:
            slot.written = True
            slot.local = False
            slot.param.grad = slot.view

    def _write(self, slot: Slot, grad: Tensor | None) -> None:
        """Put the gradient, divided by the number of ranks, into the arena; one pass."""
        view = slot.view
        slot.written = True
        slot.local = False
        if view is None:
            self._keep_outside(slot, grad)
            return
        if grad is None:
            view.zero_()
            return
        if grad is view:
            view.div_(self._divisor)
        else:
            if grad.requires_grad:  # backward(create_graph=True)
                grad = grad.detach()
            if grad.is_sparse:
                grad = grad.to_dense()
            torch.div(grad, self._divisor, out=view)
            if slot.is_view:
                slot.param.grad = view
            else:
                slot.own_grad = grad
        if self.options.nonfinite != "ignore":
            self._look_for_nonfinite(slot, view)

    def _keep_outside(self, slot: Slot, grad: Tensor | None) -> None:
        """A gradient that does not lie in the arena."""
        if slot.excluded and grad is not None:
            self._fail_round(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                f"but then got used: rank {self.rank}: parameter {slot.name} was unused on every rank in the first "
                "iteration, and skip_all_reduce_unused_params=True promises that it stays so."
            )
        slot.own_grad = grad

    def _look_for_nonfinite(self, slot: Slot, view: Tensor) -> None:
        if math.isfinite(view.sum(dtype=torch.float32 if view.element_size() < 4 else None).abs().item()):
            return
        bad = int((~torch.isfinite(view)).sum())
        if not bad:  # the sum alone overflowed
            return
        message = (
            f"rank {self.rank}: the gradient of {slot.name} has {bad} of {view.numel()} elements that are NaN or "
            f"infinite, before it was reduced, in synchronised backward {self.rounds + 1}."
        )
        if self.options.nonfinite == "warn":
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        else:
            self._fail_round(message, NonFiniteGradient(message))

    def _count(self, slot: Slot) -> None:
        for number in slot.buckets:
            bucket = self.buckets[number]
            bucket.missing -= 1
            if not bucket.missing:
                bucket.ready_s = time.perf_counter()

    def _launch_full_buckets(self, current: Round) -> None:
        if current.small:
            self._write_small(current)
        while current.next_launch < len(self.buckets) and not self.buckets[current.next_launch].missing:
            try:
                self._launch(self.buckets[current.next_launch])
            except Exception as error:  # a communication hook's
                self._fail_round(self._explain(error), error)
            current.next_launch += 1

    def _launch(self, bucket: Bucket) -> None:
        if self._hook is not None and self._hook.goes_one_at_a_time(bucket):
            self._wait(self.buckets[bucket.index - 1])
        bucket.launched_s = time.perf_counter()
        if self._hook is not None:
            bucket.pending = self._hook.launch(bucket, len(self.buckets))
        else:
            bucket.pending = self.communicator.start(bucket.plan.run)

    # ---- The end of a round

    def _end(self) -> None:
        current = self._round
        assert current is not None
        ended_s = time.perf_counter()
        try:
            if not self._rehearsed:
                current.lays_out = True
                self._lay_out(current.arrivals)
                self._write_arrivals(current)
            elif current.small:
                self._write_small(current)
            used = self._settle_missing(current)
            waiting_s = time.perf_counter()
            while current.next_launch < len(self.buckets):
                bucket = self.buckets[current.next_launch]
                self._launch(bucket)
                current.next_launch += 1
                if self.policy.wait_for_each:
                    self._wait(bucket)
            if self._hook is not None:
                # Hooks communicate by themselves; a small plan of ours is where ranks notice that they are out of step.
                self.run_in_epoch(self._order[1].run)
            for bucket in self.buckets:
                if not self.policy.wait_for_each:
                    self._wait(bucket)
            self._attach(used)
            self._reduce_sparse()
            if self._replicas is not None:
                self._replicas.finish()
            if self._phases is not None:
                self._phases.share(self._own_phases(current, ended_s))
        except BaseException as error:
            self._fail_round(self._explain(error), error)
        done_s = time.perf_counter()
        self._round = None
        self.rounds += 1
        self.has_local = False
        self.last_arrivals = current.arrivals
        self.forward_s, self._done_s = 0.0, done_s
        self._record = (current, ended_s, waiting_s, done_s)
        if self.after_round is not None and not current.shadow:
            self.after_round()

    def run_in_epoch(self, run: Callable[[], None]) -> None:
        """Run a plan in the present epoch, and wait for it."""
        self.communicator.wait(self.communicator.run(run))

    def _write_arrivals(self, current: Round) -> None:
        """Write the gradients that came while nothing was written yet."""
        if not self._rehearsed:
            return
        arrived = set(current.arrivals)
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
        for slot in self.slots:
            if slot.index in arrived:
                self._write(slot, slot.param.grad)
                self._count(slot)

    def _settle_missing(self, current: Round) -> list[Slot] | None:
        """Deal with parameters that got no gradient. Returns the slots used here, or None when all were."""
        for slot in self.slots:
            if slot.nested and not slot.written:
                self._write(slot, slot.param.grad)
                self._count(slot)
        unused = [slot for slot in self.slots if not slot.written and not slot.excluded]
        if self.find_unused and not current.shadow:
            self._compare_with_first(unused)
        if not self.find_unused:
            if unused and not current.shadow:
                raise UnusedParameters(self._unused_text(unused))
            used = None
        else:
            used = [slot for slot in self.slots if slot.written or slot.local] if not current.shadow else []
        for slot in unused:
            self._write(slot, None if current.shadow else slot.param.grad)
            self._count(slot)
        return used

    def _compare_with_first(self, unused: list[Slot]) -> None:
        """With a static graph, each rank's parameters without a gradient stay the same."""
        now = {slot.index for slot in unused}
        if self._first_unused is None:
            self._first_unused = now
        self.graph_changed |= now != self._first_unused
        if not self.static or now == self._first_unused:
            return
        first, self._first_unused = self._first_unused, None  # after the error, the next round is a first one
        if now - first:
            raise UnusedParameters(
                f"{UNFINISHED} This error indicates that your training graph has changed in this iteration, e.g., one "
                "parameter is used in first iteration, but then got unused in the second iteration. this is not "
                f"compatible with static_graph set to True.\n{self._without_text(unused)}"
            )
        names = [self.slots[index].name for index in sorted(first - now)]
        raise UnusedParameters(
            "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
            "but then got used in the second iteration. this is not compatible with static_graph set to True. "
            f"On rank {self.rank} it is {names_text(names)}."
        )

    def _attach(self, used: list[Slot] | None) -> None:
        """Point `param.grad` at the means, except where no rank used the parameter."""
        if used is not None:
            wanted = self._used_anywhere(used)
            for slot in self.slots:
                if slot.index in wanted and slot.param.grad is None and slot.view is not None:
                    slot.param.grad = slot.view if slot.is_view else slot.view.to(slot.param.dtype, copy=True)
        for slot in self.slots:
            if slot.own_grad is not None and slot.view is not None:
                mean, slot.own_grad = slot.own_grad, None
                mean.copy_(slot.view)
                if slot.param.grad is None or slot.param.grad.is_sparse:
                    slot.param.grad = mean

    def _used_anywhere(self, used: list[Slot]) -> set[int]:
        mine = {slot.index for slot in used}
        if self._used is None:
            return mine
        counts, plan = self._used
        counts.zero_()
        counts[list(mine)] = 1
        self.run_in_epoch(plan.run)
        return set(counts.nonzero().flatten().tolist())

    def _reduce_sparse(self) -> None:
        if self._sparse is None:
            return
        for slot in self.slots:
            if slot.sparse and not slot.excluded:
                grad, slot.own_grad = slot.own_grad, None
                mean = self._sparse.mean(grad, slot.param, self._sparse_divisor)
                if mean is not None:
                    slot.param.grad = mean

    @property
    def _sparse_divisor(self) -> float:
        return self._divisor if self._hook is None else self.communicator.group.world_size

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
        if self.options.exclude_unused and self.find_unused:
            wanted = self._used_anywhere([self.slots[index] for index in arrivals])
            for slot in self.slots:
                slot.excluded = slot.index not in wanted
        seen = set(arrivals)
        order = [*arrivals, *(slot.index for slot in reversed(self.slots) if slot.index not in seen)]
        order.sort(key=lambda index: self.slots[index].name in self._last)  # stable: all others before them
        for flat in self.arenas.values():
            self.communicator.release(flat)
        layout = plan_buckets(
            items_of(self.slots, self.options.wire_dtype),
            self._as_rank_0(order),
            self.options.bucket_bytes,
            self.options.first_bucket_bytes,
            one_per_item=self.policy.one_per_parameter and self._hook is None,
            whole_items=self._hook is not None,
            bytes_list=self.options.bucket_bytes_list,
        )
        wire_dtype = self.options.wire_dtype
        if self._hook is not None:
            device = self.communicator.device
            self.buckets, self.arenas = bind_alone(layout, self.slots, device, wire_dtype, self.gradients_are_views), {}
        else:
            self.buckets, self.arenas = bind(
                layout, self.slots, self.communicator, wire_dtype, self.gradients_are_views
            )
        self._rehearsed = True

    def _as_rank_0(self, order: list[int]) -> list[int]:
        flat, plan = self._order
        flat.copy_(torch.tensor(order))
        self.run_in_epoch(plan.run)
        return flat.tolist()

    # ---- Failures

    def forward_failed(self, error: BaseException) -> None:
        """The module's forward raised in a step the peers may be waiting in: tell them."""
        text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        self.fail_outside(text if text.startswith("rank ") else f"rank {self.rank} failed in its forward: {text}")

    def fail_in_epoch(self, error: BaseException) -> None:
        """Something failed here in an epoch that the ranks have entered: tell the peers, who are in it too."""
        self.last_error = self._explain(error)
        self.communicator.fail(self.last_error)

    def fail_outside(self, message: str) -> None:
        """Something failed here between two epochs: tell the peers in the next one."""
        self.enter(None)
        self.last_error = message
        self.communicator.fail(message)

    def local_now(self) -> list[Slot]:
        """Slots whose `param.grad` is not reduced: no round has been, or one is under way and has not ended."""
        if not self.is_alone:
            return []
        current = self._round
        if current is not None and self._hook is None:
            return [self.slots[index] for index in current.arrivals]
        return [slot for slot in self.slots if slot.local] if self.has_local else []

    def was_taken_in_hand(self) -> bool:
        """Whether somebody else may have reduced what the last local backward left; not while a round is under way."""
        return self._round is None and self._footprint is not None and self._footprint.was_taken_in_hand()

    def refuse(self, error: Error) -> None:
        """Raise `error` here, and tell the peers wherever they are."""
        if self._round is not None:
            self._fail_round(str(error), error)
        self.fail_outside(str(error))
        raise error

    def _abandon(self, reason: str) -> None:
        """This rank's backward stopped before its end."""
        self._fail(f"rank {self.rank} failed in its backward: {reason}. Its own output says more.")

    def _fail(self, message: str) -> None:
        if self._round is not None and self._round.lays_out:
            self._rehearsed = False  # some ranks may have got there and others not: all do it again
        self._round = None
        if self._replicas is not None:
            self._replicas.forget()
        if self._phases is not None:
            self._phases.forget()
        self.last_error = message
        self.communicator.fail(message)

    def _fail_round(self, message: str, error: BaseException | None = None) -> None:
        self._fail(message)
        if error is not None:
            raise error
        raise Error(message)

    def _explain(self, error: BaseException) -> str:
        return str(error) if isinstance(error, Error) else f"rank {self.rank} failed: {type(error).__name__}: {error}"

    def _unused_text(self, unused: list[Slot]) -> str:
        first = min((number for slot in unused for number in slot.buckets), default=0)
        total = len(self.buckets[first].slots) if self.buckets else len(self.slots)
        lacking = sum(not slot.written for slot in self.buckets[first].slots) if self.buckets else len(unused)
        return (
            f"{UNFINISHED} This error indicates that your module has parameters that were not used in producing loss. "
            f"It is found here at the end of the very backward that left them out, on rank {self.rank}: bucket {first} "
            f"still lacks {lacking} of {total} gradients. {self._without_text(unused)}\n"
            "Every parameter must reach the loss, by making sure all `forward` function outputs participate in "
            "calculating loss; or you can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to the wrapper."
        )

    def _without_text(self, unused: list[Slot]) -> str:
        names = ", ".join(slot.name for slot in unused[:20]) + (", ..." if len(unused) > 20 else "")
        indices = " ".join(str(slot.index) for slot in unused[:20])
        return (
            f"Parameter indices which did not receive grad for rank {self.rank}: {indices}\n"
            f"Parameters which did not receive grad for rank {self.rank}: {names}"
        )

    def _bucket_text(self, bucket: Bucket) -> str:
        return f"bucket {bucket.index} ({names_text([slot.name for slot in bucket.slots])})"

    # ---- Numbers and the end

    def _own_phases(self, current: Round, ended_s: float) -> PhaseTimes:
        outside_s = current.began_s - self._done_s - self.forward_s
        return PhaseTimes(max(0.0, outside_s), self.forward_s, ended_s - current.began_s)

    @property
    def last_step(self) -> StepStats | None:
        """The last round in numbers. Made when asked for, since on CUDA the device may still be running it."""
        if self._record is not None:
            self._last_step = self._stats(*self._record)
            if all(bucket.ended_s is not None for bucket in self._last_step.buckets):
                self._record = None
        return self._last_step

    def stats(self) -> StepStats | None:
        """`last_step` with every rank's phases in it, once all ranks have ended the round."""
        step = self.last_step
        if step is None or self._phases is None:
            return step
        return replace(step, ranks=tuple(self._phases.read()))

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

    def remove_hooks(self) -> None:
        """Leave the parameters alone from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        self.remove_hooks()
        self.communicator.close()

    # ---- What torch's stock hooks and frameworks ask DDP's reducer for

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """DDP has to be told of a backward; here it is noticed when it comes, wherever it begins."""
        self.expects_backward_anywhere = True

    def _get_local_used_map(self) -> Tensor:
        """By parameter: how many ranks had a gradient for it in the last round; with find_unused_parameters."""
        if self._used is None:
            return torch.tensor([int(slot.written) for slot in self.slots], dtype=torch.int32)
        return self._used[0].clone()

    def _ddp_graph_static(self) -> bool:
        return not self.graph_changed

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Buckets are laid out anew when the first round ends."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return run_allreduce(bucket, self.communicator.group.process_group)

    def get_backward_stats(self) -> list[int]:
        """By parameter: nanoseconds from the beginning of the last round until its buckets were full."""
        if self.last_step is None:
            return [0] * len(self.slots)
        began_s = self.last_step.backward_began_s
        return [
            max((int((self.buckets[number].ready_s - began_s) * 1e9) for number in slot.buckets), default=0)
            for slot in self.slots
        ]


def _runs(slots: Sequence[Slot]) -> list[tuple[Tensor, int, int]]:
    """The slots' elements as (arena, begin, end), neighbours in one."""
    runs: list[tuple[Tensor, int, int]] = []
    for slot in slots:
        assert slot.arena is not None
        if runs and runs[-1][0] is slot.arena and runs[-1][2] == slot.begin:
            runs[-1] = (slot.arena, runs[-1][1], slot.end)
        else:
            runs.append((slot.arena, slot.begin, slot.end))
    return runs


def reached_of(parameters: Sequence[Parameter]) -> bool:
    """Whether the backward now running accumulates into one of them (autograd.grad does not)."""
    for param in parameters:
        if not param.requires_grad:
            continue
        with torch.enable_grad():
            node = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        try:
            if torch._C._will_engine_execute_node(node):  # type: ignore[arg-type]
                return True
        except RuntimeError:  # asked about a parameter that autograd.grad() was asked for
            continue
    return False


def watch(outputs: Iterable[Tensor], hook: Callable[[Tensor], None]) -> bool:
    """Have `hook` called when a backward comes to one of `outputs`. Whether there is one that can tell."""
    watched = [output for output in outputs if output.requires_grad and not output.is_leaf]
    for output in watched:
        output.register_hook(hook)
    return bool(watched)


# ---- Hooks hold the reducer weakly, so that a dropped wrapper frees its arena ----------------------------------------


def _gradient_hook(reducer: "weakref.ref[Reducer]", slot: Slot) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner._on_gradient(slot, param)

    hook.ddpx_reducer = reducer  # type: ignore[attr-defined]
    return hook


def _has_foreign_hook(param: Parameter) -> bool:
    """Whether somebody else's hook runs after ours on each gradient of `param`."""
    hooks = param._post_accumulate_grad_hooks
    return len(hooks) > 1 and any(not hasattr(hook, "ddpx_reducer") for hook in hooks.values())


def _nobody() -> None:
    return None


def _output_hook(reducer: "weakref.ref[Reducer]") -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.on_output_gradient()

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
