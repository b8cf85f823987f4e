"""`get` against a real HTTP server on loopback, and unpacking archives that mean harm."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import layouts
import pytest

from gracecl.data import Archive, download, get, load
from gracecl.data.cifar100 import Cifar100
from gracecl.data.extract import extract
from gracecl.data.mnist import Mnist
from gracecl.data.tinyimagenet import TinyImageNet
from gracecl.errors import UserError


class Server:
    """Serves `files`; the next answers break off after `cuts` bytes; `ranges` is what was asked for."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.knows_ranges = True
        self.tells_length = True
        self.shift = 0
        self.ranges: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}/"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        content = self.files.get(request.path.lstrip("/"))
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return request.send_error(status)
        if content is None:
            return request.send_error(404)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.knows_ranges else 0
        if start >= len(content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.send_header("Content-Length", "0")
            return request.end_headers()
        if start:
            start += self.shift
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            request.send_response(200)
        if self.tells_length:
            request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        request.wfile.write(content[start:end])
        request.wfile.flush()
        if end < len(content):
            request.connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(5)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(download, "TIMEOUT", 10.0)
    running = Server()
    yield running
    running.close()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def packed(folder, kind="w:gz"):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=kind) as tar:
        tar.add(folder, folder.name)
    return stream.getvalue()


@pytest.fixture
def cifar(server, tmp_path, monkeypatch):
    """The address of a small CIFAR-100 archive, taken for the official one."""
    content = packed(layouts.cifar100(tmp_path / "origin"))
    server.files["cifar-100-python.tar.gz"] = content
    address = server.address + "cifar-100-python.tar.gz"
    monkeypatch.setattr(Cifar100, "archives", (Archive(address, sha256(content)),))
    return content


def test_get_downloads_checks_and_unpacks(cifar, server, tmp_path, capsys):
    root = tmp_path / "data"
    assert get("cifar100", root) == root / "cifar-100-python"
    assert load("cifar100", root).fingerprint == load("cifar100", tmp_path / "origin").fingerprint
    assert sorted(path.name for path in root.iterdir()) == [".gracecl-cache", "cifar-100-python"]
    assert f"cifar-100-python.tar.gz: {len(cifar) / 1e6:.1f} MB, " in capsys.readouterr().err


def test_a_cut_connection_is_continued_not_restarted(cifar, server, tmp_path):
    server.cuts = [100_000, 200_000, 50_000]
    get("cifar100", tmp_path / "data", progress=False)
    assert server.ranges == [None, "bytes=100000-", "bytes=300000-", "bytes=350000-"]
    assert (tmp_path / "data" / "cifar-100-python" / "train").is_file()


def test_the_next_call_continues_where_the_last_one_gave_up(cifar, server, tmp_path):
    server.cuts = [100_000, 0, 0, 0]
    with pytest.raises(UserError, match=r"stopped after 100,000 bytes .* again to continue"):
        get("cifar100", tmp_path / "data", progress=False)
    assert (tmp_path / "data" / "cifar-100-python.tar.gz.part").stat().st_size == 100_000
    server.ranges.clear()
    get("cifar100", tmp_path / "data", progress=False)
    assert server.ranges == ["bytes=100000-"]


def test_a_server_without_ranges_starts_again(cifar, server, tmp_path):
    server.knows_ranges = False
    server.cuts = [100_000]
    get("cifar100", tmp_path / "data", progress=False)
    assert server.ranges == [None, "bytes=100000-"]
    server.cuts = [5000, 9000, 5000, 9000, 5000, 9000]
    with pytest.raises(UserError, match="stopped after"):
        get("cifar100", tmp_path / "other", progress=False)


def test_a_server_that_sends_another_range_starts_again(cifar, server, tmp_path):
    server.cuts, server.shift = [100_000], 7
    get("cifar100", tmp_path / "data", progress=False)
    assert server.ranges == [None, "bytes=100000-", None]


