"""Boil one rank's event stream down to what the analysis needs: steps, busy time, communication, waits.

An event is told apart by category and name, never by thread order or position:

    communication  GPU: kernels of NCCL and its kin, and everything that runs under a `gloo:` / `nccl:` annotation on
                   its stream (so a collective made of copies and plain kernels counts too); host: `gloo:` annotations
    compute        GPU: every other kernel; CPU: operators on threads that don't communicate, minus the time in which
                   their own thread waits or communicates (a wait inside a backward operator is not compute)
    copies         GPU copies and fills; neither compute nor communication, as in Holistic Trace Analysis

What grows with a trace is a compact row per kernel or per outermost CPU operator (these go to a temporary file where
there are very many); nested operators vanish on sight.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddpx.trace.intervals import Interval, subtract, union
from ddpx.trace.lanes import Lane, Samples, Stream
from ddpx.trace.read import TraceError, TraceFile, args_of, decode

SAMPLED_FROM_NS = 20_000  # operators shorter than this say little about slowdown
ROUNDING_NS = 2000  # older traces round to whole microseconds, so steps that follow one another may seem to overlap
COMM_KERNEL = re.compile(
    rb"nccl|rccl|^hccl|oneccl|mscclKernel|nvshmem|cross_device_reduce"
    rb"|(one|two)_shot_all_reduce|multimem_(all_reduce|all_gather|reduce_scatter|one_shot)"
)
COMM_ANNOTATION = re.compile(rb"(gloo|nccl|mpi|ucc|xccl|hccl):")
DEVICE_PREFIXES = (b"nccl:", b"xccl:", b"hccl:")  # of annotations that only launch; the kernels are the communication
WAIT = re.compile(rb"ddpx:wait$|_?c10d_functional::wait_tensor$")
LOADER = re.compile(rb"enumerate\(DataLoader\)|(dataloader|data_loader)", re.IGNORECASE)
NOT_COMPUTE = re.compile(rb"_?c10d(_functional)?::|record_param_comms$|ProfilerStep|FSDP::|ddpx:")
OWN_THREAD = "ddpx compute"  # ddpx.profile's name for the thread that takes the steps
COMM_THREAD = re.compile(r"ddpx.comm|gloo_runloop|pt_nccl|ProcessGroup", re.IGNORECASE)

DTYPE_BYTES = {
    **dict.fromkeys(("float", "Float", "int", "Int", "c10::complex<Half>", "float32", "int32"), 4),
    **dict.fromkeys(("double", "Double", "long int", "Long", "long", "float64", "int64", "c10::complex<float>"), 8),
    **dict.fromkeys(("c10::BFloat16", "BFloat16", "c10::Half", "Half", "short int", "Short", "bfloat16", "float16"), 2),
    **dict.fromkeys(("unsigned char", "Byte", "signed char", "Char", "bool", "Bool", "uint8", "int8"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
KINDS = (
    ("all_reduce", "allreduce"),
    ("reduce_scatter", "reducescatter"),
    ("all_gather", "allgather"),
    ("all_to_all", "alltoall"),
    ("broadcast", "broadcast"),
    ("send_recv", "sendrecv"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("barrier", "barrier"),
)
PARTS = {"send", "recv", "send_recv"}


@dataclass(slots=True)
class Step:
    number: int
    start: int  # ns, host side
    end: int


@dataclass(slots=True)
class Collective:
    """One rank's part in one collective; times in ns."""

    kind: str  # all_reduce, ...; "other" where the name doesn't tell
    name: str
    start: int
    end: int
    size: int | None = None  # bytes of the collective as nccl-tests counts them; None where the trace doesn't say
    dtype: str = ""
    bucket: int | None = None  # ddpx's bucket index
    group: str = ""  # ranks of the process group where the trace says
    group_size: int | None = None
    launch: int | None = None  # GPU: when the host asked for it
    where: str = ""  # thread or stream
    external_id: int | None = None


