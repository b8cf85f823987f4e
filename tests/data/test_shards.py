"""Shards: the same data set as in memory, read by number; packing that goes on where it stopped; damage that is noticed."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import commands
import gracecl
from gracecl import UserError
from gracecl.data import Data, check, from_folder, from_shards, load
from gracecl.data.saved import MDS
from gracecl.data.shards import INDEX, PLAN
from gracecl.engine.read_ahead import AHEAD, ReadAhead, read_ahead
from gracecl.inputs import in_memory
from gracecl.rows import Rows
from waiting import wait_until

RNG = np.random.default_rng(0)
MDS_FIXTURE = Path(__file__).parent.parent / "fixtures" / "mds"
FAMILIES = [
    "domain(tasks=2)",
    "noisy(longtail(split(tasks=5)), 0.2)",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in (
            "split(tasks=5)",
            "iid()",
            "i-blurry(tasks=5)",
            "si-blurry(tasks=5)",
            "gaussian()",
            "gradual(tasks=5)",
            "repeat()",
            "delayed(split(tasks=5), 5)",
            "task(split(tasks=5))",
        )
    ),
]
PACKER = """
import sys, time, numpy as np, gracecl
class Slow:
    def __len__(self): return 400
    def __getitem__(self, number):
        if not 0 <= number < 400: raise IndexError
        time.sleep(float(sys.argv[2]))
        return np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8), number % 4
    classes = ["a", "b", "c", "d"]
gracecl.pack(Slow(), sys.argv[1], test=Slow(), shard_bytes=4000, show=False)
"""


class Made(Dataset[Any]):
    """Items that are computed, some of which may fail."""

    def __init__(self, items: list[Any], fails_at: int | None = None) -> None:
        self.items, self.fails_at, self.asked = items, fails_at, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        self.asked += 1
        if number == self.fails_at:
            raise RuntimeError("the power went out")
        return self.items[number]


@pytest.fixture(scope="module")
def digits() -> Data:
    return load("digits")


@pytest.fixture(scope="module")
def packed(digits: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in 21 shards of training images."""
    place = tmp_path_factory.mktemp("shards") / "digits"
    gracecl.pack(digits, place, shard_bytes=70 * digits.inputs.bytes, show=False)
    return place


