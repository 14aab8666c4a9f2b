"""Stream the events of a torch.profiler trace (.json or .json.gz) without holding the file.

A trace is one JSON object whose "traceEvents" list makes up nearly all of it; json.load builds that list whole, at six
times its size. Here a window slides over the (decompressed) bytes, and one regular expression takes an event at a
time: it knows the key order that torch writes and the flat "args" that nearly every event has. What it doesn't
recognise goes through `json`, so any valid layout is read, only more slowly. Every event is visited, in file order.

A file that ends early, doesn't decompress or isn't JSON raises TraceError with its name: half a trace is no trace.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 1 << 20  # bytes of JSON taken at a time
LARGEST_VALUE = 64 << 20  # an event or header value larger than this is taken for damage


class TraceError(Exception):
    """A file or set of files that can't be analysed; the message names the file and the reason."""


# One complete ("ph": "X") event: category, name, pid, tid, start, duration, args. Bytes are still encoded as in JSON,
# times are in nanoseconds since the trace's base, args is the JSON object. A plain tuple, since there are so many.
Event = tuple[bytes, bytes, bytes, bytes, int, int, bytes | None]


_STRING = rb'"(?:[^"\\]++|\\.)*+"'
# Up to four levels of nesting; possessive (++), so that a failing match costs no more than a successful one.
_OBJECT = rb"\{(?:[^{}\"]++|" + _STRING + rb")*+\}"
for _ in range(3):
    _OBJECT = rb"\{(?:[^{}\"]++|" + _STRING + rb"|" + _OBJECT + rb")*+\}"
_ANY_EVENT = re.compile(rb"[\s,]*+(" + _OBJECT + rb")", re.DOTALL)

# Whatever matters for nesting; outside an object anything but a brace, a comma or space ends the search.
_TOKEN = re.compile(rb"[{}]|" + _STRING + rb'|"|\]|[^\s,{}\"\]]+', re.DOTALL)

# The layout that kineto writes. `[^{}\\]*` is quick but blind to strings: whoever uses the match makes sure that an
# even number of quotes stands before each brace, since only a brace inside a string can have an odd one.
_EVENT = re.compile(
    rb'[\s,]*+\{\s*+"ph":\s*+(?:'
    rb'"X",\s*+"cat":\s*+"([^"\\]*+)",\s*+"name":\s*+"((?:[^"\\]++|\\.)*+)",\s*+"pid":\s*+("[^"\\]*+"|-?\d++),'
    rb'\s*+"tid":\s*+("[^"\\]*+"|-?\d++),\s*+"ts":\s*+(-?\d++(?:\.\d{3})?+),\s*+"dur":\s*+(-?\d++(?:\.\d{3})?+)\s*+'
    rb'(?:,\s*+"args":\s*+(\{[^{}\\]*+\})\s*+)?+'
    rb'|"[^X"]"[^{}\\]*+(\{[^{}\\]*+\})?+[^{}\\]*+'
    rb")\}"
)


def to_ns(microseconds: bytes) -> int:
    """Nanoseconds from the decimal microseconds of a trace, exactly: a float would lose them in large timestamps."""
    if microseconds[-4:-3] == b".":
        return int(microseconds[:-4] + microseconds[-3:])
    whole, _, fraction = microseconds.partition(b".")
    if not whole.lstrip(b"-").isdigit() or (fraction and not fraction.isdigit()):
        return round(float(microseconds) * 1000)
    return int(whole + (fraction + b"000")[:3])


def decode(raw: bytes) -> str:
    """The text of a JSON string's bytes (without its quotes)."""
    if b"\\" in raw:
        return str(json.loads(b'"' + raw + b'"', strict=False))
    return raw.decode("utf-8", "replace")