@dataclass(slots=True)
class Recording:
    """What is kept of one rank's trace."""

    path: Path
    rank: int | None
    world_size: int | None
    backend: str
    host: str
    base_ns: int
    device: str  # "gpu" or "cpu"
    is_local: bool  # ddpx recorded it in mode local, whose ranks don't communicate
    steps: list[Step]
    names: list[str]  # name ids index this
    lanes: dict[bytes, Lane]  # CPU traces: operators by thread
    comm_threads: set[bytes]
    streams: dict[tuple[bytes, bytes], Stream]  # GPU: kernels, copies by (device, stream)
    kernel_kind: dict[int, str]  # name id -> compute, comm, copy
    comm_spans: dict[tuple[bytes, bytes], list[Interval]]  # GPU: time under a communication annotation, by stream
    comm_streams: set[tuple[bytes, bytes]]  # whole streams named as communication's
    comm_by_thread: dict[bytes, list[Interval]]  # host-side communication
    waits: dict[bytes, list[Interval]]
    loader: list[Interval]
    annotations: list[tuple[int, int, int]]  # (start, end, name id) on the step's thread
    syncs: list[tuple[int, int, int]]  # host blocked on the device
    launch_correlation: array[int]
    launch_time: array[int]
    launch_thread: array[int]  # indexes `threads`
    threads: list[bytes]
    collectives: list[Collective]
    samples: dict[tuple[str, str], Samples]
    events: int
    json_bytes: int
    notes: list[str] = field(default_factory=list)

    def launch_of(self, correlation: int) -> int | None:
        """When the host launched a device event; None where the trace doesn't say."""
        i = self.launch_index(correlation)
        return None if i is None else self.launch_time[i]

    def launch_index(self, correlation: int) -> int | None:
        i = bisect_left(self.launch_correlation, correlation)
        return i if i < len(self.launch_correlation) and self.launch_correlation[i] == correlation else None

    def close(self) -> None:
        """Give temporary files back."""
        for lane in self.lanes.values():
            lane.close()

    def lane_compute(self, thread: bytes) -> Iterator[Interval]:
        """One CPU thread's compute: its operators minus its own waits and communication."""
        idle = union(self.waits.get(thread, []) + self.comm_by_thread.get(thread, []))
        busy = self.lanes[thread].intervals()
        return subtract(busy, idle) if idle else busy


class HostComm(NamedTuple):
    """A communication annotation on a host thread."""

    name: bytes
    thread: bytes
    start: int
    end: int
    args: dict[str, Any]


class DeviceComm(NamedTuple):
    """A communication kernel, or the shadow that a communication annotation throws on a stream."""

    name: bytes
    stream: tuple[bytes, bytes]
    start: int
    end: int
    args: dict[str, Any]
    is_kernel: bool


_CORRELATION = re.compile(rb'"correlation":\s*(\d+)')
_GRID = re.compile(rb'"grid":\s*(\[[^\]]*\]),\s*"block":\s*(\[[^\]]*\])')
_DIMS = re.compile(rb'"Input Dims":\s*([\[\], \d]+)')
_NUMBER = re.compile(rb"#(\d+)")
_SYNC = re.compile(rb"(Device|Stream|Event)Synchronize")

_DEVICE = {b"kernel": "kernel", b"Kernel": "kernel", b"gpu_memcpy": "copy", b"gpu_memset": "copy"}
_DEVICE |= {b"Memcpy": "copy", b"Memset": "copy"}
_OPS = {b"cpu_op", b"Operator", b"operator"}