@pytest.mark.parametrize("extra", [b"", b"too long"])
def test_a_part_file_that_is_whole_or_too_long(cifar, server, tmp_path, extra):
    root = tmp_path / "data"
    root.mkdir()
    (root / "cifar-100-python.tar.gz.part").write_bytes(cifar + extra)
    get("cifar100", root, progress=False)
    assert len(server.ranges) == (2 if extra else 1)


def test_a_wrong_hash_says_so_and_removes_the_file(cifar, server, tmp_path):
    server.files["cifar-100-python.tar.gz"] = cifar[:-1] + b"!"
    with pytest.raises(UserError, match=r"not the official cifar-100-python\.tar\.gz: its SHA-256 is .* removed"):
        get("cifar100", tmp_path / "data", progress=False)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_mirror_is_checked_too(cifar, server, tmp_path):
    server.files["copy/of/it"] = cifar
    get("cifar100", tmp_path / "data", url=server.address + "copy/of/it", progress=False)
    server.files["copy/of/it"] = b"something else"
    with pytest.raises(UserError, match="SHA-256"):
        get("cifar100", tmp_path / "other", url=server.address + "copy/of/it", progress=False)
    get("cifar100", tmp_path / "third", url=server.address, progress=False)


def test_answers_that_are_errors(cifar, server, tmp_path):
    with pytest.raises(UserError, match="404"):
        get("cifar100", tmp_path / "data", url=server.address + "nothing", progress=False)
    server.statuses = [503, 503]
    get("cifar100", tmp_path / "data", progress=False)
    server.statuses = [503] * 3
    with pytest.raises(UserError, match="answered 503"):
        get("cifar100", tmp_path / "other", progress=False)
    with pytest.raises(UserError, match="http"):
        get("cifar100", tmp_path / "other", url="file:///etc/passwd")


@pytest.mark.parametrize("tells", [True, False], ids=["length", "no length"])
def test_a_server_that_sends_without_end_is_left(cifar, server, tmp_path, monkeypatch, tells):
    monkeypatch.setattr(download, "MOST_BYTES", 1000)
    server.tells_length = tells
    with pytest.raises(UserError, match=r"sends more than .* GB, which no data set here has"):
        get("cifar100", tmp_path, url=server.address, progress=False)
    assert not list(tmp_path.rglob("*.part"))


def test_nobody_there(cifar, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(UserError, match="stopped after 0 bytes"):
            get("cifar100", tmp_path / "data", url=address, progress=False)


def test_what_is_there_stays(cifar, server, tmp_path, monkeypatch):
    layouts.cifar100(tmp_path / "data")
    with pytest.raises(UserError, match="exists but is not complete"):
        get("cifar100", tmp_path / "data")
    monkeypatch.setattr(Cifar100, "problems", lambda self, folder: [])
    assert get("cifar100", tmp_path / "data") == tmp_path / "data" / "cifar-100-python"
    assert server.ranges == []


def test_sets_without_files_need_no_download():
    with pytest.raises(UserError, match="needs no download"):
        get("digits")


def test_the_wrong_archive(server, tmp_path, monkeypatch):
    content = packed(layouts.cifar10(tmp_path / "origin"))
    server.files["cifar-100-python.tar.gz"] = content
    monkeypatch.setattr(Cifar100, "archives", (Archive(server.address + "cifar-100-python.tar.gz", None),))
    with pytest.raises(UserError, match="no folder 'cifar-100-python'"):
        get("cifar100", tmp_path / "data", progress=False)
    assert list((tmp_path / "data").iterdir()) == []


def test_zip_archives(server, tmp_path, monkeypatch):
    folder = layouts.tinyimagenet(tmp_path / "origin", classes=2)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed_zip:
        for path in sorted(folder.rglob("*")):
            packed_zip.write(path, path.relative_to(folder.parent))
    server.files["tiny.zip"] = stream.getvalue()
    archive = Archive(server.address + "tiny.zip", sha256(stream.getvalue()))
    monkeypatch.setattr(TinyImageNet, "archives", (archive,))
    get("tinyimagenet", tmp_path / "data", progress=False)
    assert load("tinyimagenet", tmp_path / "data").classes == 2


def test_mnist_is_four_files(server, tmp_path, monkeypatch):
    folder = layouts.idx(tmp_path / "origin")
    archives = []
    for path in sorted(folder.iterdir()):
        server.files[f"m/{path.name}"] = path.read_bytes()
        archives.append(Archive(f"http://127.0.0.1:9/{path.name}", sha256(path.read_bytes())))
    monkeypatch.setattr(Mnist, "archives", tuple(archives))
    assert get("mnist", tmp_path / "data", url=server.address + "m", progress=False) == tmp_path / "data" / "mnist"
    assert load("mnist", tmp_path / "data").classes == 10
    (tmp_path / "data" / "mnist" / archives[0].file).unlink()
    server.ranges.clear()
    get("mnist", tmp_path / "data", url=server.address + "m", progress=False)
    assert server.ranges == [None]


def test_official_addresses_are_complete():
    for source in (Cifar100, Mnist, TinyImageNet):
        for archive in source.archives:
            assert archive.url.startswith("http")
            assert len(archive.sha256) == 64


def tar_with(path, *members):
    """members: (name, type, link target)"""
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            info.size = 5 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"hello") if info.size else None)
    return path


