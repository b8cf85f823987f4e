"""Unpacking archives that nobody has to trust: plain files and folders inside the target, and nothing else."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeAlias

from gracecl.data.progress import progress
from gracecl.errors import UserError

Member: TypeAlias = tuple[str, IO[bytes] | None]
"""(name, content); a folder has no content"""

DAMAGED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError)


def extract(archive: Path, into: Path, *, show: bool = True) -> None:
    """Unpack a tar or zip. Names that leave `into`, links and special files are refused, modes and owners ignored."""
    members = _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive)
    try:
        with progress(f"unpacking {archive.name}", None, "files", show=show) as advance:
            for name, stream in members:
                target = _inside(into, name, archive)
                if stream is None:
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with stream, target.open("wb") as file:
                    shutil.copyfileobj(stream, file, 1 << 20)
                advance(1)
    except DAMAGED as error:
        raise UserError(f"{archive} is damaged or of an unknown kind ({error}): get it again") from error


def _tar_members(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is None and not member.isdir():
                raise _refused(archive, member.name, "is a link or a special file")
            yield member.name, stream


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, member.filename, "is a link or a special file")
            if member.flag_bits & 1:
                raise _refused(archive, member.filename, "is encrypted")
            yield member.filename, None if member.is_dir() else packed.open(member)


def _inside(into: Path, name: str, archive: Path) -> Path:
    """Return where a member goes. Its name is read by the rules of every system, so that none is surprised."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    if name.startswith(("/", "\\")) or ".." in parts or ":" in name or "\0" in name:
        raise _refused(archive, name, "points out of the folder")
    return into.joinpath(*parts)


def _refused(archive: Path, name: str, reason: str) -> UserError:
    return UserError(f"{archive} was not unpacked because its member '{name}' {reason}: it is not an official archive")
