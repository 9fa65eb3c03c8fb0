"""JSON objects out of a byte stream, one at a time, whatever state it is in: huge, or cut in the middle of a string."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

# A whole string, a bracket, or a quote whose string is not whole in what has been read so far.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]|"', re.DOTALL)
CHUNK = 1 << 20
OTHER_ENCODINGS = (b"\xff\xfe", b"\xfe\xff")  # byte-order marks of UTF-16 and UTF-32
MAX_OBJECT_BYTES = 256 << 20  # memory bound: a longer object is taken for broken, and reading ends there


class NotUtf8(ValueError):
    """Text in another encoding; the message says what to do."""


class Stream(Protocol):
    """What bytes are read from: `read1` gives some, at most `size`, and none at the end."""

    def read1(self, size: int, /) -> bytes: ...


@dataclass
class ScanReport:
    """What a scan has read so far, and what it could not read."""

    bytes: int = 0
    objects: int = 0
    malformed: int = 0  # whole by their brackets, but no JSON objects
    cut_bytes: int = 0  # at the end: an object that never closes
    stream_cut: bool = False  # a compressed stream that ends too early


def scan_objects(file: Stream, report: ScanReport) -> Iterator[dict[str, Any]]:
    """The objects of `[{...}, {...}]`, or of objects one after another (JSON lines too), in file order.

    Memory: one object and one chunk. Brackets are followed outside strings only, so each object is parsed once, when it
    is whole. A malformed object is counted and passed over.
    """
    buffer = b""
    position = 0  # scanned up to here
    start: int | None = None  # of the object being read
    depth = 0
    base: int | None = None  # depth of the objects: 1 inside a top-level array, else 0
    while chunk := _read(file, max(CHUNK, len(buffer)), report):
        keep = position if start is None else start
        buffer, position = buffer[keep:] + chunk, position - keep
        start = None if start is None else 0
        for match in TOKEN.finditer(buffer, position):
            token = match.group()
            if token == b'"':  # its end is in a later chunk
                position = match.start()
                break
            position = match.end()
            if token in (b"{", b"["):
                base = (1 if token == b"[" else 0) if base is None else base
                if token == b"{" and depth == base:
                    start = match.start()
                depth += 1
            elif token in (b"}", b"]"):
                depth -= 1
                if start is not None and depth == base:
                    if (value := _parse(buffer[start:position], report)) is not None:
                        yield value
                    start = None
        if start is not None and len(buffer) - start > MAX_OBJECT_BYTES:
            break
    if start is not None:
        report.cut_bytes = len(buffer) - start


def scan_lines(file: Stream, report: ScanReport) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines. A malformed line is counted and passed over; a last one without its end is cut."""
    rest = b""
    while chunk := _read(file, CHUNK, report):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip() and (value := _parse(line, report)) is not None:
                yield value
    if rest.strip():
        malformed = report.malformed
        if (value := _parse(rest, report)) is not None:
            yield value
        else:
            report.malformed, report.cut_bytes = malformed, len(rest)


def _read(file: Stream, size: int, report: ScanReport) -> bytes:
    """`size` bytes, fewer only at the end. A stream that breaks off gives what came before, which `read` would lose.

    Raises:
        NotUtf8: text in UTF-16 or UTF-32.
    """
    chunk = bytearray()
    try:
        while len(chunk) < size and (part := file.read1(size - len(chunk))):
            chunk += part
    except EOFError:
        report.stream_cut = True
    if not report.bytes and (chunk.startswith(OTHER_ENCODINGS) or b"\0" in chunk[:4]):
        raise NotUtf8("its text is UTF-16 or UTF-32: make it UTF-8 (iconv -f UTF-16 -t UTF-8 OLD > NEW)")
    report.bytes += len(chunk)
    return bytes(chunk)


def _parse(raw: bytes, report: ScanReport) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):  # JSON's and Unicode's errors; brackets a thousand deep
        value = None
    if not isinstance(value, dict):
        report.malformed += 1
        return None
    report.objects += 1
    return value