@pytest.mark.parametrize(
    "member",
    [
        ("../outside", tarfile.REGTYPE, ""),
        ("folder/../../outside", tarfile.REGTYPE, ""),
        ("/tmp/gracecl-outside", tarfile.REGTYPE, ""),
        ("C:/outside", tarfile.REGTYPE, ""),
        ("..\\outside", tarfile.REGTYPE, ""),
        ("link", tarfile.SYMTYPE, "/etc/passwd"),
        ("link", tarfile.SYMTYPE, "../outside"),
        ("link", tarfile.SYMTYPE, "folder"),
        ("link", tarfile.LNKTYPE, "../outside"),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("device", tarfile.CHRTYPE, ""),
        ("../folder", tarfile.DIRTYPE, ""),
    ],
)
def test_harmful_tar_members(tmp_path, member):
    into = tmp_path / "a" / "into"
    into.mkdir(parents=True)
    archive = tar_with(tmp_path / "bad.tar.gz", ("folder/fine", tarfile.REGTYPE, ""), member)
    with pytest.raises(UserError, match="was not unpacked"):
        extract(archive, into, show=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "bad.tar.gz", "fine", "folder", "into"]


@pytest.mark.parametrize("name", ["../outside", "folder/../../outside", "/outside", "..\\outside", "link"])
def test_harmful_zip_members(tmp_path, name):
    into = tmp_path / "into"
    into.mkdir()
    info = zipfile.ZipInfo(name)
    info.filename = name
    if name == "link":
        info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(UserError, match="was not unpacked"):
        extract(tmp_path / "bad.zip", into, show=False)
    assert list(into.iterdir()) == []


def test_a_link_first_and_a_file_through_it(tmp_path):
    into = tmp_path / "into"
    into.mkdir()
    archive = tar_with(tmp_path / "bad.tar.gz", ("door", tarfile.SYMTYPE, str(tmp_path)), ("door/outside", tarfile.REGTYPE, ""))
    with pytest.raises(UserError, match="'door' is a link"):
        extract(archive, into, show=False)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00" + b"\0" * 20])
def test_damaged_archives(tmp_path, content):
    (tmp_path / "bad.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        extract(tmp_path / "bad.tar.gz", tmp_path, show=False)


def test_a_truncated_archive(tmp_path):
    whole = packed(layouts.cifar100(tmp_path / "origin"))
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged"):
        extract(tmp_path / "cut.tar.gz", tmp_path / "into", show=False)