def collect(path: Path, step_name: str = "ProfilerStep") -> Recording:
    """Read one trace file; raises TraceError where it isn't one rank's whole trace with steps in it."""
    source = TraceFile(path)
    step_prefix = step_name.encode()
    name_ids: dict[bytes, int] = {}
    kinds: dict[bytes, str] = {}
    steps: dict[tuple[int, int], Step] = {}
    step_threads: dict[tuple[bytes, bytes], int] = {}
    lanes: dict[bytes, Lane] = {}
    streams: dict[tuple[bytes, bytes], Stream] = {}
    kernel_kind: dict[int, str] = {}
    host_comm: list[HostComm] = []
    device_comm: list[DeviceComm] = []
    waits: dict[bytes, list[Interval]] = {}
    loader: list[Interval] = []
    annotations: dict[bytes, list[tuple[int, int, int]]] = {}
    syncs: list[tuple[int, int, int]] = []
    correlations, launch_times, launch_threads = array("q"), array("q"), array("i")
    thread_ids: dict[bytes, int] = {}
    samples: dict[tuple[bytes, bytes], Samples] = {}
    has_kernels = False
    negative = kernel_launches = 0

    def name_id(name: bytes) -> int:
        known = name_ids.get(name)
        if known is None:
            known = name_ids[name] = len(name_ids)
        return known

    def args_in(raw: bytes | None) -> dict[str, Any]:
        try:
            return args_of(raw)
        except ValueError as error:
            raise TraceError(f"{path}: invalid JSON in the args of event {source.events_read}: {error}") from None

    def kind_of_host(name: bytes) -> str:
        if name.startswith(step_prefix):
            return "step"
        if COMM_ANNOTATION.match(name):
            return "comm"
        if WAIT.match(name):
            return "wait"
        if LOADER.match(name):
            return "loader"
        return "aten" if name.startswith(b"aten::") else "skip" if NOT_COMPUTE.match(name) else "op"

    for category, name, pid, tid, start, duration, args in source.events():
        if duration < 0:
            negative += category in _DEVICE or category in _OPS or category == b"user_annotation"
            continue
        if category in _OPS or category == b"user_annotation" or category == b"":
            kind = kinds.get(name)
            if kind is None:
                if len(kinds) > 100_000:  # names that carry a counter: don't hoard them
                    kinds.clear()
                kind = kinds[name] = kind_of_host(name)
            end = start + duration
            if kind == "aten" or kind == "op":
                if category == b"user_annotation":
                    annotations.setdefault(tid, []).append((start, end, name_id(name)))
                    continue
                if has_kernels:
                    continue
                lane = lanes.get(tid)
                if lane is None:
                    lane = lanes[tid] = Lane()
                if kind == "aten" and start >= lane.sample_end:
                    lane.sample_end = end
                    if duration >= SAMPLED_FROM_NS:
                        dims = _DIMS.search(args) if args else None
                        key = (name, dims.group(1).rstrip(b", ") if dims else b"")
                        kept = samples.get(key)
                        if kept is None:
                            kept = samples[key] = Samples()
                        kept.add(start, end)
                ends = lane.end
                if not ends or end > ends[-1] or start < lane.start[-1]:
                    ident = name_id(name)
                    lane.add(start, end, ident, ident)
            elif kind == "comm":
                host_comm.append(HostComm(name, tid, start, end, args_in(args)))
            elif kind == "wait":
                waits.setdefault(tid, []).append((start, end))
            elif kind == "loader":
                loader.append((start, end))
                annotations.setdefault(tid, []).append((start, end, name_id(name)))
            elif kind == "step":
                number = _NUMBER.search(name)
                steps.setdefault((start, end), Step(int(number.group(1)) if number else len(steps), start, end))
                step_threads[pid, tid] = step_threads.get((pid, tid), 0) + 1
        elif category in _DEVICE:
            if not has_kernels and _DEVICE[category] == "kernel":
                has_kernels = True
                lanes.clear()  # on a GPU trace the operators are launches, not compute
                samples.clear()
            found = _CORRELATION.search(args) if args else None
            correlation = int(found.group(1)) if found else -1
            stream = streams.setdefault((pid, tid), Stream())
            label = name
            if _DEVICE[category] == "kernel":
                shape = _GRID.search(args) if args else None
                if shape:
                    label = name + b" " + shape.group(1) + shape.group(2)
            ident = name_id(label)
            known_kind = kernel_kind.get(ident)
            if known_kind is None:
                known_kind = "copy" if _DEVICE[category] == "copy" else "compute"
                if known_kind == "compute" and COMM_KERNEL.search(name):
                    known_kind = "comm"
                kernel_kind[ident] = known_kind
            stream.add(start, start + duration, ident, correlation)
            if known_kind == "comm":
                device_comm.append(DeviceComm(name, (pid, tid), start, start + duration, args_in(args), True))
        elif category == b"gpu_user_annotation":
            if COMM_ANNOTATION.match(name):
                device_comm.append(DeviceComm(name, (pid, tid), start, start + duration, args_in(args), False))
        elif category.endswith((b"_runtime", b"_driver", b"Runtime")):
            found = _CORRELATION.search(args) if args else None
            if found:
                correlations.append(int(found.group(1)))
                launch_times.append(start)
                launch_threads.append(thread_ids.setdefault(tid, len(thread_ids)))
            kernel_launches += b"LaunchKernel" in name
            if duration >= SAMPLED_FROM_NS and _SYNC.search(name):
                syncs.append((start, start + duration, name_id(name)))

    if negative:
        raise TraceError(f"{path}: {negative} events have a negative duration; the profiler wrote a damaged trace")
    gpu_calls = sum(event.name.startswith(DEVICE_PREFIXES) for event in host_comm)
    if not has_kernels and (kernel_launches or gpu_calls):
        seen = f"{kernel_launches} kernel launches" if kernel_launches else f"{gpu_calls} NCCL calls"
        raise TraceError(
            f"{path}: has {seen} but no GPU kernels, so it doesn't show when anything ran; profile with "
            f"activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    if len({pid for pid, _ in step_threads}) > 1:
        raise TraceError(f"{path}: holds the steps of several processes (a merged file); give the ranks' own files")
    if not steps:
        raise TraceError(
            f"{path}: no steps: none of its {source.events_read} events is named {step_name}#N. Call prof.step() once "
            f"a training step, or name your own record_function with --step-name"
        )
    ordered = sorted(steps.values(), key=lambda step: step.start)
    for one, two in zip(ordered, ordered[1:], strict=False):
        if 0 < one.end - two.start <= ROUNDING_NS:
            one.end = two.start
        if two.start < one.end:
            raise TraceError(f"{path}: steps {one.number} and {two.number} overlap; they must follow one another")
        if two.number == one.number and step_name == "ProfilerStep":
            raise TraceError(f"{path}: step {one.number} is there twice")

    if any(a > b for a, b in zip(correlations, correlations[1:], strict=False)):
        rows = sorted(zip(correlations, launch_times, launch_threads, strict=True))
        correlations = array("q", (row[0] for row in rows))
        launch_times = array("q", (row[1] for row in rows))
        launch_threads = array("i", (row[2] for row in rows))

    info = source.metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    thread_names = {tid: names for (_, tid), names in source.thread_names.items()}
    step_thread = max(step_threads, key=lambda key: step_threads[key])[1]
    for lane in lanes.values():
        lane.settle()
    for stream in streams.values():
        stream.settle()
    recording = Recording(
        path=path,
        rank=info.get("rank") if isinstance(info.get("rank"), int) else None,
        world_size=info.get("world_size") if isinstance(info.get("world_size"), int) else None,
        backend=str(info.get("backend", "")),
        host=str(source.metadata.get("host_name", "")),
        base_ns=base if isinstance(base := source.metadata.get("baseTimeNanoseconds"), int) else 0,
        device="gpu" if has_kernels else "cpu",
        is_local=OWN_THREAD in thread_names.get(step_thread, ())
        and path.absolute().parent.name.split("-")[0] == "local",
        steps=ordered,
        names=[decode(name) for name in name_ids],
        lanes=lanes,
        comm_threads={tid for tid, names in thread_names.items() if any(map(COMM_THREAD.search, names))},
        streams=streams,
        kernel_kind=kernel_kind,
        comm_spans={},
        comm_streams={key for key, names in source.thread_names.items() if any(map(COMM_THREAD.search, names))},
        comm_by_thread={},
        waits=waits,
        loader=union(loader),
        annotations=sorted(annotations.get(step_thread, [])),
        syncs=sorted(syncs),
        launch_correlation=correlations,
        launch_time=launch_times,
        launch_thread=launch_threads,
        threads=list(thread_ids),
        collectives=[],
        samples={(decode(key[0]), key[1].decode()): kept for key, kept in samples.items()},
        events=source.events_read,
        json_bytes=source.json_bytes,
    )
    _add_collectives(recording, host_comm, device_comm, step_thread)
    return recording


def kind_of(name: str) -> str:
    """all_reduce, all_gather, ... from an annotation, a kernel name or NCCL's "Collective name"."""
    flat = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for kind, word in KINDS if word in flat), "other")


