"""torch's communication hooks on our buckets: a `GradBucket` that hooks can read, and what to wait for afterwards.

With a hook, buckets are whole parameters without gaps, and hold gradients that nobody has divided: the hook does.
Buckets are handed over in index order on every rank, in the thread that runs backward, as DDP does it.
"""

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpx.arena import Bucket
from ddpx.errors import DeadlineExceeded
from ddpx.stream import POLL_S

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class GradBucket:
    """What a hook sees of a bucket; the methods are those of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's number, which is its place in the order of launching."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients of the bucket, flat, one behind the other."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Each parameter's gradient: views of the original buffer."""
        return [slot.view for slot in self._bucket.slots if slot.view is not None]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [slot.param for slot in self._bucket.slots]

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` (of another dtype, perhaps) stand for the gradients from here on."""
        self._buffer = buffer


class HookPending:
    """The future a hook returned. Waiting for it copies its tensor into the bucket."""

    def __init__(self, future: torch.futures.Future[Tensor], bucket: Bucket) -> None:
        self.started_s: float | None = time.perf_counter()
        self.ended_s: float | None = None
        self._future = future
        self._bucket = bucket
        self._finished = threading.Event()
        if bucket.flat.device.type == "cpu":
            future.add_done_callback(self._note_end)

    def _note_end(self, _: Any) -> None:
        self.ended_s = time.perf_counter()
        self._finished.set()

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self, poll: Callable[[], None], timeout_s: float) -> None:
        if self._bucket.flat.device.type == "cpu":
            deadline = time.monotonic() + timeout_s
            while not self._finished.wait(POLL_S):
                poll()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"a communication hook's future did not end within {timeout_s:.0f} s")
        result = self._future.wait()
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

    def launch(self, bucket: Bucket, bucket_count: int) -> HookPending:
        future = self.hook(self.state, GradBucket(bucket, bucket.index == bucket_count - 1))
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
