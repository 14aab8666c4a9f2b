"""`DDPX(module)`: wrap a model on every rank, and after `backward()` each `param.grad` is the mean over all ranks.

The wrapper checks that ranks hold the same model (ddpx.checks), starts them from rank 0's values, shares rank 0's
buffers before each training forward (ddpx.buffers), and tells the reducer which outputs belong to a synchronised step.
All the rest is `ddpx.reducer`. It takes the place of DistributedDataParallel: the same arguments, in the same order.
"""

import contextlib
import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import gather as gather_outputs
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ddpx import checks
from ddpx.arguments import MixedPrecision, Terms, bucket_sizes, buffer_rules, delayed_names, group_of
from ddpx.autograd import reached_of, watch
from ddpx.buffers import BufferSync, broadcast
from ddpx.comm_hooks import HookRunner, builtin_hook, check_hook, expects_divergence
from ddpx.communicator import Communicator
from ddpx.ddp_reducer import DDPReducer
from ddpx.drift import EVERY
from ddpx.errors import DeadlineExceeded, ParametersChanged
from ddpx.group import Group, announcing
from ddpx.guard import LocalSteps, guard_steps
from ddpx.in_backward import step_all, take_over
from ddpx.join import DDPXJoinHook, JoinContext, UnevenInputs, can_join
from ddpx.logging_data import Logger, RunningTimes, logging_data
from ddpx.options import POLICIES, Mode, NonFinite, Options
from ddpx.outputs import tensors_in
from ddpx.reducer import Reducer
from ddpx.registered import Registered
from ddpx.sparse import sparse_parameters
from ddpx.stats import StepStats
from ddpx.transport import IN_FORWARD, Link

OF_PEERS = {
    *("_reducer", "_buffer_sync", "_registered", "_finalizer", "_uneven", "_in_backward", "_buffer_futures"),
    *("_join_config", "_times", "logger"),
}  # attributes that stay behind when a wrapper is copied
OF_PROCESS = {"process_group", "device_mesh"}  # those that cannot leave the process
MEETING_IN_BACKWARD = "a backward"
PRE_FORWARD, POST_FORWARD = "PRE_FORWARD", "POST_FORWARD"