def _pieces(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The file's bytes, decompressed if they are gzip (told by content, not by name), about CHUNK at a time."""
    head = file.read(2)
    file.seek(0)
    if head != b"\x1f\x8b":
        while piece := file.read(CHUNK):
            yield piece
        return
    inflate = zlib.decompressobj(31)
    done = 0
    started = False
    while True:
        raw = inflate.unconsumed_tail or inflate.unused_data or file.read(CHUNK >> 3)
        if not raw:
            break
        if inflate.eof:
            if raw.strip(b"\0") == b"":  # padding
                break
            inflate = zlib.decompressobj(31)
        started = True
        try:
            piece = inflate.decompress(raw, CHUNK)
        except zlib.error as error:
            raise TraceError(f"{path}: damaged gzip after {done / 1e6:.1f} MB of JSON ({error})") from None
        done += len(piece)
        yield piece
    while started and not inflate.eof and (piece := inflate.decompress(b"", CHUNK)):
        yield piece
    if started and not inflate.eof:
        raise TraceError(f"{path}: truncated gzip: it ends after {done / 1e6:.1f} MB of JSON; copy it again")


class TraceFile:
    """One trace file. Iterate `events()` once; then `metadata` and `thread_names` are complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}  # every top-level key but traceEvents
        self.thread_names: dict[tuple[bytes, bytes], set[str]] = {}  # (pid, tid) -> names; kineto may give two
        self.events_read = 0
        self.json_bytes = 0
        self._buffer = b""
        self._bare_list = False
        self._pieces: Iterator[bytes] = iter(())

    def events(self) -> Iterator[Event]:
        """Yield every complete event; raises TraceError for a file that isn't a whole trace."""
        try:
            with open(self.path, "rb") as file:
                self._pieces = _pieces(self.path, file)
                self._read_header()
                yield from self._read_events()
                self._read_trailer()
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from None

    def _more(self) -> bool:
        """Append the next piece to the buffer; False at the end of the file."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self.json_bytes += len(piece)
        self._buffer += piece
        return True

    def _not_a_trace(self, reason: str) -> TraceError:
        return TraceError(f"{self.path}: not a torch.profiler trace: {reason}")

    def _truncated(self, where: str) -> TraceError:
        return TraceError(f"{self.path}: truncated: it ends {where} ({self.json_bytes / 1e6:.1f} MB of JSON read)")

    def _read_header(self) -> None:
        """Read top-level keys up to the event list and leave the buffer just after its opening bracket."""
        while True:
            grown = self._more()
            if not self._buffer.lstrip():
                if grown:
                    continue
                raise self._not_a_trace("the file is empty")
            if self._buffer.lstrip()[:1] == b"[":
                self._bare_list = True
                self._buffer = self._buffer.lstrip()[1:]
                return
            if self._buffer.lstrip()[:1] != b"{":
                raise self._not_a_trace("it doesn't begin as JSON")
            at = self._read_pairs(self._buffer.index(b"{") + 1)
            if at is not None:
                self._buffer = self._buffer[at:]
                return
            if not grown:
                raise self._truncated("before the list of events")
            if len(self._buffer) > LARGEST_VALUE:
                raise self._not_a_trace(f"no list of events in the first {LARGEST_VALUE >> 20} MiB")

    def _read_pairs(self, at: int) -> int | None:
        """Parse `"key": value` pairs; returns the place after `"traceEvents": [`, None if the buffer ends first."""
        text = self._buffer.decode("latin-1")  # one character a byte, so that positions agree
        decoder = json.JSONDecoder(strict=False)
        try:
            while True:
                at = _skip(text, at)
                if text[at] == "}":
                    raise self._not_a_trace('it has no "traceEvents" list')
                key, at = decoder.raw_decode(text, at)
                at = _skip(text, at)
                if text[at] != ":":
                    raise self._not_a_trace(f"invalid JSON near byte {at}")
                at = _skip(text, at + 1)
                if key == "traceEvents":
                    if text[at] != "[":
                        raise self._not_a_trace('"traceEvents" is not a list')
                    return at + 1
                value, end = decoder.raw_decode(text, at)
                if end == len(text):
                    return None  # a number may go on in the next piece
                self.metadata[key] = value
                at = end
        except (json.JSONDecodeError, IndexError):
            return None

    def _read_events(self) -> Iterator[Event]:
        at = 0
        take = _EVENT.match
        while True:
            buffer = self._buffer
            count = 0
            while match := take(buffer, at):
                category, name, pid, tid, start, duration, args, inner = match.groups()
                if category is not None:
                    if args is not None and args.count(b'"') & 1:
                        break
                    at = match.end()
                    count += 1
                    # to_ns, spelled out for the usual form
                    t = int(start[:-4] + start[-3:]) if start[-4:-3] == b"." else to_ns(start)
                    dt = int(duration[:-4] + duration[-3:]) if duration[-4:-3] == b"." else to_ns(duration)
                    yield category, name, pid, tid, t, dt, args
                else:
                    whole = match.group()
                    if whole.count(b'"') & 1 or b'"X"' in whole or b'"M"' in whole:
                        break
                    if inner and (inner.count(b'"') & 1 or buffer.count(b'"', at, match.start(8)) & 1):
                        break
                    at = match.end()
                    count += 1
            self.events_read += count
            odd = _ANY_EVENT.match(buffer, at)
            span = odd.span(1) if odd is not None else _deep_object(buffer, at)
            if span is not None:
                at = span[1]
                self.events_read += 1
                event = self._parse(buffer[span[0] : span[1]])
                if event is not None:
                    yield event
                continue
            rest = buffer[at:]
            following = rest.lstrip(b" \t\r\n,")[:1]
            if following == b"]":
                self._buffer = rest[rest.index(b"]") + 1 :]
                return
            if following not in (b"", b"{"):
                raise self._not_a_trace(f"invalid JSON after event {self.events_read}: {rest.lstrip()[:40]!r}")
            if len(rest) > LARGEST_VALUE:
                raise self._not_a_trace(f"event {self.events_read + 1} is larger than {LARGEST_VALUE >> 20} MiB")
            self._buffer, at = rest, 0
            if not self._more():
                raise self._truncated(f"inside the list of events, after {self.events_read} of them")

    def _parse(self, raw: bytes) -> Event | None:
        """An event in any layout; keeps thread names and drops what isn't a complete event."""
        try:
            event = json.loads(raw, strict=False, parse_float=str)
        except ValueError as error:
            raise self._not_a_trace(f"invalid JSON in event {self.events_read}: {error}") from None
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            key = (json.dumps(event.get("pid")).encode(), json.dumps(event.get("tid")).encode())
            self.thread_names.setdefault(key, set()).add(str(event.get("args", {}).get("name", "")))
        if event.get("ph") != "X" or "ts" not in event or "name" not in event:
            return None
        args = event.get("args")
        return (
            str(event.get("cat", "")).encode(),
            json.dumps(event["name"])[1:-1].encode(),
            json.dumps(event.get("pid")).encode(),
            json.dumps(event.get("tid")).encode(),
            to_ns(str(event["ts"]).encode()),
            to_ns(str(event.get("dur", 0)).encode()),
            json.dumps(args).encode() if isinstance(args, dict) else None,
        )

    def _read_trailer(self) -> None:
        """Read what follows the event list, and refuse a file that breaks off there."""
        while self._more():
            if len(self._buffer) > LARGEST_VALUE:
                raise self._not_a_trace(f"more than {LARGEST_VALUE >> 20} MiB follow the list of events")
        rest = self._buffer.strip()
        if rest == (b"" if self._bare_list else b"}"):
            return
        try:
            self.metadata.update(json.loads(b"{" + rest.lstrip(b", \t\r\n"), strict=False))
        except ValueError:
            raise self._truncated("after the list of events") from None


def _deep_object(buffer: bytes, at: int) -> tuple[int, int] | None:
    """Where the object at `at` begins and ends, nested as deeply as it may be; None if the buffer ends first."""
    depth = begin = 0
    for token in _TOKEN.finditer(buffer, at):
        mark = token.group()[:1]
        if mark == b"{":
            begin = begin if depth else token.start()
            depth += 1
        elif mark == b"}":
            depth -= 1
            if depth == 0:
                return begin, token.end()
        elif depth == 0 or token.group() == b'"':  # not an object, or a string that the buffer cuts off
            return None
    return None


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n,":
        at += 1
    return at


def args_of(raw: bytes | None) -> dict[str, Any]:
    """An event's args as a dict."""
    if raw is None:
        return {}
    value = json.loads(raw, strict=False)
    return value if isinstance(value, dict) else {}
