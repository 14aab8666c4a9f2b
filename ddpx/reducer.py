"""The life of one gradient: hook, arena, bucket, launch, wait.

A *round* is one backward that has to be synchronised. It begins when a hook on the module's output fires, and ends in a
callback of the autograd engine. In between, each parameter's hook writes its gradient, divided by the number of ranks,
into the arena and re-attaches `param.grad` there; a bucket whose gradients are all written may launch.

Note: launch order. Buckets launch strictly in index order on every rank, whatever order they fill in, so that all ranks
run the same plans in the same order and no message can meet the wrong bucket.

Note: rehearsal. In the first round nothing is written before backward ends. It shows the order in which gradients
arrive (rank 0's counts for all), so the arena is laid out once, in that order. A parameter whose hook fires in a nested
backward (reentrant checkpointing) may fire again, so it always waits for the end of the round.

The three modes are this one machine with two switches: one bucket a parameter or fixed-size ones, and when they launch
(ddpx.options). Of the rest, ddpx.autograd tells of gradients, ddpx.writer puts them into the arena, ddpx.unused knows
those that are missing, and ddpx.recorder makes a round into numbers.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpx.arena import Bucket, Slot, bind, bind_alone, items_of, names_text
from ddpx.autograd import (
    gradient_hook,
    has_foreign_hook,
    output_hook,
    reached_of,
    reducers_on,
    watch,
    when_backward_ends,
)
from ddpx.bucket import plan_buckets
from ddpx.comm_hooks import HookRunner
from ddpx.communicator import Communicator
from ddpx.drift import ReplicaCheck
from ddpx.errors import Error, PeerFailed, PeerLost
from ddpx.guard import Footprint
from ddpx.options import POLICIES, Options
from ddpx.phases import PhaseBoard
from ddpx.recorder import Recorder
from ddpx.skips import Skips
from ddpx.sparse import SparseMean
from ddpx.stats import StepStats
from ddpx.transport import IN_BACKWARD, IN_FORWARD, header_of
from ddpx.unused import Unused
from ddpx.writer import GradientWriter


@dataclass(slots=True)
class Round:
    """One backward under way."""

    task: int  # autograd's number of this backward
    epoch: int
    began_s: float
    next_launch: int = 0
    arrivals: list[int] = field(default_factory=list)
    shadow: bool = False  # this rank has no inputs and brings zeros
    lays_out: bool = False  # in this round the arena is laid out


NO_TASK = -1


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
        self.recorder = Recorder()
        self._phases = PhaseBoard(communicator) if communicator.group.world_size > 1 else None
        self.last_arrivals: list[int] = []
        self.last_error = ""
        self.before_round: Callable[[], None] | None = None
        self.after_round: Callable[[], None] | None = None
        self._hook: HookRunner | None = None
        self._last = last
        self._writer = GradientWriter(self.rank, communicator.group.world_size, options.nonfinite)
        self._round: Round | None = None
        self._rehearsed = False
        order = communicator.empty(len(self.slots), torch.int32)
        self._order = (order, communicator.plan_broadcast(order))
        self.unused = Unused(self.slots, communicator, options)
        self._sparse = SparseMean(communicator) if any(slot.sparse for slot in self.slots) else None
        self._replicas: ReplicaCheck | None = None
        if options.check_replicas_every and communicator.group.world_size > 1:
            self._replicas = ReplicaCheck(communicator, replicated, options.check_replicas_every)
        self._notice_other_reducers()
        me = weakref.ref(self)
        self._handles = [slot.param.register_post_accumulate_grad_hook(gradient_hook(me, slot)) for slot in self.slots]

    def set_hook(self, runner: HookRunner, divergence_is_meant: bool) -> None:
        """Give buckets, of whole parameters and not divided, to a communication hook from the next round on."""
        self._hook = runner
        self._writer.divisor = 1
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
        self._writer.divisor = ranks if self._hook is None else 1

    def _notice_other_reducers(self) -> None:
        """Where an older wrapper still hooks the same parameters, nobody can tell whose gradients are local."""
        for slot in self.slots:
            for other in reducers_on(slot.param):
                if other is not self and other._handles:
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
        hook = output_hook(weakref.ref(self))
        hooked = watch(outputs, hook)
        if is_training:
            self._skips.forward(hook)
        # A parameter may be an output itself, and the loss come from it alone.
        bare = self.unused.allowed and any(output.requires_grad and output.is_leaf for output in outputs)
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
        when_backward_ends(functools.partial(self._on_backward_end, self.epoch))
        if self._early_task == task:  # used outside the module, behind its output: their gradients came first
            assert self._round is not None
            for slot in self._early:
                self._arrive(self._round, slot)
        self._early_task, self._early = NO_TASK, []

    def _open(self, task: int, is_shadow: bool = False) -> None:
        """A new round, in an epoch of its own; what `_end` closes."""
        if self.before_round is not None and not is_shadow:
            self.before_round()
        self.recorder.begin()
        self._writer.begin(self.rounds + 1)
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
        try:
            self._write_arrivals(self._round)
        except Error as error:
            self._fail_round(str(error), error)
        self._end()

    def shadow(self) -> None:
        """Take part in a round with zeros, on a rank that has no inputs left."""
        self._open(NO_TASK, is_shadow=True)
        self._end()

    # ---- A gradient arrives

    def on_gradient(self, slot: Slot, param: Tensor) -> None:
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
        if has_foreign_hook(slot.param):
            slot.nested = True  # a user's hook may still change it in place, so it is written when backward has ended
            return
        slot.arrived = True
        if slot.is_small and self._writer.collects_small:
            self._writer.small.append(slot)
        else:
            try:
                self._writer.write(slot, slot.param.grad)
            except Error as error:
                self._fail_round(str(error), error)
        for number in slot.buckets:
            bucket = self.buckets[number]
            bucket.missing -= 1
            if not bucket.missing:
                bucket.ready_s = time.perf_counter()
                if self.policy.launch_when_full:
                    self._launch_full_buckets(current)

    def _count(self, slot: Slot) -> None:
        for number in slot.buckets:
            bucket = self.buckets[number]
            bucket.missing -= 1
            if not bucket.missing:
                bucket.ready_s = time.perf_counter()

    def _launch_full_buckets(self, current: Round) -> None:
        if self._writer.small:
            self._writer.write_small()
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

    def _on_backward_end(self, epoch: int, came_to_its_end: bool) -> None:
        """The backward that began the round of `epoch` is over; the round may have failed before."""
        if self._round is None or self._round.epoch != epoch:
            return
        if came_to_its_end:
            self._end()
        else:
            self._abandon("it raised an exception")

    def _end(self) -> None:
        current = self._round
        assert current is not None
        ended_s = time.perf_counter()
        try:
            if not self._rehearsed:
                current.lays_out = True
                self._lay_out(current.arrivals)
                self._write_arrivals(current)
            elif self._writer.small:
                self._writer.write_small()
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
                self._phases.share(self.recorder.phases(current.began_s, ended_s))
        except BaseException as error:
            self._fail_round(self._explain(error), error)
        done_s = time.perf_counter()
        self._round = None
        self.rounds += 1
        self.has_local = False
        self.last_arrivals = current.arrivals
        step = StepStats(self.rounds, current.began_s, ended_s, waiting_s, done_s, ())
        self.recorder.end(step, self.buckets)
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
                self._writer.write(slot, slot.param.grad)
                self._count(slot)

    def _settle_missing(self, current: Round) -> list[Slot] | None:
        """Deal with parameters that got no gradient. Returns the slots used here, or None when all were."""
        for slot in self.slots:
            if slot.nested and not slot.written:
                self._writer.write(slot, slot.param.grad)
                self._count(slot)
        unused = [slot for slot in self.slots if not slot.written and not slot.excluded]
        if not current.shadow:
            self.unused.check(unused, self.buckets)
        used = None
        if self.unused.allowed:
            used = [slot for slot in self.slots if slot.written or slot.local] if not current.shadow else []
        for slot in unused:
            self._writer.write(slot, None if current.shadow else slot.param.grad)
            self._count(slot)
        return used

    def _attach(self, used: list[Slot] | None) -> None:
        """Point `param.grad` at the means, except where no rank used the parameter."""
        if used is not None:
            wanted = self.unused.used_anywhere(used, self.run_in_epoch)
            for slot in self.slots:
                if slot.index in wanted and slot.param.grad is None and slot.view is not None:
                    slot.param.grad = slot.view if slot.is_view else slot.view.to(slot.param.dtype, copy=True)
        for slot in self.slots:
            if slot.own_grad is not None and slot.view is not None:
                mean, slot.own_grad = slot.own_grad, None
                mean.copy_(slot.view)
                if slot.param.grad is None or slot.param.grad.is_sparse:
                    slot.param.grad = mean

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
        return self._writer.divisor if self._hook is None else self.communicator.group.world_size

    def _wait(self, bucket: Bucket) -> None:
        assert bucket.pending is not None
        before = time.perf_counter()
        try:
            self.communicator.wait(bucket.pending)
        except Error as error:
            if "It happened at" in str(error):  # a peer's words, which already say where
                raise
            text = str(error)
            stop = "" if text.endswith((".", "!", "?")) else "."
            raise type(error)(f"{text}{stop} It happened at {self._bucket_text(bucket)}.") from error
        bucket.waited_s = (before, time.perf_counter())

    # ---- Layout

    def _lay_out(self, arrivals: Sequence[int]) -> None:
        """Arenas and buckets in the order gradients arrived at rank 0. A collective."""
        if self.options.exclude_unused and self.unused.allowed:
            used = [self.slots[index] for index in arrivals]
            wanted = self.unused.used_anywhere(used, self.run_in_epoch)
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

    def _bucket_text(self, bucket: Bucket) -> str:
        return f"bucket {bucket.index} ({names_text([slot.name for slot in bucket.slots])})"

    # ---- Numbers and the end

    def stats(self) -> StepStats | None:
        """The last round in numbers, with every rank's phases in it, once all ranks have ended the round."""
        step = self.recorder.last_step
        if step is None or self._phases is None:
            return step
        return replace(step, ranks=tuple(self._phases.read()))

    def remove_hooks(self) -> None:
        """Leave the parameters alone from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        self.remove_hooks()
        self.communicator.close()
