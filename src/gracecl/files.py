"""Files that are either the old one or the new one, never half of one, and that say so when they are not what was written.

Everything that is written goes through here, to regular files alone: a link, a pipe or a device in a file's place is refused, and
what it leads to stays as it is. Folders may be links.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import json
import math
import mmap
import operator
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from gracecl.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
try:
    import fcntl
except ImportError:  # outside POSIX
    fcntl = None  # type: ignore[assignment]

ABANDONED_AFTER = 3600.0
"""seconds after which nobody writes to a temporary file any more"""
DIGEST_BYTES = 16
CHUNK_BYTES = 1 << 24
DIGESTS = "digests"
DIGITS_OF_A_VALUE = 8
CHECKPOINT_FORMAT = "gracecl-2"
"""the entry of a safetensors file's header that holds a digest and, after a colon, all that is no tensor, as JSON"""
LONGEST_NAME = 255
"""bytes, of one folder or file"""
DEEPEST = 200
"""lists and objects within each other in a text; whatever walks through it needs so many calls"""
TOO_DEEP = f"it has more than {DEEPEST} lists or tables within each other"


KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_place(path: Path) -> None:
    """Refuse to write where something else than a regular file is."""
    if not path.name:
        raise UserError(f"'{path}' names no file; give the name of the file to write")
    with contextlib.suppress(FileNotFoundError):
        if kind := KINDS.get(stat.S_IFMT(path.lstat().st_mode)):
            raise UserError(f"cannot write {path}: it is {kind}, not a file; remove it, or choose another place")


def open_own(path: Path, *, empty: bool = False) -> IO[bytes]:
    """Open a regular file to append to; create it if absent, truncate it if `empty`."""
    check_place(path)
    # O_NOFOLLOW refuses a link that was put there since.
    handle = os.open(path, _flags("O_RDWR", "O_CREAT", "O_APPEND", "O_NOFOLLOW"), 0o666)
    if empty:
        os.ftruncate(handle, 0)
    return open(handle, "ab")


def read_file(path: Path) -> bytes:
    """Read a regular file, or the one that a link leads to. A pipe, which might never end, is refused."""
    with open_to_read(path) as file:
        return file.read()


def open_to_read(path: Path) -> IO[bytes]:
    """Open a file for reading, with the checks of `read_file`."""
    handle = os.open(path, _flags("O_RDONLY", "O_NONBLOCK"))  # without O_NONBLOCK a pipe that nobody writes to would block
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return open(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise UserError(
        f"cannot read {path}: it is {KINDS[stat.S_IFMT(mode)]}, not a file; write its content into a file and name that"
    )


def _flags(*names: str) -> int:
    """Combine flags of `os.open`, those that the system has, for bytes and not for child processes."""
    return functools.reduce(operator.or_, (getattr(os, name, 0) for name in (*names, "O_CLOEXEC", "O_BINARY")))


def lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed; return False where the system has no such locks.

    Raises BlockingIOError if another process holds the lock and `wait` is False.
    """
    if fcntl is None:
        return False
    fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def check_readable(path: Path) -> None:
    """Refuse what `read_file` refuses, for libraries that open files themselves."""
    open_to_read(path).close()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; synced, it replaces `path` when the block ends without an error.

    The file gets the mode of any new file, whatever it is written by: safetensors makes its own for the owner alone.
    """
    check_place(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    _sweep(path)
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sweep(path: Path) -> None:
    """Remove temporary files of this name that killed processes left."""
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER:
                left.unlink()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder, so that they outlast a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, synced."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def as_cell(value: Any) -> Any:
    """Return a value for a CSV file. Text that a spreadsheet would take for a formula gets an apostrophe before it.

    A carriage return becomes a line feed, which Python's csv puts in quotes; the return would begin another row.
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\n")) else text


def as_name(expression: str) -> str:
    """Return an expression as a folder's name, cut to what file systems allow: the hash below it tells runs apart."""
    name = re.sub(r"[^A-Za-z0-9_.=+-]+", "-", expression.replace("()", "")).strip("-").lstrip(".") or "_"
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME // 2].rstrip("-")


def as_path(given: Any, what: str) -> Path:
    """Convert a caller's argument to a path."""
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"{what} is a path, not a {type(given).__name__}")
    return without_nul(Path(given))


def without_nul(path: str | Path) -> Path:
    """Refuse a path with a NUL."""
    if "\0" in str(path):
        raise UserError(f"the path {str(path)!r} holds a NUL, which no path has; leave it out")
    return Path(path)


def read_note(path: Path) -> str:
    """Read a small text file; empty if absent."""
    try:
        text = read_file(path).decode("utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{path} is damaged: it is not text; write into it what it held, or delete it")
    return text


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON, readable by any program: a number that is not finite becomes null."""
    write_text(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that the library can walk through and write again; a ValueError says what is wrong."""
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text))
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        raise ValueError("it is not JSON") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(TOO_DEEP)
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair, which is no text") from None
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML that the library can walk through; a ValueError says what is wrong."""
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if _is_deep(content):
        raise ValueError(TOO_DEEP)
    return content


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inside for item in items]
    return any(isinstance(item, (dict, list)) for item in level)


def sealed(values: dict[str, Any]) -> str:
    """Return strict JSON of values with a digest of each, so that `read_sealed` finds what was changed."""
    plain = finite(values)
    return (
        json.dumps(plain | {DIGESTS: {name: _digest_of(value) for name, value in plain.items()}}, indent=1, allow_nan=False) + "\n"
    )


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    write_text(path, sealed(values))


def read_sealed(path: Path) -> dict[str, Any]:
    """Read values that `sealed` wrote; older files without digests are accepted."""
    try:
        values = parse_json(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds no settings")
    digests = values.pop(DIGESTS, None)
    if isinstance(digests, dict):
        names = {*values, *digests}
        if changed := sorted(name for name in names if name not in values or _digest_of(values[name]) != digests.get(name)):
            raise UserError(f"{path}: {', '.join(changed)} was changed by hand or damaged; put the old value back")
    elif digests is not None:
        raise UserError(f"{path} is damaged: its digests are not readable")
    return values


def check_format(found: Any, known: int, path: Path, remedy: str) -> None:
    """Refuse a file of a later format than this version reads; `remedy` is what can be done besides."""
    if type(found) is not int or not 1 <= found <= known:
        which = f"format {found}" if type(found) is int else "a format that is not known here"
        raise UserError(
            f"{path} has {which}, and this version of gracecl reads up to {known}: install the version that wrote it, or {remedy}"
        )


def check_header(names: Iterable[str], known: str, path: Path, remedy: str) -> None:
    """Refuse a file whose header has the name of a later format than `known`, such as gracecl-3 for gracecl-2."""
    kind, _, number = known.rpartition("-")
    for name in names:
        if later := re.fullmatch(rf"{kind}-(\d+)", name):
            check_format(int(later[1]), int(number), path, remedy)


def _digest_of(value: Any) -> str:
    return str(Digest().add(json.dumps(value, sort_keys=True).encode()))[:DIGITS_OF_A_VALUE]


class Digest:
    """A BLAKE2b digest of everything added so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, data: Any) -> Digest:
        """Add bytes, or any object with a buffer."""
        self._hash.update(data)
        return self

    def __str__(self) -> str:
        return self._hash.hexdigest()