def size_of(kind: str, args: dict[str, Any], group_size: int | None) -> tuple[int | None, str]:
    """(bytes, dtype) of a collective as nccl-tests counts them: a gather's whole result, everything else its input."""
    if isinstance(args.get("bytes"), int):
        return args["bytes"], str(args.get("dtype", ""))
    if "In msg nelems" in args:
        dtype = str(args.get("dtype", ""))
        count = args["Out msg nelems"] if kind == "all_gather" and "Out msg nelems" in args else args["In msg nelems"]
        known = DTYPE_BYTES.get(dtype)
        return (count * known if known and isinstance(count, int) else None), dtype
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None, ""
    size = 0
    for shape, dtype in zip(dims, types, strict=True):
        if not isinstance(shape, list) or not all(isinstance(extent, int) for extent in shape):
            return None, ""
        if str(dtype) not in DTYPE_BYTES:
            if shape:
                return None, str(dtype)
            continue
        size += math.prod(shape) * DTYPE_BYTES[str(dtype)]
    if kind == "all_gather":
        if group_size is None:
            return None, str(types[0])
        size *= group_size
    return (size or None), str(types[0]) if types else ""


def _collective(recording: Recording, name: bytes, start: int, end: int, args: dict[str, Any]) -> Collective:
    text = decode(name)
    kind = kind_of(str(args["Collective name"])) if "Collective name" in args else "other"
    if kind == "other":
        kind = kind_of(text)
    group_size = args.get("Group size", recording.world_size)
    group_size = group_size if isinstance(group_size, int) else None
    size, dtype = size_of(kind, args, group_size)
    bucket = args.get("ddpx_bucket")
    return Collective(
        kind=kind,
        name=text.split("(")[0],
        start=start,
        end=end,
        size=size,
        dtype=dtype,
        bucket=bucket if isinstance(bucket, int) else None,
        group=str(args.get("Process Group Ranks", "")),
        group_size=group_size,
    )


