"""torch's communication hooks on our buckets: a `GradBucket` that hooks can read, and what to wait for afterwards.

With a hook, buckets are whole parameters without gaps, and hold gradients that nobody has divided: the hook does.
Buckets are handed over in index order on every rank, in the thread that runs backward, as DDP does it. Each lies in
memory of its own, so that a hook may resize it.

Note: one bucket at a time. Some stock hooks call collectives from callbacks of their futures. On CPU these run in the
process group's threads, whenever an earlier collective happens to end; so with two buckets under way ranks would call
in different orders, and threads that wait in callbacks would leave none to communicate (DDP hangs there). For these
hooks the next bucket waits until the last one has ended.
"""

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpx.arena import Bucket, gradient_view
from ddpx.errors import DeadlineExceeded
from ddpx.stream import POLL_S

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class GradBucket:
    """What a hook sees of a bucket; the methods are those of torch.distributed.GradBucket.

    `in_memory_order`: gradients as DDP cuts them, contiguous whatever the order of their parameters' dimensions.
    """

    def __init__(self, bucket: Bucket, is_last: bool, in_memory_order: bool = False) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat.detach()  # a tensor of its own on the same memory: resizing it is the hook's affair
        self._is_last = is_last
        self._in_memory_order = in_memory_order

    def index(self) -> int:
        """The bucket's number, which is its place in the order of launching."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients of the bucket, flat, one behind the other."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Each parameter's gradient: views of the buffer."""
        flat = self._buffer
        if self._in_memory_order and not any(slot.param.is_complex() for slot in self._bucket.slots):
            return [
                flat[slot.begin : slot.begin + slot.param.numel()].view(slot.param.shape) for slot in self._bucket.slots
            ]
        if flat.dtype == self._bucket.flat.dtype and flat.data_ptr() == self._bucket.flat.data_ptr():
            return [slot.view for slot in self._bucket.slots if slot.view is not None]
        return [gradient_view(flat, slot.begin, slot.param) for slot in self._bucket.slots]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [slot.param for slot in self._bucket.slots]

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` (of another dtype, perhaps) stand for the gradients from here on."""
        self._buffer = buffer


class _End:
    """When a future ended. Nothing else, since a future that never ends keeps its callbacks for good."""

    def __init__(self) -> None:
        self.ended_s: float | None = None
        self.finished = threading.Event()

    def note(self, _: Any) -> None:
        self.ended_s = time.perf_counter()
        self.finished.set()


class HookPending:
    """The future a hook returned. Waiting for it copies its tensor into the bucket, once."""

    def __init__(self, future: torch.futures.Future[Tensor], bucket: Bucket) -> None:
        self.started_s: float | None = time.perf_counter()
        self._end = _End()
        self._future: torch.futures.Future[Tensor] | None = future
        self._bucket = bucket
        if bucket.flat.device.type == "cpu":
            future.add_done_callback(self._end.note)

    @property
    def ended_s(self) -> float | None:
        return self._end.ended_s

    def done(self) -> bool:
        return self._future is None or bool(self._future.done())

    def wait(self, poll: Callable[[], None], timeout_s: float) -> None:
        if self._future is None:
            return
        if self._bucket.flat.device.type == "cpu":
            deadline = time.monotonic() + timeout_s
            while not self._end.finished.wait(POLL_S):
                poll()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"a communication hook's future did not end within {timeout_s:.0f} s")
        future, self._future = self._future, None
        result = future.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor):
            raise RuntimeError(f"a communication hook's future must hold a tensor, not {type(result).__name__}")
        flat = self._bucket.flat
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))


class HookRunner:
    """Starts a registered hook on a bucket."""

    def __init__(self, state: Any, hook: Hook, name: str = "") -> None:
        self.state = state
        self.hook = hook
        self.name = name or getattr(hook, "__qualname__", type(hook).__name__)
        self._is_power_sgd = type(state).__name__ == "PowerSGDState"

    def goes_one_at_a_time(self, bucket: Bucket) -> bool:
        """Whether `bucket` has to wait for the one before it; see the note at the top."""
        return self._is_power_sgd and bucket.index > 0 and bucket.flat.device.type == "cpu"

    def launch(self, bucket: Bucket, bucket_count: int) -> HookPending:
        is_last = bucket.index == bucket_count - 1
        future = self.hook(self.state, GradBucket(bucket, is_last, in_memory_order=self._is_power_sgd))
        if not isinstance(future, (torch.futures.Future, torch._C.Future)):
            raise RuntimeError(
                "expected a torch.futures.Future: DDP communication hook's callback must return a "
                f"torch.futures.Future object, but got {type(future).__module__}.{type(future).__qualname__}"
            )
        return HookPending(future, bucket)


def check_hook(hook: Any) -> None:
    """TypeError or ValueError, in DDP's words, for what cannot be a communication hook."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise KeyError("bucket")  # what DDP raises; a hook's second parameter has to have this name
    annotation = signature.parameters["bucket"].annotation
    if not isinstance(annotation, str) and annotation not in (inspect.Parameter.empty, dist.GradBucket, GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    annotation = signature.return_annotation
    if not isinstance(annotation, str) and annotation not in (
        inspect.Signature.empty,
        torch.futures.Future[torch.Tensor],
    ):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def builtin_hook(kind: Any) -> Hook:
    """The stock Python hook that does what DDP's compiled hook of that kind does."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in hooks:
        raise ValueError(f"unknown built-in communication hook {kind}; known: {', '.join(map(str, hooks))}")
    return hooks[kind]


def run_allreduce(bucket: GradBucket, process_group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """The sum of a bucket over the group, not divided: what hooks ask DDP's reducer for as `_run_allreduce_hook`."""
    work = dist.all_reduce(bucket.buffer(), group=process_group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def expects_divergence(state: Any) -> bool:
    """Whether a stock hook lets replicas differ on purpose: post-local SGD averages parameters instead."""
    return type(state).__name__ == "PostLocalSGDState"
