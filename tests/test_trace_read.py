"""The streaming reader against json.load, and files that must be refused."""

import gzip
import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import all_reduce, kineto, op, step, thread_name, trace, write

from ddpx.trace import read
from ddpx.trace.collect import collect
from ddpx.trace.read import TraceError, TraceFile, args_of, decode, to_ns

text = st.text(st.sampled_from(string.ascii_letters + '{}[]":,\\ \n<>é漢'), max_size=12)
number = st.integers(-5, 1 << 50) | st.decimals(-9, 10**12, places=3).map(float)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
complete = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["cpu_op", "kernel", "user_annotation", 'odd"cat']),
        "name": text,
        "pid": st.integers(0, 9) | st.just("Spans"),
        "tid": st.integers(0, 9),
        "ts": number,
        "dur": number,
    },
    optional={"args": st.dictionaries(text, value, max_size=3)},
)
other = st.fixed_dictionaries(
    {"ph": st.sampled_from("sfiMC"), "name": text, "pid": st.integers(0, 9), "tid": st.integers(0, 9)},
    optional={"id": st.integers(0, 9), "args": st.dictionaries(text, value, max_size=2), "X": st.just("X")},
)
shuffled = complete.flatmap(lambda event: st.permutations(list(event.items())).map(dict))
layouts = {
    "kineto": kineto,
    "json.dump": json.dumps,
    "compact": lambda document: json.dumps(document, separators=(",", ":"), ensure_ascii=False),
    "indented": lambda document: json.dumps(document, indent=2),
    "trailing keys": lambda document: json.dumps(
        {"traceEvents": document["traceEvents"]} | {k: v for k, v in document.items() if k != "traceEvents"}
    ),
    "bare list": lambda document: json.dumps(document["traceEvents"]),
}


def expected(events):
    return [
        (
            one["cat"],
            one["name"],
            round(one["ts"] * 1000),
            round(one["dur"] * 1000),
            one.get("args") or {},
            one["pid"],
            one["tid"],
        )
        for one in events
        if one["ph"] == "X"
    ]


def read_back(path):
    return [
        (
            decode(category),
            decode(name),
            start,
            duration,
            args_of(args),
            json.loads(pid),
            json.loads(tid),
        )
        for category, name, pid, tid, start, duration, args in TraceFile(path).events()
    ]


@pytest.mark.parametrize("layout", layouts)
@settings(max_examples=60, deadline=None)
@given(events=st.lists(complete | other | shuffled, max_size=8), chunk=st.sampled_from([16, 50, 333, 1 << 20]))
def test_every_complete_event_comes_back_in_any_layout_and_chunk_size(tmp_path_factory, layout, events, chunk):
    path = tmp_path_factory.mktemp("read") / "trace.json"
    path.write_text(layouts[layout](trace(events)), encoding="utf-8")
    before, read.CHUNK = read.CHUNK, chunk
    try:
        assert read_back(path) == expected(events)
    finally:
        read.CHUNK = before


def test_gzip_is_told_by_content_and_may_have_several_members(tmp_path):
    document = kineto(trace([op(1, 2), op(3, 4.5)])).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(document[:100]) + gzip.compress(document[100:]))
    assert [one[3] for one in read_back(path)] == [1000, 1500]


def test_metadata_and_thread_names_are_kept(tmp_path):
    file = TraceFile(
        write(tmp_path / "t.json", [thread_name(7, "ddpx comm"), thread_name(7, "python3"), op(1, 2)], 3, 4)
    )
    assert len(list(file.events())) == 1
    assert file.metadata["distributedInfo"]["rank"] == 3
    assert file.thread_names == {(b"1", b"7"): {"ddpx comm", "python3"}}


@given(st.integers(0, 10**16))
def test_times_are_exact_to_the_nanosecond_where_a_float_would_not_be(ns):
    assert to_ns(f"{ns // 1000}.{ns % 1000:03d}".encode()) == ns
    assert to_ns(f"-{ns // 1000}.{ns % 1000:03d}".encode()) == -ns
    assert to_ns(str(ns).encode()) == ns * 1000


def test_other_forms_of_numbers():
    assert [to_ns(form) for form in (b"5.1", b"5.12345", b"-5.1", b"1e3", b"2.5E-1")] == [5100, 5123, -5100, 10**6, 250]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path_factory, data):
    whole = kineto(trace([step(0, 0, 9), op(1, 2, "a{b", note='}"'), op(3, 4)])).rstrip().encode()
    packed = gzip.compress(whole)
    path = tmp_path_factory.mktemp("cut") / "cut.json"
    for content in (whole, packed):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(TraceError, match=r"cut\.json: (truncated|damaged gzip|not a torch\.profiler trace)"):
            list(TraceFile(path).events())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"\x89PNG....", "doesn't begin as JSON"),
        (b'{"runs": [], "more": 1}', 'no "traceEvents" list'),
        (b'{"traceEvents": 5}', '"traceEvents" is not a list'),
        (b'{"traceEvents": [{"ph": "X", "name": }]}', "invalid JSON"),
        (b'{"traceEvents": [{"ph": "X"} oops]}', "invalid JSON after event 1"),
        (b'{"traceEvents": [{"ph": "i"}]', "truncated: it ends after the list of events"),
        (b'{"traceEvents": [{"ph": "i"}', "truncated: it ends inside the list of events, after 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"odd\.json: ") as caught:
        list(TraceFile(path).events())
    assert reason in str(caught.value)


def test_args_that_are_no_json_are_refused_where_they_are_needed(tmp_path):
    path = write(tmp_path / "odd.json", [step(0, 0, 9), all_reduce(1, 2, bucket=3)])
    path.write_text(path.read_text().replace('"ddpx_bucket": 3', '"ddpx_bucket": nan?'))
    with pytest.raises(TraceError, match=r"odd\.json: invalid JSON in the args of event"):
        collect(path)


def test_damaged_and_missing_files_are_refused_by_name(tmp_path):
    path = write(tmp_path / "t.json.gz", [op(i, i + 1) for i in range(500)])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.json\.gz: (damaged gzip|not a torch\.profiler trace)"):
        list(TraceFile(path).events())
    with pytest.raises(TraceError, match=r"none\.json: No such file"):
        list(TraceFile(tmp_path / "none.json").events())