def chunk_digests(data: memoryview) -> list[str]:
    """Return digests of consecutive chunks, computed in threads: hashing releases the lock."""
    data = data.cast("B")
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    if len(chunks) < 2:
        return [str(Digest().add(chunk)) for chunk in chunks]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda chunk: str(Digest().add(chunk)), chunks))


def file_digests(path: Path) -> list[str]:
    """Return the chunk digests of a file, which is mapped and need not fit into memory."""
    if path.stat().st_size == 0:
        return []
    with open_to_read(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        return chunk_digests(data)


class Written(NamedTuple):
    """Length and digest of the written part of a file that is appended to."""

    bytes: int
    digest: str

    @classmethod
    def of(cls, values: Any) -> Written | None:
        """Build it from fields of JSON; None if they are not there."""
        match values:
            case {"bytes": int(number), "digest": str(digest)}:
                return cls(number, digest)
        return None

    @classmethod
    def to(cls, path: Path) -> Written:
        """Measure a whole file; zero bytes if it is absent."""
        data = read_file(path) if path.is_file() else b""
        return cls(len(data), str(Digest().add(data)))

    def missing(self, path: Path) -> str:
        """Return why a file does not begin with this; empty if it does."""
        try:
            with open_to_read(path) as file:
                data = file.read(self.bytes)
        except FileNotFoundError:
            return "it is not there" if self.bytes else ""
        if len(data) < self.bytes:
            return f"it has {len(data)} bytes of {self.bytes}"
        return "" if str(Digest().add(data)) == self.digest else "it was changed"

    def check(self, path: Path) -> None:
        """Refuse a record that does not begin with what the checkpoint beside it counts on."""
        if why := self.missing(path):
            raise UserError(
                f"{path} is not the record that the checkpoint beside it was written with ({why}); "
                "put it back from a copy, or delete the checkpoint to start this run anew"
            )


def noted_in(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """What a run's checkpoint notes in its header: how far the `record` was written, and the run's `config`; empty where it cannot
    be read."""
    entries = entries_of(checkpoint)
    try:
        return {name: dict(entries[name]["dict"]) for name in ("record", "config")}
    except (ValueError, KeyError, TypeError):
        return {}


def entries_of(checkpoint: Path) -> dict[str, Any]:
    """Return the entries in a checkpoint's header by name; empty if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        check_readable(checkpoint)
        with safe_open(checkpoint, framework="np") as file:
            _, _, tree = (file.metadata() or {})[CHECKPOINT_FORMAT].partition(":")
        return dict(parse_json(tree)["dict"])
    except (SafetensorError, UserError, OSError, ValueError, KeyError, TypeError):
        return {}


def unfold(tree: Any, leaf: Callable[[str, str], Any]) -> Any:
    """Return the nested values that a checkpoint's header stands for; `leaf` gives those of a "tensor" or "array" by its name."""
    match tree:
        case {"dict": items}:
            return {key: unfold(item, leaf) for key, item in items}
        case {"list": items}:
            return [unfold(item, leaf) for item in items]
        case {"tuple": items}:
            return tuple(unfold(item, leaf) for item in items)
        case {"tensor": name}:
            return leaf("tensor", name)
        case {"array": name}:
            return leaf("array", name)
    return tree


class Size(NamedTuple):
    """Stands for a tensor of so many bytes."""

    nbytes: int


def sizes_in(checkpoint: Path, entry: str) -> Any:
    """Return an entry of a checkpoint with sizes in place of its tensors, which are not read; None if it cannot be read."""
    try:
        with open_to_read(checkpoint) as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(length, os.fstat(file.fileno()).st_size)))
        places = {name: value["data_offsets"] for name, value in header.items() if name != "__metadata__"}
        sizes = {name: Size(end - start) for name, (start, end) in places.items()}
        return unfold(entries_of(checkpoint).get(entry), lambda kind, name: sizes[name])
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
        return None


def finite(value: Any) -> Any:
    """Return the value with null for every number that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
