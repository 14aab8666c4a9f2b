"""`DDPX(module)`: wrap a model on every rank, and after `backward()` each `param.grad` is the mean over all ranks.

The wrapper checks that ranks hold the same model, starts them from rank 0's values, shares rank 0's buffers before each
training forward, and tells the reducer which outputs belong to a synchronised step. All the rest is `ddpx.reducer`.
"""

import contextlib
import copy
import dataclasses
import hashlib
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpx.buffers import BufferSync, broadcast
from ddpx.communicator import Communicator
from ddpx.errors import Mismatch, ParametersChanged
from ddpx.group import Group
from ddpx.reducer import POLICIES, Mode, Reducer
from ddpx.stats import StepStats
from ddpx.transport import IN_FORWARD, Link

DEFAULT_BUCKET_MB = 25.0


class DDPX(nn.Module):
    """Data-parallel `module`: same weights on every rank, gradients averaged during backward.

    Constructing it is a collective of `process_group` (default: the whole world; without torch.distributed, this process
    alone). Gradients are views into communication memory: they are overwritten by the next backward, so clone one to keep
    it, or pass gradient_as_bucket_view=False.

    Args (beyond those of DistributedDataParallel):
        mode: "overlapped" launches a bucket when it is full; "bucketed" all after backward; "naive" one parameter at a time.
        algorithm: of the all-reduce: "auto", "ring", "tree", "direct" and whatever ddpx.algorithms lists.
        transport: "auto", "shared_memory" (ranks of one host) or "process_group" (torch.distributed messages).
        bucket_cap_mb: size of a bucket in MiB.
        link: emulate a slow network, as Link or text such as "200us,1GB/s".
        timeout_s: deadline of every wait; default the process group's.

    Raises ValueError or RuntimeError, on every rank, for a model that cannot be trained or differs between ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        mode: Mode = "overlapped",
        algorithm: str = "auto",
        transport: str = "auto",
        link: Link | str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._arguments = {
            "process_group": process_group,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "broadcast_buffers": broadcast_buffers,
            "mode": mode,
            "algorithm": algorithm,
            "transport": transport,
            "link": link,
            "timeout_s": timeout_s,
        }
        if mode not in POLICIES:
            raise ValueError(f"mode is one of {', '.join(POLICIES)}, not {mode!r}")
        cap_mb = DEFAULT_BUCKET_MB if bucket_cap_mb is None or bucket_cap_mb <= 0 else bucket_cap_mb
        self.module = module
        self.require_backward_grad_sync = True
        self.process_group = process_group
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self._group = Group(process_group, timeout_s)
        trained, device = _trained_parameters(module)
        _agree_on_model(self._group, module)
        self.device = device
        communicator = Communicator(
            self._group, device, algorithm, transport, Link.parse(link) if isinstance(link, str) else link
        )
        broadcast(communicator, [*_parameters(module).values(), *_buffers(module).values()])
        self._buffer_sync = BufferSync(communicator, module) if broadcast_buffers and _buffers(module) else None
        self.reducer = Reducer(
            trained,
            communicator,
            mode,
            max(1, int(cap_mb * 2**20)),
            find_unused=find_unused_parameters or static_graph,
            gradients_are_views=gradient_as_bucket_view,
        )
        self._places = _places(module)
        self._finalizer = weakref.finalize(self, self.reducer.close)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.require_backward_grad_sync):
            return self.module(*args, **kwargs)
        self._check_parameters()
        try:
            if self._buffer_sync is not None and self.training:
                self.reducer.enter(IN_FORWARD)
                self._buffer_sync.run()
            output = self.module(*args, **kwargs)
        except BaseException as error:
            self.reducer.forward_failed(error)
            raise
        self.reducer.watch(list(tensors_in(output)), counts=self.training)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here, and their backwards, accumulate locally; the next backward outside reduces everything."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def stats(self) -> StepStats | None:
        """Times of the last synchronised backward on this rank, or None before the first."""
        return self.reducer.last_step

    def _check_parameters(self) -> None:
        """What was wrapped must still be what is trained. One look at each parameter, no hashing."""
        for name, owner, key, param, trained, dtype in self._places:
            now = owner._parameters.get(key)
            if now is param and now.requires_grad is trained and now.dtype is dtype:
                continue
            if now is not param:
                change = "was replaced"
            elif now.requires_grad is not trained:
                change = "was frozen" if trained else "was unfrozen"
            else:
                change = f"changed from {dtype} to {now.dtype}"
            message = (
                f"rank {self._group.rank}: parameter {name} {change} after wrapping, so its gradient would not be "
                "reduced. Change the model first, then wrap it in DDPX."
            )
            self.reducer.forward_failed(ParametersChanged(message))
            raise ParametersChanged(message)

    # ---- Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "DDPX":
        """A wrapper of its own around a copy of the module; a collective, like construction."""
        twin = DDPX(copy.deepcopy(self.module, memo), **self._arguments)
        twin.train(self.training)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self._arguments["process_group"] is not None:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        return {"module": self.module, "arguments": self._arguments, "training": self.training}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], **state["arguments"])  # type: ignore[misc]
        self.train(state["training"])


# ---- The model, as all ranks must agree on it ------------------------------------------------------------------------


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


def _trained_parameters(module: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], torch.device]:
    """Names and parameters to reduce, and their device; ValueError or RuntimeError when they can't be trained."""
    parameters = _parameters(module)
    lazy = [name for name, param in parameters.items() if isinstance(param, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DDPX`. Run a dummy forward pass to correctly "
            f"initialize the modules. Uninitialized: {', '.join(lazy)}."
        )
    trained = [(name, param) for name, param in parameters.items() if param.requires_grad]
    if not trained:
        raise RuntimeError(
            "DDPX is not needed when a module doesn't have any parameter that requires a gradient."
        )
    devices = {param.device for _, param in trained}
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            "DDPX's input module must be on the same type of devices, but input module parameters locate in "
            f"{sorted({device.type for device in devices})}."
        )
    if len(devices) > 1:
        raise ValueError(f"DDPX needs a module on one device, but its parameters are on {sorted(map(str, devices))}.")
    return trained, devices.pop()


def _agree_on_model(group: Group, module: nn.Module) -> None:
    """Raise the same Mismatch on every rank, naming the first difference, unless all hold the same model."""
    lines = [
        (name, list(t.shape), list(t.stride()), str(t.dtype), t.requires_grad)
        for name, t in [*_parameters(module).items(), *_buffers(module).items()]
    ]
    digests = group.gather("model fingerprint", hashlib.sha256(pickle.dumps(lines)).hexdigest())
    if len(set(digests)) == 1:
        return
    models = group.gather("model", (lines, len(_parameters(module))))
    reference, count = models[0]
    for rank, (theirs, their_count) in enumerate(models):
        if their_count != count:
            raise Mismatch(
                f"DDP expects same model across all ranks, but Rank {rank} has {their_count} params, "
                f"while rank 0 has inconsistent {count} params."
            )
        for index, (line, their_line) in enumerate(zip(reference, theirs, strict=False)):
            if line != their_line:
                raise Mismatch(
                    "DDP expects same model across all ranks, but they differ first at tensor "
                    f"{index}: rank 0 has {_line_text(line)}, rank {rank} has {_line_text(their_line)}."
                )
        if len(theirs) != len(reference):
            raise Mismatch(
                f"DDP expects same model across all ranks, but rank {rank} has {len(theirs) - their_count} buffers, "
                f"while rank 0 has {len(reference) - count}."
            )


def _line_text(line: tuple[str, list[int], list[int], str, bool]) -> str:
    name, shape, stride, dtype, trained = line
    return f"{name} {shape} stride {stride} {dtype}{'' if trained else ' not trained'}"


def _places(module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter, bool, torch.dtype]]:
    """Where each parameter hangs, and as what, to notice later changes without walking the model."""
    return [
        (f"{prefix}.{key}" if prefix else key, owner, key, param, param.requires_grad, param.dtype)
        for prefix, owner in module.named_modules()
        for key, param in owner._parameters.items()
        if param is not None
    ]


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts, dataclasses and objects with attributes."""
    seen = set() if _seen is None else _seen
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, complex, type, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        children = vars(value).values()
    else:
        children = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    for child in list(children):
        yield from tensors_in(child, seen)