class DDPX(nn.Module, Joinable):
    """Data-parallel `module`: same weights on every rank, gradients averaged during backward.

    Constructing it is a collective of `process_group` (default: the whole world; without torch.distributed, this
    process alone). Gradients are views into communication memory: they are overwritten by the next backward, so clone
    one to keep it, or pass gradient_as_bucket_view=False.

    The positional arguments are those of torch's DistributedDataParallel, with its meanings; docs/migration.md tells
    what differs. The others:
        mode: "overlapped" launches a bucket when it is full; "bucketed" all after backward; "naive" one parameter at a
            time, waiting for each.
        algorithm: of the all-reduce: "auto", "ring", "tree", "direct" and whatever ddpx.algorithms lists.
        transport: "auto"; "shared_memory" (ranks of one host), "sockets" (TCP of our own), "process_group"
            (torch.distributed messages) or "hierarchical" (shared memory in a host, messages between hosts).
        link: emulate a slow network, as Link or text such as "200us,1GB/s".
        timeout_s: deadline of every wait; default the process group's.
        check_replicas_every: compare a few megabytes of parameters over the ranks once in so many backwards; 0: never.
        nonfinite: what to do about NaN or infinity in a gradient, before it is reduced: "ignore", "warn" or "error".
        local_steps: "error" reports an optimizer that steps on gradients no backward has reduced; "allow" does not.

    Raises ValueError or RuntimeError, on every rank, for a model that cannot be trained or differs between ranks.
    """

    named_module_buffers: dict[str, Tensor]
    modules_buffers: list[Tensor]

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        mode: Mode = "overlapped",
        algorithm: str = "auto",
        transport: str = "auto",
        link: Link | str | None = None,
        timeout_s: float | None = None,
        check_replicas_every: int = EVERY,
        nonfinite: NonFinite = "ignore",
        local_steps: LocalSteps = "error",
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if mode not in POLICIES:
            raise ValueError(f"mode is one of {', '.join(POLICIES)}, not {mode!r}")
        if nonfinite not in ("ignore", "warn", "error"):
            raise ValueError(f"nonfinite is one of ignore, warn, error, not {nonfinite!r}")
        if local_steps not in ("error", "allow"):
            raise ValueError(f"local_steps is one of error, allow, not {local_steps!r}")
        if check_replicas_every < 0:
            raise ValueError(f"check_replicas_every counts backwards from 0 (never), not {check_replicas_every}")
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        delayed = delayed_names(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        ignored = checks.ignored_names(module)
        parameters = checks.parameters_of(module, ignored)
        checks.check_trainable(parameters)
        device = checks.device_of(parameters, device_ids, output_device)
        checks.refuse_sync_batch_norm_on_cpu(module, device)
        self.forward_sync_buffers, share_buffers_now = buffer_rules(broadcast_buffers, forward_sync_buffers)
        sizes = bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        self.module = module
        self.device = device
        self.device_type = device.type
        self.device_ids: list[int] | None = [device.index] if device_ids else None
        self.output_device = device.index if device_ids and output_device is None else output_device
        self.dim = dim
        self.is_multi_device_module = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.static_graph = False
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self._precision = MixedPrecision.of(mixed_precision)
        self.parameters_to_ignore = set(ignored)
        self.broadcast_bucket_size = 250 * 2**20
        self.bucket_bytes_cap = sizes.bucket_bytes
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.bucket_bytes_cap_list = list(sizes.listed)
        self.use_side_stream_for_tensor_copies = True
        self._has_joined = False
        self._divide_by_initial_world_size = True
        self._authoritative_rank = 0
        self._buffer_hook: tuple[Callable[..., Any], Any, str] | None = None
        self._assign_modules_buffers()
        options = Options(
            mode,
            sizes.bucket_bytes,
            sizes.first,
            sizes.listed,
            find_unused=find_unused_parameters or static_graph or skip_all_reduce_unused_params,
            static=static_graph,
            exclude_unused=skip_all_reduce_unused_params,
            gradients_are_views=gradient_as_bucket_view,
            wire_dtype=self._precision.wire_dtype if self._precision else None,
            nonfinite=nonfinite,
            check_replicas_every=check_replicas_every,
        )
        link = Link.parse(link) if isinstance(link, str) else link
        self._terms = Terms(
            options, algorithm, transport, link, timeout_s, init_sync, share_buffers_now, delayed, local_steps
        )
        self._forget_peers()
        self._meet("construction")
        if static_graph:
            self._set_static_graph()

    # ---- Peers

    def _forget_peers(self) -> None:
        """As a copy begins: no peer knows of it."""
        self._reducer: Reducer | None = None
        self._buffer_sync: BufferSync | None = None
        self._uneven: UnevenInputs | None = None
        self._in_backward: list[tuple[nn.Parameter, Any]] | None = None
        self._buffer_futures: list[torch.futures.Future[Any]] = []
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self._times = RunningTimes()
        self.logger = Logger(self)

    @property
    def reducer(self) -> Reducer:
        """What reduces the gradients. A copy has none before it meets its peers, as it then does: a collective."""
        if self._reducer is None:
            self._meet("a call")
        assert self._reducer is not None
        return self._reducer

    def _meet(self, place: str) -> None:
        """Join the peers: agree on model and settings, start from rank 0's values, make what reduces. A collective.

        `place` says where this happens; in a backward, values stay what the forward has used.
        """
        if self.process_group is None:
            self.process_group = group_of(None, None)
        is_copy = place != "construction"
        group = Group(self.process_group, self._terms.timeout_s, "copies" if is_copy else "groups")
        with announcing(group, "DDPX"):
            self._meet_in(group, place, is_copy)

    def _meet_in(self, group: Group, place: str, is_copy: bool) -> None:
        terms, module, ignored = self._terms, self.module, frozenset(self.parameters_to_ignore)
        parameters = checks.parameters_of(module, ignored)
        trained = checks.check_trainable(parameters)
        self.device = checks.device_of(parameters, self.device_ids, self.output_device)
        self._assign_modules_buffers()
        options = replace(
            terms.options,
            static=self.static_graph or terms.options.static,
            find_unused=self.static_graph or terms.options.find_unused,
        )
        agreed = {
            "algorithm": terms.algorithm,
            "transport": terms.transport,
            "find_unused_parameters": options.find_unused,
            "mixed_precision": self.mixed_precision,
            "nonfinite": options.nonfinite,
            "static_graph": options.static,
            "forward_sync_buffers": self.forward_sync_buffers,
            "mode": options.mode,
            "check_replicas_every": options.check_replicas_every,
            "skip_all_reduce_unused_params": options.exclude_unused,
            "the place where a copy meets its peers": place,
        }
        try:
            checks.agree_on_model(group, parameters, self.named_module_buffers, agreed)
        except DeadlineExceeded as error:
            if not is_copy:
                raise
            group.withdraw()
            raise DeadlineExceeded(
                f"{error} This is a copy of a wrapper, or was unpickled; it meets its peers in {place}, which all "
                "ranks have to make. On one rank alone call it under torch.no_grad() or no_sync(), or use its .module."
            ) from error
        cut = options.bucket_bytes, options.first_bucket_bytes, options.bucket_bytes_list
        cut = group.gather("bucket sizes", cut)[0]  # buckets are cut alike on all ranks: rank 0's
        options = replace(options, bucket_bytes=cut[0], first_bucket_bytes=cut[1], bucket_bytes_list=cut[2])
        communicator = Communicator(group, self.device, terms.algorithm, terms.transport, terms.link)
        if terms.init_sync and place != MEETING_IN_BACKWARD:
            broadcast(communicator, self.shared_tensors(buffers=terms.share_buffers))
        if self._precision is not None and self._precision.buffer_dtype is not None:
            _cast_buffers(self.modules_buffers, self._precision.buffer_dtype)
        self._buffer_sync = BufferSync(communicator)
        replicated = list(parameters.items()) if terms.init_sync else []
        reducer = DDPReducer(trained, communicator, options, sparse_parameters(module), terms.delayed, replicated)
        reducer.after_round = _after_round(weakref.ref(self))
        self._registered = Registered(module, ignored)
        self._reducer = reducer
        guard = guard_steps(reducer) if terms.local_steps == "error" and group.world_size > 1 else None
        self._finalizer = weakref.finalize(self, _close, reducer, guard)

    def _has_met(self, syncs: bool) -> bool:
        """Whether the peers know of this wrapper; a copy's first synchronised training forward is where they meet.

        In eval mode it is the backward, if one comes: one rank may well validate by itself.
        """
        if self._reducer is None and syncs and self.training and self._trained():
            self._meet("its first synchronised forward")
        return self._reducer is not None

    def _trained(self) -> list[nn.Parameter]:
        parameters = checks.parameters_of(self.module, frozenset(self.parameters_to_ignore))
        return [param for param in parameters.values() if param.requires_grad]

    def _meet_in_backward(self) -> None:
        """A backward has come to what a forward in eval mode returned."""
        if self._reducer is None:
            if not reached_of(self._trained()):
                return
            self._meet(MEETING_IN_BACKWARD)
        self.reducer.on_output_gradient()

    # ---- A step

    @torch._disable_dynamo(recursive=False)  # under torch.compile, the module inside is compiled; this frame is not
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wanted = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not self._has_met(wanted):
            args, kwargs = self._move_inputs(args, kwargs)
            output = self._run_module(args, kwargs)
            if wanted:
                watch(tensors_in(output), _meeting_hook(weakref.ref(self)))
            return output
        if self._in_backward is None:
            self._in_backward = take_over([slot.param for slot in self.reducer.slots])
        syncs = wanted and self._check_parameters()
        root = 0
        shares = syncs and self.training and self._look_at_buffers()
        if self._join_config.enable and self._uneven is not None:
            root = self._uneven.before_forward(shares, syncs)
        args, kwargs = self._move_inputs(args, kwargs)
        if not syncs:
            if wanted:  # all is frozen, for this step
                self.reducer.frozen_forwards += self.training
            return self._run_module(args, kwargs)
        if shares and self._buffer_hook_location() != POST_FORWARD:
            self.share_buffers(root, settle=False)
        began_s = time.perf_counter()
        self._times.iteration = self.reducer.rounds
        try:
            output = self._run_module(args, kwargs)
        except BaseException as error:
            if self.training:  # an evaluation is no affair of the peers'
                self.reducer.forward_failed(error)
            raise
        self._times.forward_s = (began_s, time.perf_counter())
        self.reducer.recorder.forward_s += time.perf_counter() - began_s
        if shares:
            self._settle_buffers()
        if shares and self._buffer_hook_location() == POST_FORWARD:
            self.share_buffers(root)
        self.reducer.watch(list(tensors_in(output)), self.training)
        return output

    def _run_module(self, args: Any, kwargs: Any) -> Any:
        if self._precision is not None and self._precision.param_dtype is not None:
            return _in_low_precision(self.module, self._precision.param_dtype, self.parameters_to_ignore, args, kwargs)
        return self.module(*args, **kwargs)

    def _move_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.device_ids:
            return args, kwargs
        from torch.distributed.utils import _to_kwargs

        moved, moved_kwargs = _to_kwargs(args, kwargs, self.device, self.use_side_stream_for_tensor_copies)
        return moved[0], moved_kwargs[0]

    def _check_parameters(self) -> bool:
        """What was wrapped must still be what is trained. Returns whether there is anything to synchronise.

        Parameters may be frozen for a while: all of them (a discriminator in its generator's step), or, where
        parameters may go without a gradient, some.
        """
        change, frozen = self._registered.look()
        if not change and not frozen:
            return True
        if not change and len(frozen) == len(self.reducer.slots):
            return False
        if not change and self.reducer.unused.allowed:
            return True
        message = (
            f"rank {self.reducer.rank}: {change or f'parameter {frozen[0]} was frozen'} after wrapping, so gradients "
            "would not be reduced as planned. Change the model first, then wrap it in DDPX; or wrap it again"
            f"{'; or pass find_unused_parameters=True' if frozen else ''}."
        )
        error = ParametersChanged(message)
        self.reducer.forward_failed(error)
        raise error

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here, and their backwards, accumulate locally; the next backward outside reduces everything."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sync_grads(self) -> None:
        """Reduce the gradients that have accumulated on each rank, without another forward. A collective."""
        reducer = self.reducer
        self._check_parameters()
        reducer.sync_now()

    def stats(self) -> StepStats | None:
        """Times of the last synchronised backward on this rank, and all ranks' phases; None before the first.

        Cheap, but it waits until every rank has ended that backward.
        """
        return None if self._reducer is None else self._reducer.stats()

    # ---- Buffers

    def shared_tensors(self, buffers: bool) -> list[Tensor]:
        """Parameters, and buffers if asked for, that all ranks have in common."""
        parameters = checks.parameters_of(self.module, frozenset(self.parameters_to_ignore))
        self._assign_modules_buffers()
        return [*parameters.values(), *(self.modules_buffers if buffers else ())]

    def share_buffers(self, root: int = 0, settle: bool = True) -> None:
        """The root's buffers for everybody, or what a registered buffer hook does instead. A collective.

        Without `settle`, the root does not yet wait until they have been read.
        """
        self.reducer.enter(IN_FORWARD)
        try:
            if self._buffer_hook is None:
                assert self._buffer_sync is not None
                self._buffer_sync.run(root)
                if settle:
                    self.reducer.communicator.settle()
                return
            hook, state, _ = self._buffer_hook
            self._buffer_futures += hook(state, self.named_module_buffers) or []
        except BaseException as error:
            self.reducer.fail_in_epoch(error)
            raise

    def _settle_buffers(self) -> None:
        """Wait until all ranks have read the buffers: as a rule they have, while the module ran."""
        try:
            self.reducer.communicator.settle()
        except BaseException as error:
            self.reducer.fail_in_epoch(error)
            raise

    def _look_at_buffers(self) -> bool:
        """Take in what the module's buffers are now. Whether training forwards share them."""
        self.named_module_buffers = self._registered.buffers
        self.modules_buffers = list(self.named_module_buffers.values())
        shares = self.will_sync_module_buffers()
        if self._buffer_sync is not None and self._buffer_hook is None and self.forward_sync_buffers:
            reducer = self.reducer
            reducer.buffers_digest = self._buffer_sync.look(self.named_module_buffers if shares else {})
            reducer.set_epochs_per_round(1 + shares)
        return shares

    def will_sync_module_buffers(self) -> bool:
        """Whether training forwards share buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _assign_modules_buffers(self) -> None:
        ignored = frozenset(self.parameters_to_ignore)
        self.named_module_buffers = checks.buffers_of(self.module, ignored)
        self.modules_buffers = list(self.named_module_buffers.values())

    def _buffer_hook_location(self) -> str:
        return self._buffer_hook[2] if self._buffer_hook is not None else PRE_FORWARD

    def _register_buffer_comm_hook(self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None) -> None:
        """Let hook(state, {name: buffer}) share buffers instead, before or after the forward (DDP's default)."""
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        location = POST_FORWARD if comm_hook_location is None else comm_hook_location.name
        self._buffer_hook = (hook, state, location)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """For buffer hooks: what DDP does without one."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        self._distributed_broadcast_coalesced(tensors, bucket_size or self.broadcast_bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        if self.process_group is not None:
            dist._broadcast_coalesced(self.process_group, tensors, buffer_size, authoritative_rank)

    # ---- Communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket; it returns a future. See ddpx.comm_hooks.

        Call it on every rank, once, before the first backward. Gradients are not divided: the hook does that.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self.reducer.last_error = str(error)
            raise
        self._register_hook(HookRunner(state, hook))

    def _register_hook(self, runner: HookRunner) -> None:
        if self.reducer.hook_name:
            message = "register_comm_hook or register_builtin_comm_hook can only be called once."
            self.reducer.last_error = message
            raise RuntimeError(message)
        self.reducer.set_hook(runner, expects_divergence(runner.state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """DDP's compiled hooks, by what the Python hooks of the same names do."""
        self._register_hook(HookRunner(self.process_group, builtin_hook(comm_hook_type), str(comm_hook_type)))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step `optim` on each parameter as soon as its gradient is reduced, through torch's own overlap hook."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP. Please file an issue to PyTorch or the respective owner of "
                f"{optim}."
            ) from error

    # ---- Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[Any]:
        """For uneven inputs: ranks that run out of batches inside shadow the others until all have. A collective."""
        if not can_join():
            return contextlib.nullcontext()
        return JoinContext(
            self,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's Join context asks each of its members for."""
        self._has_joined = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPXJoinHook(self, self._divide_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    # ---- What else scripts and torch itself reach for

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather_outputs(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        from torch.distributed.utils import _to_kwargs

        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def _set_static_graph(self) -> None:
        """Promise that each backward uses the same parameters as the first. A collective, before the first step."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.rounds:
            self.reducer.last_error = (
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
            raise RuntimeError(self.reducer.last_error)
        self.static_graph = self.reducer.unused.static = True
        self.reducer.unused.allow()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect "
                "unused parameters automatically, so you do not need to set find_unused_parameters=true, just be sure "
                "these unused parameters will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters to reduce, and whether each has sparse gradients."""
        return [slot.param for slot in self.reducer.slots], [slot.sparse for slot in self.reducer.slots]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """Names by place in `parameters`, which have to be those that are reduced."""
        given = {param: index for index, param in enumerate(parameters)}
        for slot in self.reducer.slots:
            if slot.param not in given:
                raise ValueError(f"Param with name {slot.name} found in module parameters, but not DDP parameters.")
        if len(given) != len(self.reducer.slots):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(given)} vs {len(self.reducer.slots)}."
            )
        return {given[slot.param]: slot.name for slot in self.reducer.slots}

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """DDP's report on a wrapper: its settings, buckets and times in nanoseconds. Empty for a copy without peers."""
        return {} if self._reducer is None else logging_data(self, self._times)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._times.rate = sample_rate

    def _check_reducer_finalized(self) -> None:
        """Nothing is ever left over: what a backward lacks is reported when it ends."""

    def _remove_autograd_hooks(self) -> None:
        """Leave the parameters alone: gradients stay local from here on."""
        self.reducer.remove_hooks()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: outputs are returned as the module made them."""

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        raise NotImplementedError(
            "DDPX does not move to another process group. Wrap the inner module anew: DDPX(model.module, "
            "process_group=new_process_group)."
        )

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        return DistributedDataParallel._get_data_parallel_params(module, named_params)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Parameters and buffers that are neither shared nor reduced, by name; before wrapping."""
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)

    @property
    def _distributed_rank(self) -> int:
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    # ---- Copies

    # A copy is local, as all that is pickled: everything but the peers goes along, and no constructor runs. Like DDP's,
    # it begins without the communication hook, and without gradients.

    def __deepcopy__(self, memo: dict[int, Any]) -> "DDPX":
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._state(), memo))
        for name in OF_PROCESS & vars(self).keys():
            setattr(twin, name, getattr(self, name))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and self.process_group is not dist.group.WORLD:
            message = (
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
            if self._reducer is not None:
                self._reducer.last_error = message
            raise RuntimeError(message)
        return self._state()

    def _state(self) -> dict[str, Any]:
        state = nn.Module.__getstate__(self)
        return {name: value for name, value in state.items() if name not in OF_PEERS | OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = group_of(None, None)
        self._forget_peers()


DistributedDataParallel.register(DDPX)  # frameworks unwrap what is an instance of it


def sync_grads(model: DDPX) -> None:
    """Reduce the gradients that have accumulated in `model` on each rank, without another forward. A collective."""
    if not isinstance(model, DDPX):
        raise TypeError(f"sync_grads takes a DDPX, not {type(model).__name__}")
    model.sync_grads()


# ---- Called from elsewhere; they hold the wrapper weakly, so that it can go ------------------------------------------


def _after_round(model: "weakref.ref[DDPX]") -> Callable[[], None]:
    def after_round() -> None:
        owner = model()
        if owner is None:
            return
        owner._times.add(owner)
        futures, owner._buffer_futures = owner._buffer_futures, []
        for future in futures:
            future.wait()
        if owner._in_backward:
            step_all(owner._in_backward)

    return after_round


def _meeting_hook(model: "weakref.ref[DDPX]") -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        owner = model()
        if owner is not None:
            owner._meet_in_backward()

    return hook


def _close(reducer: Reducer, guard: Any) -> None:
    if guard is not None:
        guard.remove()
    reducer.close()


# ---- Mixed precision -------------------------------------------------------------------------------------------------


def _cast_buffers(buffers: Sequence[Tensor], dtype: torch.dtype) -> None:
    for buffer in buffers:
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _in_low_precision(module: nn.Module, dtype: torch.dtype, ignored: set[str], args: Any, kwargs: Any) -> Any:
    """The module's forward with its floating-point parameters and inputs in `dtype`; autograd casts gradients back."""
    from torch.distributed.utils import _cast_forward_inputs

    args, kwargs = _cast_forward_inputs(dtype, *args, **kwargs)
    low = {
        name: param.to(dtype)
        for name, param in module.named_parameters()
        if param.is_floating_point() and name not in ignored
    }
    return torch.func.functional_call(module, low, args, kwargs, tie_weights=True)