def _add_collectives(recording: Recording, host: list[HostComm], device: list[DeviceComm], step_thread: bytes) -> None:
    """Decide which communication events stand for themselves, and note the time and threads they take."""
    ours = any("ddpx_bucket" in event.args for event in host)
    if ours:  # the sends and receives inside our collectives are not collectives
        host = [event for event in host if "ddpx_bucket" in event.args or kind_of(decode(event.name)) not in PARTS]
    host = _outermost(host)
    if recording.device == "gpu":
        host = _device_collectives(recording, host, device)
    for event in host:
        recording.comm_by_thread.setdefault(event.thread, []).append((event.start, event.end))
        if event.thread != step_thread:
            recording.comm_threads.add(event.thread)
        collective = _collective(recording, event.name, event.start, event.end, event.args)
        collective.where = f"thread {event.thread.decode()}"
        recording.collectives.append(collective)
    recording.collectives.sort(key=lambda collective: (collective.start, collective.end))


def _outermost(host: list[HostComm]) -> list[HostComm]:
    """Drop annotations inside another one of their thread."""
    kept: list[HostComm] = []
    last_end: dict[bytes, int] = {}
    for event in sorted(host, key=lambda event: (event.start, -event.end)):
        if event.end <= last_end.get(event.thread, event.end - 1):
            continue
        last_end[event.thread] = event.end
        kept.append(event)
    return kept


