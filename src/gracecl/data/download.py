"""Downloads that continue where they stopped, and are checked before anything is made of them."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from gracecl.data.extract import extract
from gracecl.data.progress import progress
from gracecl.data.source import Archive, Source
from gracecl.errors import UserError
from gracecl.files import check_place, open_own

CHUNK = 1 << 18
TIMEOUT = 60.0
MOST_BYTES = 4_000_000_000
"""of one file; the largest official one has 1.15 GB"""
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each new attempt; the count starts again whenever an attempt brought something."""


def fetch_source(source: Source, root: Path, mirror: str | None, *, show: bool) -> Path:
    """Download and unpack a data set; see `gracecl.data.get`."""
    folder = root / source.folder
    if folder.exists():
        found = _problems(source, folder)
        if not found:
            return folder
        if any(archive.packed for archive in source.archives):
            raise UserError(f"{folder} exists but is not complete ({found[0]}): move it away and run this again")
    try:
        for archive in source.archives:
            url = _address(archive, mirror, several=len(source.archives) > 1)
            if archive.packed:
                file = root / archive.file
                fetch(url, file, archive.sha256, show=show)
                _unpack(file, root, source.folder, show)
            else:
                fetch(url, folder / archive.file, archive.sha256, show=show)
    except OSError as error:
        raise UserError(f"cannot write to {root} ({error.strerror or error}): free some space or name another folder") from error
    return folder


def _problems(source: Source, folder: Path) -> list[str]:
    try:
        return source.problems(folder)
    except UserError as error:
        return [str(error)]


def fetch(url: str, file: Path, sha256: str | None, *, show: bool = True) -> None:
    """Make `file` from `url`; a `.part` file beside it keeps what has arrived until it is whole and checked."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"cannot download '{url}': the address must begin with http:// or https://")
    if not _is_address(url):
        raise UserError(f"cannot download {url!r}: that is no web address; write for example https://example.org/file.tar.gz")
    if file.is_file() and (sha256 is None or _digest(file) == sha256):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    check_place(file)
    part = file.with_name(file.name + ".part")
    _download(url, part, show)
    if sha256 is not None and (actual := _digest(part)) != sha256:
        part.unlink()
        raise UserError(
            f"{url} is not the official {file.name}: its SHA-256 is {actual} instead of {sha256}; "
            "the file was removed, so run this again or use another address"
        )
    os.replace(part, file)


def _is_address(url: str) -> bool:
    """Whether a URL names a host, perhaps a port, and holds no blanks or control characters."""
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0) and url.isprintable() and " " not in url
    except ValueError:
        return False


def _download(url: str, part: Path, show: bool) -> None:
    """Fill `part`, over as many connections as it takes while each brings something."""
    failures, most = 0, _size(part)
    while True:
        try:
            if _attempt(url, part, show):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise UserError(f"{url} cannot be downloaded: the server answered {error.code} {error.reason}") from error
            reason = f"the server answered {error.code} {error.reason}"
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        failures = 0 if _size(part) > most else failures + 1
        most = max(most, _size(part))
        if failures > len(PAUSES):
            raise UserError(
                f"the download of {url} stopped after {_size(part):,} bytes ({reason}); run the same command again to continue"
            )
        time.sleep(PAUSES[max(failures - 1, 0)])


def _attempt(url: str, part: Path, show: bool) -> bool:
    """One connection. True when everything has arrived, as far as the server tells."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "gracecl", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return True
        part.unlink()
        return False
    with response:
        continued = response.status == http.client.PARTIAL_CONTENT
        if continued and not _starts_at(response, have):
            part.unlink()
            return False
        if not continued:  # a server that knows no ranges sends everything again
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdecimal() else None
        if total is not None and total > MOST_BYTES:
            raise _too_large(url, part)
        with (
            open_own(part, empty=not continued) as file,
            progress(part.stem, total, "bytes", done=have, show=show) as advance,
        ):
            while chunk := response.read(CHUNK):
                file.write(chunk)
                advance(len(chunk))
                if file.tell() > MOST_BYTES:
                    raise _too_large(url, part)
    return total is None or _size(part) >= total


def _too_large(url: str, part: Path) -> UserError:
    part.unlink(missing_ok=True)
    return UserError(f"{url} sends more than {MOST_BYTES / 1e9:g} GB, which no data set here has; use another address")


def _starts_at(response: http.client.HTTPResponse, offset: int) -> bool:
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {offset}-")


def _address(archive: Archive, mirror: str | None, *, several: bool) -> str:
    if mirror is None:
        return archive.url
    return f"{mirror.rstrip('/')}/{archive.file}" if several or mirror.endswith("/") else mirror


def _unpack(file: Path, root: Path, folder: str, show: bool) -> None:
    """Unpack beside the place and move the finished folder into it, so that no half-unpacked set is ever seen there."""
    draft = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=root))
    try:
        extract(file, draft, show=show)
        if not (draft / folder).is_dir():
            raise UserError(f"{file} holds no folder '{folder}': it is not the archive of this data set")
        os.rename(draft / folder, root / folder)
    except UserError:  # not so for a full disk: what was downloaded is then still good
        file.unlink()
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    file.unlink()


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
