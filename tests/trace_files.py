"""Write small torch.profiler traces by hand, in the layout that kineto writes, with times in whole microseconds."""

import gzip
import json

MAIN, COMM = 100, 200  # threads


def event(category, name, start, end, tid=MAIN, pid=1, **args):
    """A complete event; times in microseconds (ints or floats with up to three decimals)."""
    out = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": round(end - start, 3)}
    return out | ({"args": args} if args else {})


def op(start, end, name="aten::mm", tid=MAIN, **args):
    return event("cpu_op", name, start, end, tid, **args)


def note(start, end, name, tid=MAIN, **args):
    return event("user_annotation", name, start, end, tid, **args)


def step(number, start, end):
    return note(start, end, f"ProfilerStep#{number}")


def all_reduce(start, end, size=4000, bucket=None, tid=COMM):
    """One of ddpx's collectives with `bucket`, torch's over gloo without."""
    if bucket is None:
        return note(start, end, "gloo:all_reduce", tid, **{"Input Dims": [[size // 4]], "Input type": ["float"]})
    return note(start, end, "gloo:all_reduce", tid, ddpx_bucket=bucket, bytes=size)


def launch(at, correlation, tid=MAIN):
    return event("cuda_runtime", "cudaLaunchKernel", at, at + 1, tid, correlation=correlation)


def kernel(start, end, correlation, name="gemm", stream=7, **args):
    return event("kernel", name, start, end, stream, 0, stream=stream, correlation=correlation, **args)


def thread_name(tid, name, pid=1):
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def trace(events, rank=0, world_size=2, backend="gloo"):
    info = {"backend": backend, "rank": rank, "world_size": world_size}
    return {"schemaVersion": 1, "distributedInfo": info, "host_name": "here", "traceEvents": list(events)}


def write(path, events, rank=0, world_size=2, backend="gloo"):
    """Write a trace file (gzip where the name ends in .gz); returns its path."""
    text = kineto(trace(events, rank, world_size, backend))
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode(), 1))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def kineto(document):
    """JSON laid out as torch writes it: one key of the header a line, events broken after "tid", args flat."""
    head = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in document.items() if key != "traceEvents")
    events = []
    for one in document["traceEvents"]:
        fields = dict(one)
        args = fields.pop("args", None)
        first = ", ".join(f'"{key}": {_value(fields[key])}' for key in fields if key not in ("ts", "dur"))
        second = ", ".join(f'"{key}": {_value(fields[key])}' for key in ("ts", "dur") if key in fields)
        second = f",\n    {second}" if second else ""
        rest = f',\n    "args": {{\n      {json.dumps(args)[1:-1]}\n    }}' if args is not None else ""
        events.append(f"  {{\n    {first}{second}{rest}\n  }}")
    return "{\n" + head + '  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}\n"


def _value(value):
    return f"{value:.3f}" if isinstance(value, float) else json.dumps(value)
