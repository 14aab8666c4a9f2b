"""Profiler traces in which communication shows as what it is, for TensorBoard, Perfetto and `python -m ddpx trace`.

    with record(folder, rank, model) as end_of_step:      # folder/host_<rank>.<ns>.pt.trace.json.gz
        for step in range(STEPS):
            train_step(model)
            end_of_step()
    merge(folder, folder / "merged.perfetto.json.gz")     # by one rank, when all have written

torch.profiler knows nothing of ddpx, so while `record` runs, each bucket's plan runs inside an annotation named as
torch names its own collectives (`gloo:all_reduce`, on CUDA `nccl:all_reduce`), and the main thread's part shows as
`ddpx:launch` and `ddpx:wait`. What a plan adds up is communication, not compute, so its inner operators are kept out of
the trace. Afterwards bucket numbers, bytes, arrows and a row that says hidden or EXPOSED are written into the file.

Note: private torch calls. The profiler sees a Python thread only with `profile_all_threads`, an annotation carries
tensor sizes only by `_record_function_with_args_enter`, and operators are kept out by `_enable_record_function`. They
are used here and nowhere else; where a torch lacks one, the trace lacks that detail.
"""

import contextlib
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from ddpx.communicator import Communicator
from ddpx.data_parallel import DDPX
from ddpx.execute import Plan
from ddpx.stream import Pending
from ddpx.trace.analyse import busy
from ddpx.trace.collect import OWN_THREAD, collect
from ddpx.trace.intervals import intersect, subtract

ACTIVE_STEPS = 3
STEPS = 1 + ACTIVE_STEPS  # to make under `record`: the first warms the profiler up
PATTERN = "host_*.pt.trace.json.gz"

Event = dict[str, Any]


# ---- Recording -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def record(folder: Path, rank: int, model: nn.Module | None = None) -> Iterator[Callable[[], None]]:
    """Trace ACTIVE_STEPS steps of this rank into `folder`, after one to warm up; call what it yields after each step.

    `model` is annotated meanwhile if it is a DDPX that has made a step; others are traced as they are.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = torch_profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=ACTIVE_STEPS, repeat=1),
        record_shapes=True,
        experimental_config=_all_threads(),
    )
    with annotated(model) if isinstance(model, DDPX) else contextlib.nullcontext():
        with profiler:
            yield profiler.step
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"host_{rank}.{time.time_ns()}.pt.trace.json.gz"
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch, "raw.json")
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text())
        trace["traceName"] = path.name
        label_buckets(trace, rank)
        raw.write_text(json.dumps(trace))
        add_overlap_row(trace, raw)
    _write(trace, path)


@contextlib.contextmanager
def annotated(model: DDPX) -> Iterator[None]:
    """Annotate the communication of a model that has made a step, until the end of the block."""
    reducer, buffers = model.reducer, model._buffer_sync
    plain, plans = reducer.communicator, [bucket.plan for bucket in reducer.buckets]
    reducer.communicator = _AnnotatedCommunicator(plain)
    for bucket in reducer.buckets:
        bucket.plan = _AnnotatedPlan(bucket.plan, bucket.flat, bucket.index)
    if buffers is not None:
        buffers._communicator = _Broadcasting(plain)
    try:
        yield
    finally:
        reducer.communicator = plain
        for bucket, plan in zip(reducer.buckets, plans, strict=True):
            bucket.plan = plan
        if buffers is not None:
            buffers._communicator = plain


class _AnnotatedCommunicator(Communicator):
    """The same communicator, since it shares all state, whose launches, waits and nameless plans show in the trace."""

    __slots__ = ("_bucket_of",)  # by identity of what was started; not in the state that it shares
    collective = "all_reduce"  # what plans do that are not those of a bucket

    def __init__(self, plain: Communicator) -> None:
        self.__dict__ = plain.__dict__
        self._bucket_of: dict[int, int] = {}

    def start(self, run: Callable[[], None]) -> Pending:
        name = _name(self.collective, self.device)

        def named() -> None:
            with record_function(name), _unseen(self.device):
                run()

        plan = getattr(run, "__self__", None)
        if not isinstance(plan, _AnnotatedPlan):
            with record_function("ddpx:launch"):
                return super().start(named)
        with _annotation("ddpx:launch", plan.index):
            pending = super().start(run)
        self._bucket_of[id(pending)] = plan.index
        return pending

    def run(self, run: Callable[[], None]) -> Pending:
        """On the communication thread, as all communication in a trace; without one, plans may run in the caller's."""
        return self.start(run)

    def wait(self, pending: Pending) -> None:
        index = self._bucket_of.pop(id(pending), None)
        with record_function("ddpx:wait") if index is None else _annotation("ddpx:wait", index):
            super().wait(pending)