def images(count: int, seed: int = 0) -> list[Any]:
    """Pairs (image, label) with channels last."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 6, 5, 3), np.uint8)
    return [(image, number % 3) for number, image in enumerate(pixels)]


def test_shards_are_the_data_set_that_was_packed(digits: Data, packed: Path) -> None:
    data = from_shards(packed)
    assert len(list(packed.glob("train-*"))) == 21
    assert len(list(packed.glob("test-*"))) == 6
    assert data.fingerprint == digits.fingerprint
    assert (data.name, data.class_names, data.tasks, data.labels) == (digits.name, digits.class_names, digits.tasks, None)
    assert data.inputs == digits.inputs
    assert torch.equal(torch.cat([data.train_x]), digits.train_x)
    assert not in_memory(data.train_x)
    assert in_memory(data.test_x)
    assert np.array_equal(data.train_y, digits.train_y)


def test_a_part_of_packed_data_has_a_fingerprint_of_its_own(packed: Path) -> None:
    some = load(f"shards:{packed}", classes="2,5")
    assert some.fingerprint == load("digits", classes="2,5").fingerprint
    assert not in_memory(some.train_x)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_stream_over_shards(family: str, digits: Data, packed: Path) -> None:
    of_arrays, of_shards = (gracecl.stream(data, family=family, seed=3) for data in (digits, from_shards(packed)))
    assert of_shards.hash == of_arrays.hash
    assert not in_memory(of_shards.data.train_x)
    for step in (0, len(of_arrays) // 2, len(of_arrays) - 1):
        one, other = of_arrays.batch(step), of_shards.batch(step)
        assert torch.equal(one.x, other.x)
        assert np.array_equal(one.labels, other.labels)


def test_a_learner_gets_the_same_weights_from_shards(digits: Data, packed: Path) -> None:
    options: dict[str, Any] = {"inputs": digits.inputs, "classes": 10, "net": "mlp()", "augment": "none", "memory": 20}
    streams = [gracecl.stream(digits, tasks=5).cut(8), gracecl.stream(f"split-shards(path={str(packed)!r}, tasks=5)").cut(8)]
    learners = [gracecl.Learner("er()", **options).fit(stream) for stream in streams]
    weights = [learner.engine.net.state_dict() for learner in learners]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert learners[0].evaluate(streams[0]).overall == learners[0].evaluate(streams[1]).overall


def test_batches_are_read_ahead_and_any_can_be_asked_for(packed: Path, digits: Data) -> None:
    stream = gracecl.stream(from_shards(packed), tasks=2, batch=50)
    assert not isinstance(read_ahead(gracecl.stream(digits)), ReadAhead)
    ahead = read_ahead(stream)
    assert isinstance(ahead, ReadAhead)
    for step in (0, 1, 2, 9, 3, 4, len(stream) - 1, len(stream) - 2):
        assert torch.equal(ahead(step).x, stream.batch(step).x)
        assert len(ahead._coming) <= AHEAD
    ahead(5)
    assert sorted(ahead._coming) == [6, 7, 8]
    with pytest.raises(UserError, match="the stream has the batches 0 to"):
        ahead(len(stream))


def test_rows_are_indexed_as_a_tensor_is(packed: Path, digits: Data) -> None:
    rows, tensor = from_shards(packed).train_x, digits.train_x
    index = torch.tensor([700, 3, 3, 69, 70])
    assert isinstance(rows[5:90:7], Rows)
    assert torch.equal(rows[5:90:7].loaded(), tensor[5:90:7])
    assert torch.equal(rows[index].loaded(), tensor[index])
    assert torch.equal(rows[index.numpy()][1:3].loaded(), tensor[index][1:3])
    assert torch.equal(rows.index_select(0, index), tensor.index_select(0, index))
    assert torch.equal(rows[100:300].index_select(0, torch.tensor([10, 0])), tensor[[110, 100]])
    assert torch.equal(torch.cat([rows[:2], tensor[:1]]), torch.cat([tensor[:2], tensor[:1]]))
    assert (rows.shape, rows.dtype, rows.ndim, len(rows[:0])) == (tensor.shape, tensor.dtype, 4, 0)
    assert torch.equal(next(iter(rows[4:])), tensor[4])
    assert len(rows[:0].loaded()) == 0


def test_a_folder_of_images_is_packed_as_it_is_read(tmp_path: Path) -> None:
    for number, (image, label) in enumerate(images(30)):
        folder = tmp_path / "images" / f"class {label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    kept = gracecl.pack(tmp_path / "images", tmp_path / "out", size=4, show=False)
    read = from_folder(tmp_path / "images", size=4, root=tmp_path)
    assert (kept.fingerprint, kept.inputs, kept.class_names) == (read.fingerprint, read.inputs, read.class_names)


def archive(path: Path, pairs: list[Any], label: str = "cls") -> None:
    with tarfile.open(path, "w") as tar:
        for number, (image, name) in enumerate(pairs):
            picture = io.BytesIO()
            Image.fromarray(image).save(picture, "PNG")
            text = json.dumps({"label": name, "more": 1}) if label == "json" else str(name)
            for ending, content in (("png", picture.getvalue()), (label, text.encode())):
                entry = tarfile.TarInfo(f"part/{number:04d}.{ending}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def test_archives_in_the_layout_of_webdataset(tmp_path: Path) -> None:
    for number in range(2):
        archive(tmp_path / f"train-{number}.tar", images(20, number))
    archive(tmp_path / "test.tar", images(7, 9), "json")
    data = gracecl.pack(str(tmp_path / "train-*.tar"), tmp_path / "out", test=str(tmp_path / "test.tar"), show=False)
    expected = np.stack([image.transpose(2, 0, 1) for number in range(2) for image, _ in images(20, number)])
    assert np.array_equal(data.train_x.numpy(), expected)
    assert data.train_y.tolist() == [label for number in range(2) for _, label in images(20, number)]
    assert data.test_y.tolist() == [label for _, label in images(7, 9)]
    held = gracecl.pack(tmp_path / "train-0.tar", tmp_path / "held", show=False)
    assert (len(held.train_y), len(held.test_y)) == (17, 3)
    with pytest.raises(UserError, match="names no tar archive"):
        gracecl.pack(tmp_path / "train-0.tar", tmp_path / "other", test=str(tmp_path / "none-*.tar"), show=False)


@pytest.mark.parametrize(("files", "sentence"), [(("a.png",), "has no label"), (("a.cls",), "has no image"), ((), "has no images")])
def test_archives_without_images_or_labels(files: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in files:
            entry = tarfile.TarInfo(name)
            entry.size = 1
            tar.addfile(entry, io.BytesIO(b"1"))
    with pytest.raises(UserError, match=sentence):
        gracecl.pack(tmp_path / "x.tar", tmp_path / "out", show=False)


def test_datasets_of_torch_and_dicts_of_parts(tmp_path: Path) -> None:
    items = [
        {"ids": torch.randint(0, 9, (4,)), "mask": torch.rand(3, dtype=torch.float32), "label": "abc"[number % 3]}
        for number in range(25)
    ]
    made, test = Made(items), Made(items[:5])
    data = gracecl.pack({"train": made, "validation": test}, tmp_path / "parts", shard_bytes=200, show=False)
    read = gracecl.from_torch(made, test)
    assert data.fingerprint == read.fingerprint
    assert (data.labels, data.class_names, data.inputs) == (("a", "b", "c"), ("a", "b", "c"), read.inputs)
    assert torch.equal(data.train_x.index_select(0, torch.tensor([24, 0]))["ids"], read.train_x[[24, 0]]["ids"])
    pictures = Made(images(12))
    of_images = gracecl.pack(pictures, tmp_path / "images", test=pictures, show=False)
    assert of_images.inputs == gracecl.from_torch(pictures, pictures).inputs
    with pytest.raises(UserError, match="give test="):
        gracecl.pack(made, tmp_path / "no test", show=False)
    with pytest.raises(UserError, match="takes map-style datasets"):
        gracecl.pack(iter(items), tmp_path / "stream", test=made, show=False)


def test_packing_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, items = tmp_path / "whole", images(50)
    gracecl.pack(Made(items), whole, test=Made(items[:9]), shard_bytes=900, show=False)
    with pytest.raises(RuntimeError, match="the power went out"):
        gracecl.pack(Made(items, fails_at=33), tmp_path / "some", test=Made(items[:9]), shard_bytes=900, show=False)
    with pytest.raises(UserError, match="is not packed to its end"):
        from_shards(tmp_path / "some")
    again = Made(items)
    with pytest.raises(UserError, match="the beginning of another data set"):
        gracecl.pack(Made(images(50, 1)), tmp_path / "some", test=Made(items[:9]), shard_bytes=900, show=False)
    gracecl.pack(again, tmp_path / "some", test=Made(items[:9]), shard_bytes=900, show=False)
    assert again.asked <= 50 - 30 + 3
    assert sorted(file.name for file in whole.iterdir()) == sorted(file.name for file in (tmp_path / "some").iterdir())
    assert all(file.read_bytes() == (tmp_path / "some" / file.name).read_bytes() for file in whole.iterdir())
    with pytest.raises(UserError, match="holds shards already"):
        gracecl.pack(again, whole, test=Made(items[:9]), show=False)


def test_damage_is_noticed(packed: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(packed, place)
    assert check(str(place)) == []
    shard, data = place / "train-00003.safetensors", from_shards(place)
    content = bytearray(shard.read_bytes())
    at = content.index(data.train_x[3 * 70 + 2 : 3 * 70 + 3].loaded().numpy().tobytes())
    content[at + 7] ^= 4
    shard.write_bytes(content)
    [sentence] = check(str(place))
    assert "train-00003.safetensors does not match its digest in chunk 0" in sentence
    assert len(data.train_x[3 * 70 : 3 * 70 + 2].loaded()) == 2
    with pytest.raises(UserError, match=r"row 2 of .*train-00003.safetensors is damaged; copy it again"):
        data.train_x[3 * 70 + 2 : 3 * 70 + 3].loaded()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"has {len(content) - 1} bytes of {len(content)}"):
        from_shards(place)
    about = json.loads((place / INDEX).read_text())
    (place / INDEX).write_text(json.dumps({name: value for name, value in about.items() if name != "digests"} | {"format": 99}))
    with pytest.raises(UserError, match="has format 99, and this version of gracecl reads up to 1"):
        from_shards(place)


def test_folders_without_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no shards \(no index.json\)"):
        gracecl.stream(f"split-shards(path={str(tmp_path)!r})")
    with pytest.raises(UserError, match="needs the folder that 'gracecl data pack' made"):
        gracecl.stream("split-shards()")
    with pytest.raises(UserError, match="shards hold images of one size"):
        gracecl.stream(f"split-shards(path={str(tmp_path)!r}, size=8)")
    (tmp_path / "something").write_text("else")
    with pytest.raises(UserError, match="is not empty"):
        gracecl.pack("digits", tmp_path, show=False)
    assert not (tmp_path / PLAN).exists()


def test_the_command_packs_checks_and_learns(tmp_path: Path) -> None:
    assert commands.gracecl("data", "pack", "digits", tmp_path / "shards").out.startswith("Data(digits: 10 classes, 1438 training")
    assert commands.gracecl("data", "check", tmp_path / "shards") == (0, f"{tmp_path / 'shards'}: complete\n", "")
    assert "holds shards already" in commands.gracecl("data", "pack", "digits", tmp_path / "shards").sentence
    assert "needs SOURCE and DEST" in commands.gracecl("data", "pack", "digits").sentence
    assert "takes one name" in commands.gracecl("data", "check", "digits", tmp_path).sentence
    assert "options of 'gracecl data pack'" in commands.gracecl("data", "check", "digits", "--size", "8").sentence


@pytest.mark.slow
def test_a_run_from_shards_has_the_record_of_one_from_memory(packed: Path, tmp_path: Path) -> None:
    common = ("--net", "mlp()", "--augment", "none", "--memory", "20", "--steps", "40")
    records = []
    for number, stream in enumerate(("split-digits(tasks=5)", f"split-shards(path={str(packed)!r}, tasks=5)")):
        assert commands.gracecl("run", "er()", "--stream", stream, "--out", tmp_path / str(number), *common).code == 0
        [record] = (tmp_path / str(number)).rglob("metrics.jsonl")
        records.append(record.read_bytes())
    assert records[0] == records[1]


@pytest.mark.slow
def test_packing_that_is_killed_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    gracecl_of_this_checkout = {**os.environ, "PYTHONPATH": str(Path(gracecl.__file__).parent.parent)}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for shards in (3, 11, 20):
        process = subprocess.Popen([sys.executable, "-c", PACKER, str(killed), "0.004"], env=gracecl_of_this_checkout)
        wait_until(lambda shards=shards: len(list(killed.glob("*-*.safetensors"))) >= shards)  # type: ignore[misc]
        process.kill()
        process.wait()
        assert (killed / PLAN).is_file()
    for place in (killed, whole):
        subprocess.run([sys.executable, "-c", PACKER, str(place), "0"], env=gracecl_of_this_checkout, check=True)
    files = sorted(file.name for file in whole.iterdir())
    assert sorted(file.name for file in killed.iterdir()) == files
    assert all((killed / name).read_bytes() == (whole / name).read_bytes() for name in files)


def picture_of(number: int) -> Any:
    """What the fixture's pictures were made of, with MosaicML's MDSWriter."""
    return np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8)


def test_mds_shards_are_packed(tmp_path: Path) -> None:
    assert "12 training and 6 test images of 3 × 6 × 5" in commands.gracecl("data", "pack", MDS_FIXTURE, tmp_path / "whole").out
    data = from_shards(tmp_path / "whole")
    for number in range(12):
        assert np.array_equal(data.train_x.loaded()[number].permute(1, 2, 0).numpy(), picture_of(number))
        assert data.train_y[number] == number % 3
    assert np.array_equal(data.test_x[5].permute(1, 2, 0).numpy(), picture_of(105))
    small = gracecl.pack(MDS_FIXTURE / "train", tmp_path / "small", test=MDS_FIXTURE / "test", size=4, show=False)
    assert small.inputs.shape == (3, 4, 4)
    said = commands.gracecl("data", "pack", MDS_FIXTURE / "train", tmp_path / "alone")
    assert "train is packed with a test set beside it: give test= (--test)" in said.sentence


def test_columns_of_mds_shards() -> None:
    for number, example in enumerate(MDS(MDS_FIXTURE / "columns")):
        assert np.array_equal(np.asarray(example["raw"]), picture_of(number)[..., 0])
        assert np.asarray(example["jpeg"]).shape == (6, 5, 3)
        assert (example["name"], example["count"], example["share"]) == (f"é{number}", 7 + number, number / 4)
        assert np.array_equal(example["array"], np.arange(6, dtype=np.int16).reshape(2, 3) + number)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"png"', '"pkl"', "the column 'image' has the MDS encoding 'pkl', which is not read here"),
        ('"compression": null', '"compression": "zstd"', "compression zstd; version 2 without compression is read"),
        ('"bytes": 913', '"bytes": 914', "has 913 bytes of 914; copy it again"),
        ('"shards"', '"pieces"', "cannot read the MDS index"),
    ],
)
def test_mds_shards_that_are_not_read(old: str, new: str, words: str, tmp_path: Path) -> None:
    shutil.copytree(MDS_FIXTURE, tmp_path / "mds")
    index = tmp_path / "mds" / "train" / INDEX
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new))
    with pytest.raises(UserError, match=words):
        gracecl.pack(tmp_path / "mds", tmp_path / "packed", show=False)


def test_damaged_mds_shards_are_named(tmp_path: Path) -> None:
    shutil.copytree(MDS_FIXTURE, tmp_path / "mds")
    shard = tmp_path / "mds" / "train" / "shard.00001.mds"
    content = bytearray(shard.read_bytes())
    content[300:] = bytes(len(content) - 300)
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"of .*shard.00001.mds cannot be read"):
        gracecl.pack(tmp_path / "mds", tmp_path / "packed", show=False)


@pytest.mark.parametrize("form", ["pairs", "dicts"])
def test_a_learner_takes_batches_of_a_streamed_source(form: str) -> None:
    """Examples that come one by one, as WebDataset's tuples and dicts; the last batch is what is left."""
    given = images(23)
    pictures = [(Image.fromarray(image), label) for image, label in given]
    dicts = [{"__key__": str(number), "png": image, "cls": label} for number, (image, label) in enumerate(pictures)]
    batches = gracecl.Batches(iter(pictures if form == "pairs" else dicts), size=10)
    assert "not exactly resumable" in repr(batches)
    assert not batches.exactly_resumable
    found = list(batches)
    assert [len(y) for _, y in found] == [10, 10, 3]
    assert np.array_equal(torch.cat([x for x, _ in found]).permute(0, 2, 3, 1).numpy(), np.stack([image for image, _ in given]))
    assert [label for _, y in found for label in y] == [label for _, label in given]
    learner = gracecl.Learner("er", net="mlp(width=4)", augment="none", memory=10)
    assert learner.fit(gracecl.Batches(pictures, size=10)).engine.progress.step == 3
    with pytest.raises(UserError, match="has no batches by number, so it cannot be continued at 2"):
        learner.fit(gracecl.Batches(pictures), start=2)


@pytest.mark.parametrize(
    ("source", "size", "words"),
    [
        (images(3), 0, "size must be a whole number of at least 1, not 0"),
        (5, 10, "batches are made of an iterable of examples, not of a int"),
        ([images(1)[0], (np.zeros((7, 7, 3), np.uint8), 0)], 2, "example 1 of the source"),
        ([{"png": images(1)[0][0]}], 2, "say which is the label with label="),
    ],
)
def test_sources_that_make_no_batches(source: Any, size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(gracecl.Batches(source, size))


def test_a_saved_hugging_face_data_set_needs_its_library(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "dataset_dict.json").write_text("{}")
    if importlib.util.find_spec("datasets") is None:
        with pytest.raises(UserError, match="needs its library: pip install datasets"):
            gracecl.pack(tmp_path / "hf", tmp_path / "packed", show=False)
    with pytest.raises(UserError, match="resize them there, or leave size out"):
        gracecl.pack(tmp_path / "hf", tmp_path / "packed", size=8, show=False)