def _device_collectives(recording: Recording, host: list[HostComm], device: list[DeviceComm]) -> list[HostComm]:
    """Add the collectives that ran on the GPU; returns the host annotations that are communication in their own right.

    An annotation's shadow stands for a collective where the annotation is ddpx's or no kernel says so by its name;
    otherwise the kernel does, whose args know bytes and group.
    """
    by_id = {event.args["External id"]: event for event in host if "External id" in event.args}
    kernels = [event for event in device if event.is_kernel]
    shadows = []
    for event in device:
        twin = by_id.get(event.args.get("External id"))
        if not event.is_kernel and (not kernels or (twin is not None and "ddpx_bucket" in twin.args)):
            shadows.append((event, twin))
    shadowed = {id(twin) for _, twin in shadows if twin is not None}
    spans: dict[tuple[bytes, bytes], list[Interval]] = {}
    for event, twin in shadows:
        spans.setdefault(event.stream, []).append((event.start, event.end))
        collective = _collective(recording, event.name, event.start, event.end, twin.args if twin else event.args)
        collective.launch = twin.start if twin else None
        collective.where = f"stream {event.stream[1].decode()}"
        recording.collectives.append(collective)
    for ours in host:  # ddpx annotations that threw no shadow: find what their thread launched meanwhile
        if "ddpx_bucket" in ours.args and id(ours) not in shadowed:
            found = _launched_within(recording, ours)
            if found:
                shadowed.add(id(ours))
                for key, lo, hi in found:
                    spans.setdefault(key, []).append((lo, hi))
                collective = _collective(
                    recording, ours.name, min(row[1] for row in found), max(row[2] for row in found), ours.args
                )
                collective.launch = ours.start
                collective.where = f"stream {found[0][0][1].decode()}"
                recording.collectives.append(collective)
    recording.comm_spans = {key: union(rows) for key, rows in spans.items()}
    for event in kernels:
        inside = recording.comm_spans.get(event.stream, [])
        i = bisect_right(inside, (event.start, 1 << 62)) - 1
        if i >= 0 and event.start < inside[i][1]:
            continue
        collective = _collective(recording, event.name, event.start, event.end, event.args)
        correlation = event.args.get("correlation")
        collective.launch = recording.launch_of(correlation) if isinstance(correlation, int) else None
        collective.where = f"stream {event.stream[1].decode()}"
        recording.collectives.append(collective)
    return [event for event in host if id(event) not in shadowed and not event.name.startswith(DEVICE_PREFIXES)]


def _launched_within(recording: Recording, event: HostComm) -> list[tuple[tuple[bytes, bytes], int, int]]:
    """(stream, start, end) of the device work launched from the event's thread while it lasted."""
    found = []
    for key, stream in recording.streams.items():
        rows = []
        for i, correlation in enumerate(stream.correlation):
            launch = recording.launch_index(correlation)
            if launch is None or not event.start <= recording.launch_time[launch] < event.end:
                continue
            if recording.threads[recording.launch_thread[launch]] == event.thread:
                rows.append((stream.start[i], stream.end[i]))
        if rows:
            found.append((key, min(row[0] for row in rows), max(row[1] for row in rows)))
    return found