class _Broadcasting(_AnnotatedCommunicator):
    __slots__ = ()
    collective = "broadcast"


class _AnnotatedPlan:
    """A bucket's plan inside an annotation that carries the bucket's size and number."""

    def __init__(self, plan: Plan, flat: Tensor, index: int) -> None:
        self.plan, self.flat, self.index = plan, flat, index

    def run(self) -> None:
        with _annotation(_name("all_reduce", self.flat.device), self.flat, self.index), _unseen(self.flat.device):
            self.plan.run()

    @property
    def peer_wait_s(self) -> float:
        return self.plan.peer_wait_s

    @property
    def last_peer(self) -> int:
        return self.plan.last_peer


def _name(collective: str, device: torch.device) -> str:
    return f"{'nccl' if device.type == 'cuda' else 'gloo'}:{collective}"


# ---- Private torch calls, see Note -----------------------------------------------------------------------------------


def _all_threads() -> Any:
    try:
        return torch.profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        return None


@contextlib.contextmanager
def _annotation(name: str, *values: Any) -> Iterator[None]:
    """A slice called `name`, with the sizes of tensors and the values of integers among `values`."""
    try:
        handle = torch.autograd._record_function_with_args_enter(name, *values)
    except AttributeError:
        with record_function(name):
            yield
        return
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(handle)


@contextlib.contextmanager
def _unseen(device: torch.device) -> Iterator[None]:
    """Keep operators in this block out of the trace, on CPU; on CUDA they are what links kernels to the annotation."""
    switch = getattr(torch.autograd, "_enable_record_function", None)
    if switch is None or device.type == "cuda":
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)


# ---- What is written into the file afterwards ------------------------------------------------------------------------

COMPUTE_ROW, COMM_ROW, OVERLAP_ROW = 0, 1, 2  # order of the threads in a viewer
OVERLAP_TID = 1_000_001
FLOW_IDS = 1_000_000_000  # above those of torch
RANK_IDS = 1_000_000
RANK_FLOW_IDS = 4 * FLOW_IDS
NUMBERS = ("External id", "correlation", "Sequence number")  # by which slices of one process belong together


def label_buckets(trace: dict[str, Any], rank: int) -> None:
    """Name process and threads, give our slices their bucket and bytes, and join them by arrows. Changes `trace`."""
    events: list[Event] = trace["traceEvents"]
    steps = sorted((e for e in events if str(e.get("name", "")).startswith("ProfilerStep#")), key=lambda e: e["ts"])
    main = steps[0]["tid"]
    pid = steps[0]["pid"]
    found: dict[str, list[Event]] = {"launch": [], "all_reduce": [], "wait": []}
    for event in events:
        kind = str(event.get("name", "")).rpartition(":")[2]
        if event.get("ph") == "X" and kind in found and _take_bucket(event.get("args", {})) is not None:
            found[kind].append(event)
    # Each list comes to stand in launch order: buckets launch, run and are awaited in index order, all in every step.
    launches, collectives, waits = (sorted(events, key=lambda event: event["ts"]) for events in found.values())
    known = {event["tid"] for event in collectives} - {main}
    names = {main: (OWN_THREAD, COMPUTE_ROW), **dict.fromkeys(known, ("ddpx comm", COMM_ROW))}
    replaced = {"process_name", "process_sort_index", "process_labels"}
    trace["traceEvents"] = events = [
        event
        for event in events
        if not (event.get("ph") == "M" and event.get("pid") == pid and event.get("name") in replaced)
        and not (event.get("ph") == "M" and event.get("pid") == pid and event.get("tid") in names)
    ]
    events.append(_meta("process_name", pid, 0, name=f"rank {rank}"))
    events.append(_meta("process_sort_index", pid, 0, sort_index=rank))
    for tid, (name, row) in names.items():
        events.append(_meta("thread_name", pid, tid, name=name))
        events.append(_meta("thread_sort_index", pid, tid, sort_index=row))
    if len(launches) == len(collectives) == len(waits):
        for number, (launch, collective, wait) in enumerate(zip(launches, collectives, waits, strict=True)):
            flow = FLOW_IDS + 2 * number
            events += _arrow(flow, _inside(launch), _inside(collective, at_start=True))
            events += _arrow(flow + 1, _inside(collective), _inside(wait))
    _count_in_flight(events, pid, launches, collectives)


