"""Records of a source, one at a time, and what tells one state of a source from another."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from eagle3_train.config import CorpusConfig, SourceConfig
from eagle3_train.console import progress_bar
from eagle3_train.files import content_fingerprint, file_fingerprint, find_package_file

from .messages import Conversation, Unusable, conversation_of
from .scan import NotUtf8, ScanReport, Stream, scan_lines, scan_objects


class _ArrowStream:
    """A stream that Arrow decompresses; one that breaks off says so as Python's own do, by EOFError."""

    def __init__(self, file: BinaryIO, codec: str) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)

    def read1(self, size: int, /) -> bytes:
        try:
            return self._stream.read(min(size, 1 << 16))
        except OSError as e:
            if "Truncated" in str(e):
                raise EOFError from e
            raise


OPENERS: dict[str, Callable[[BinaryIO], Stream]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: _ArrowStream(file, "zstd"),
    ".lz4": lambda file: _ArrowStream(file, "lz4"),
}
# What a damaged stream makes its decompressor raise; OSError: gzip, bz2, and a disk that cannot be read.
DAMAGE = (OSError, zlib.error, lzma.LZMAError, pa.ArrowException)
TABLES = (".parquet", ".arrow")
SCANNERS = {"sharegpt": scan_objects, "jsonl": scan_lines}


@dataclass
class SourceReport:
    """What one source gave."""

    conversations: int = 0  # whole records
    malformed: int = 0
    cut_bytes: int = 0
    stream_cut: bool = False
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> conversations

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": dict(self.dropped.most_common())}

    def in_words(self) -> str:
        """What was read of it and what was not."""
        counts = [f"{n:,} {reason}" for reason, n in self.dropped.items()]
        counts += [f"{self.malformed:,} malformed"] if self.malformed else []
        counts += [f"{self.cut_bytes:,} bytes cut at the end"] if self.cut_bytes else []
        counts += ["no JSON objects: is `format` right?"] if not self.conversations else []
        return f"{self.conversations:,} records read" + (f" ({', '.join(counts)})" if counts else "")


def sources_of(cfg: CorpusConfig) -> list[SourceConfig]:
    """The sources of a corpus: those of `sources`, or the one of `format` and `path`."""
    return cfg.sources or [SourceConfig(name=cfg.name, format=cfg.format, path=str(cfg.path))]


def fingerprint(source: SourceConfig) -> Any:
    """Of a source's content, JSON-able; for a data set on the hub its name and revision stand for it.

    Raises:
        ValueError: no such file, or one that its format does not read.
    """
    if source.format != "dataset":
        return file_fingerprint(_file(source))
    return content_fingerprint(source.path) or {"path": source.path, "revision": source.revision}


def read_conversations(source: SourceConfig, report: SourceReport) -> Iterator[Conversation]:
    """The usable conversations of a source, in its order; the rest is counted in `report`."""
    for record in _dataset(source, report) if source.format == "dataset" else _scanned(source, report):
        try:
            yield conversation_of(record, source.name)
        except Unusable as e:
            report.dropped[str(e)] += 1
        if report.conversations == source.limit:
            return


def _file(source: SourceConfig) -> Path:
    file = find_package_file(source.path) if source.path.startswith("package:") else Path(source.path).expanduser()
    if not file.is_file():
        reason = "a folder; give a file of it, or use format=dataset" if file.is_dir() else "no such file"
        raise ValueError(f"corpus source {source.name!r}: path={source.path}: {reason}")
    if file.suffix in TABLES:
        raise ValueError(
            f"corpus source {source.name!r}: path={source.path} is a table, which format={source.format} does not "
            "read: use format=dataset"
        )
    return file


def _scanned(source: SourceConfig, report: SourceReport) -> Iterator[dict[str, Any]]:
    path, scan = _file(source), ScanReport()
    size, opener = path.stat().st_size, OPENERS.get(path.suffix)
    with open(path, "rb") as raw, progress_bar(f"reading {source.name}", size, "bytes") as bar:
        try:
            for record in SCANNERS[source.format](opener(raw) if opener else raw, scan):
                report.conversations = scan.objects
                yield record
                if (position := raw.tell()) != bar.units:
                    bar.update(position - bar.units)
        except DAMAGE as e:
            raise ValueError(
                f"corpus source {source.name!r}: {path} is damaged: {scan.objects:,} records could be read, then "
                f"{type(e).__name__}: {e}. Fetch it again, or give the source a limit of so many"
            ) from e
        except NotUtf8 as e:
            raise ValueError(f"corpus source {source.name!r}: {path}: {e}") from e
        bar.update(size - bar.units)
    report.conversations, report.malformed = scan.objects, scan.malformed
    report.cut_bytes, report.stream_cut = scan.cut_bytes, scan.stream_cut


def _dataset(source: SourceConfig, report: SourceReport) -> Iterator[dict[str, Any]]:
    rows = _load_dataset(source)
    known = source.limit or getattr(rows, "num_rows", None) or 0
    with progress_bar(f"reading {source.name}", known, "conversations") as bar:
        for record in rows:
            report.conversations += 1
            bar.update(1)
            yield record


def _load_dataset(source: SourceConfig) -> Any:
    """A data set as something to iterate over: streamed, so that nothing is held or copied.

    Raises:
        ValueError: there is none by this name, split or subset, or no network to fetch it.
    """
    import datasets

    path = Path(source.path).expanduser()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():  # written by `save_to_disk`
            saved = datasets.load_from_disk(str(path))
            return saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
        if path.is_file():
            kind = path.suffix[1:] if path.suffix in TABLES else "json"
            return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        return datasets.load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision, streaming=True
        )
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as e:
        raise ValueError(
            f"corpus source {source.name!r}: path={source.path}, subset={source.subset}, split={source.split} is no "
            f"data set that can be read ({type(e).__name__}: {e}). Without network, give a local folder"
        ) from e
