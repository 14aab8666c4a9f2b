"""`_get_ddp_logging_data()`: the keys of DDP's report, filled from what ddpx knows. Times are nanoseconds."""

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from ddpx.data_parallel import DDPX

CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
DEFAULT_RATE = 100
ALWAYS_FIRST = 10  # iterations whose times are always in the averages


class RunningTimes:
    """Sums of a wrapper's step times, over the first iterations and every `rate`th later one."""

    def __init__(self) -> None:
        self.rate = DEFAULT_RATE
        self.samples = 0
        self.iteration = 0  # as of the last synchronised forward, which is when DDP looks
        self.forward_s = (0.0, 0.0)  # begin, end of the last forward
        self.last: dict[str, int] = {}
        self.sums: dict[str, int] = {}

    def add(self, model: "DDPX") -> None:
        """Note the round that just ended."""
        step = model.reducer.recorder.last_step
        if step is None or not (step.round <= ALWAYS_FIRST or step.round % self.rate == 0):
            return
        ends = [bucket.ended_s for bucket in step.buckets if bucket.ended_s is not None]
        first = min((bucket.launched_s for bucket in step.buckets), default=step.backward_ended_s)
        last = max(ends, default=step.backward_ended_s)
        spans = {
            "forward_compute_time": self.forward_s,
            "backward_compute_time": (step.backward_began_s, step.backward_ended_s),
            "backward_comm_time": (first, last),
        }
        times = {name: max(1, _ns(end - begin)) for name, (begin, end) in spans.items()}
        times["backward_compute_comm_overlap_time"] = max(0, _ns(min(step.backward_ended_s, last) - first))
        self.last = dict(times)
        for name, (begin, end) in spans.items():
            self.last[f"{name}_start"], self.last[f"{name}_end"] = _ns(begin), _ns(end)
        for name, value in times.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.samples += 1


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _env(name: str) -> str:
    return os.environ.get(name, "N/A")


def logging_data(model: "DDPX", times: RunningTimes) -> dict[str, Any]:
    """The report, as one dictionary of strings and integers."""
    reducer = model.reducer
    trained = [slot.param for slot in reducer.slots]
    bucket_bytes = [bucket.flat.nbytes for bucket in reducer.buckets] or _planned_bytes(model)
    sizes = ", ".join(map(str, bucket_bytes))
    indices = ", ".join(" ".join(str(slot.index) for slot in bucket.slots) for bucket in reducer.buckets)
    backend = dist.get_backend(model.process_group) if dist.is_initialized() else "none"
    strings = {
        "module_name": type(model.module).__name__,
        "dtypes": ", ".join(sorted({CPP_NAMES.get(param.dtype, str(param.dtype)) for param in trained})),
        "backend_name": backend,
        "device_ids": ", ".join(map(str, model.device_ids or [])),
        "bucket_sizes": sizes,
        "master_addr": _env("MASTER_ADDR"),
        "master_port": _env("MASTER_PORT"),
        "torch_distributed_debug": _env("TORCH_DISTRIBUTED_DEBUG"),
        "cuda_visible_devices": _env("CUDA_VISIBLE_DEVICES"),
        "transport": reducer.communicator.transport_name,
        "mode": reducer.mode,
        "algorithms": ", ".join(bucket.algorithm for bucket in reducer.buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.last_arrivals)),
    }
    if reducer.hook_name:
        strings["comm_hook"] = reducer.hook_name
    if reducer.last_error:
        strings["error"] = reducer.last_error
    if backend == "gloo":
        strings["gloo_socket_ifname"] = _env("GLOO_SOCKET_IFNAME")
        strings["gloo_device_transport"] = _env("GLOO_DEVICE_TRANSPORT")
    if backend == "nccl":
        for name in ("socket_ifname", "blocking_wait", "async_error_handling", "debug", "nthreads", "ib_timeout"):
            strings[f"nccl_{name}"] = _env(f"NCCL_{name.upper()}")
    if reducer.rounds:
        strings["rebuilt_bucket_sizes"] = sizes
        strings["rebuilt_per_bucket_param_indices"] = indices
    integers = {
        "world_size": reducer.communicator.group.world_size,
        "rank": reducer.rank,
        "iteration": times.iteration,
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(param.nbytes for param in trained),
        "num_buckets_reduced": len(reducer.buckets),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "broadcast_buffers": int(model.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in model.module.modules())),
        "is_multi_device_module": 0,
        "output_device": -1 if model.output_device is None else torch.device(model.output_device).index,
        "has_rebuilt_buckets": int(reducer.rounds > 0),
        "unused_parameter_size": sum(
            slot.param.nbytes for slot in reducer.slots if not slot.written and reducer.rounds
        ),
        "static_graph": int(model.static_graph),
        "can_set_static_graph": int(reducer.rounds == 0),
        "join_uneven_inputs": int(model._has_joined),
        "has_error": int(bool(reducer.last_error)),
    }
    if backend == "gloo":
        integers["gloo_num_threads"] = 2
    averages = {f"avg_{name}": value // times.samples for name, value in times.sums.items()}
    return {**strings, **integers, **times.last, **averages}


def _planned_bytes(model: "DDPX") -> list[int]:
    """Before the first round there are no buckets yet: what they will hold, by dtype."""
    sizes: dict[torch.dtype, int] = {}
    for slot in reversed(model.reducer.slots):
        sizes[slot.param.dtype] = sizes.get(slot.param.dtype, 0) + slot.param.nbytes
    return list(sizes.values())


class Logger:
    """What code that reaches for `model.logger` finds."""

    def __init__(self, model: "DDPX") -> None:
        self._model = weakref.ref(model)

    def _get_ddp_logging_data(self) -> "LoggingData":
        model = self._model()
        assert model is not None
        data = model._get_ddp_logging_data()
        return LoggingData(data)


class LoggingData:
    """DDP's report comes as two maps."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.strs_map = {name: value for name, value in data.items() if isinstance(value, str)}
        self.ints_map = {name: value for name, value in data.items() if isinstance(value, int)}