def _take_bucket(args: dict[str, Any]) -> int | None:
    """Turn an annotation's values into `ddpx_bucket` and `bytes`; leave its tensor alone in the sizes."""
    values = args.get("Concrete Inputs")
    if not values or not str(values[-1]).isdigit():
        return None
    bucket = int(values[-1])
    del args["Concrete Inputs"]
    for key in ("Input Dims", "Input type", "Input Strides"):
        if key in args:
            args[key] = args[key][:-1]
            if not args[key]:
                del args[key]
    args["ddpx_bucket"] = bucket
    if args.get("Input Dims"):
        numel = 1
        for size in args["Input Dims"][0]:
            numel *= size
        args["bytes"] = numel * _ITEM_BYTES.get(args["Input type"][0], 0)
    return bucket


_ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


def _meta(kind: str, pid: Any, tid: Any, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _inside(slice_: Event, at_start: bool = False) -> Event:
    """A place inside a slice that an arrow can hold on to."""
    shift = 0 if at_start else slice_["dur"] * 0.999
    return {"pid": slice_["pid"], "tid": slice_["tid"], "ts": slice_["ts"] + shift}


def _arrow(number: int, source: Event, target: Event) -> list[Event]:
    common = {"cat": "ddpx", "name": "bucket", "id": number}
    # A clock's last digit must not turn the arrow round.
    target["ts"] = max(target["ts"], source["ts"])
    return [{"ph": "s", **common, **source}, {"ph": "f", "bp": "e", **common, **target}]


def _count_in_flight(events: list[Event], pid: Any, launches: list[Event], collectives: list[Event]) -> None:
    """A counter of buckets that have been launched and have not ended."""
    changes = [(event["ts"], 1) for event in launches] + [(event["ts"] + event["dur"], -1) for event in collectives]
    count = 0
    for ts, change in sorted(changes):
        count += change
        args = {"buckets": count}
        events.append({"ph": "C", "name": "ddpx in-flight buckets", "pid": pid, "tid": 0, "ts": ts, "args": args})


def add_overlap_row(trace: dict[str, Any], file: Path) -> None:
    """Add a thread whose slices say which communication was hidden. `file` holds `trace`, for the analysis to read."""
    recording = collect(file)
    comm, compute = list(busy(recording, "comm")), list(busy(recording, "compute"))
    if not comm:
        return
    events: list[Event] = trace["traceEvents"]
    pid = next(event["pid"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#"))
    events.append(_meta("thread_name", pid, OVERLAP_TID, name="ddpx overlap (derived)"))
    events.append(_meta("thread_sort_index", pid, OVERLAP_TID, sort_index=OVERLAP_ROW))
    for name, colour, spans in (
        ("comm hidden", "good", intersect(comm, compute)),
        ("comm EXPOSED", "terrible", subtract(comm, compute)),
    ):
        for start, end in spans:
            place = {"pid": pid, "tid": OVERLAP_TID, "ts": start / 1e3, "dur": (end - start) / 1e3}
            events.append({"ph": "X", "cat": "ddpx", "name": name, "cname": colour, **place, "args": {}})


def merge(folder: Path, path: Path) -> int:
    """Write all ranks' traces in `folder` as one for Perfetto, to look at; returns how many there were.

    Ranks of several hosts are shown by their own clocks.
    """
    files = sorted(folder.glob(PATTERN), key=lambda file: int(file.name.split(".")[0].removeprefix("host_")))
    merged: dict[str, Any] = {}
    events: list[Event] = []
    for rank, file in enumerate(files):
        with gzip.open(file, "rt") as opened:
            trace = json.load(opened)
        base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
        merged = merged or {**trace, "traceName": path.name}
        shift_us = base_us - merged.get("baseTimeNanoseconds", 0) / 1e3
        for event in trace["traceEvents"]:
            if not isinstance(event.get("pid"), int):
                continue  # torch's own rows, which say nothing of the training
            event["pid"] += rank * RANK_IDS
            event["ts"] = event.get("ts", 0) + shift_us
            if "id" in event:
                event["id"] += rank * RANK_FLOW_IDS
            args = event.get("args", {})
            for name in NUMBERS:
                if isinstance(args.get(name), int):
                    args[name] += rank * RANK_FLOW_IDS
            events.append(event)
    if merged:
        _write({**merged, "traceEvents": events}, path)
    return len(files)


def _write(trace: dict[str, Any], path: Path) -> None:
    """Compressed, and under its name only when whole: viewers read a folder once."""
    part = path.with_name(f".{path.name}.part")
    with gzip.open(part, "wt", compresslevel=5) as file:
        json.dump(trace, file, separators=(",", ":"))
    os.replace(part, path)
