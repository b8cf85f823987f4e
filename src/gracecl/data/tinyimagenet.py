"""Tiny-ImageNet: 200 classes of ImageNet at 64 px (Stanford CS231n, 2015)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gracecl.data.source import Archive, Contents, Source, contents_of_files, missing_files, some
from gracecl.errors import UserError
from gracecl.registry import datasets

SIDE = 64
TRAIN_EACH, TEST_EACH = 500, 50

Rows = list[tuple[Path, str]]
"""(image, WordNet id)"""


@datasets.register("tinyimagenet")
class TinyImageNet(Source):
    """Tiny-ImageNet: 100,000 + 10,000 colour images of 64 px, 200 classes; the official validation set is the test set.

    Classes are numbered in the order of their WordNet ids. A copy with some of the classes works, with these classes.
    """

    name = "tinyimagenet"
    folder = "tiny-imagenet-200"
    classes = 200
    size = SIDE
    tasks = 10
    mean = (0.4802, 0.4480, 0.3975)
    std = (0.2770, 0.2691, 0.2821)
    archives = (
        Archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        ),
    )

    def files(self, folder: Path) -> list[Path]:
        train, test = self._images(folder)
        if missing := missing_files([path for path, _ in test]):
            raise UserError(f"{missing[0]} is missing: move {folder} away and run 'gracecl data get {self.name}'")
        if not train or not test:
            raise UserError(f"{folder} has no training or no validation images: run 'gracecl data check {self.name}'")
        texts = [folder / "val" / "val_annotations.txt", folder / "words.txt"]
        return [path for path, _ in (*train, *test)] + [path for path in texts if path.is_file()]

    def read(self, folder: Path) -> Contents:
        train, test = self._images(folder)
        return contents_of_files(train, test, sorted({wnid for _, wnid in train}), self._words(folder), SIDE)

    def problems(self, folder: Path) -> list[str]:
        train, test = self._train_files(folder), self._annotated(folder)
        found = []
        for part, rows, each in (("training", train, TRAIN_EACH), ("validation", test, TEST_EACH)):
            counts = Counter(wnid for _, wnid in rows)
            if absent := [wnid for wnid in WORDNET_IDS if wnid not in counts]:
                found.append(f"{len(absent)} of {self.classes} classes have no {part} images: {some(absent)}")
            if wrong := [f"{wnid} has {count} of {each}" for wnid, count in sorted(counts.items()) if count != each]:
                found.append(f"{len(wrong)} classes have the wrong number of {part} images: {some(wrong)}")
        if missing := missing_files([path for path, _ in test]):
            found.append(f"{len(missing)} validation images are missing: {some([path.name for path in missing])}")
        return found

    def _images(self, folder: Path) -> tuple[Rows, Rows]:
        """Training images, and validation images of the same classes."""
        train = self._train_files(folder)
        present = {wnid for _, wnid in train}
        return train, [(path, wnid) for path, wnid in self._annotated(folder) if wnid in present]

    def _train_files(self, folder: Path) -> Rows:
        """Classes in official order, images by name."""
        return [(path, wnid) for wnid in WORDNET_IDS for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))]

    def _annotated(self, folder: Path) -> Rows:
        notes = folder / "val" / "val_annotations.txt"
        if not notes.is_file():
            raise UserError(f"{notes} is missing: move {folder} away and run 'gracecl data get {self.name}'")
        lines = notes.read_text(encoding="utf-8", errors="replace").splitlines()
        rows = [line.split("\t") for line in lines if line.strip()]
        if any(len(row) < 2 or row[1] not in WORDNET_IDS for row in rows):
            raise UserError(f"{notes} is damaged: it must name an image and its WordNet id on each line")
        return [(folder / "val" / "images" / Path(row[0]).name, row[1]) for row in rows]

    def _words(self, folder: Path) -> dict[str, str]:
        """WordNet id -> English; the set works without."""
        words = folder / "words.txt"
        lines = words.read_text(encoding="utf-8", errors="replace").splitlines() if words.is_file() else []
        return {wnid: text.split(",")[0].strip() for wnid, tab, text in (line.partition("\t") for line in lines) if tab}


LISTED = """
n01443537 n01629819 n01641577 n01644900 n01698640 n01742172 n01768244 n01770393 n01774384 n01774750 n01784675 n01855672
n01882714 n01910747 n01917289 n01944390 n01945685 n01950731 n01983481 n01984695 n02002724 n02056570 n02058221 n02074367
n02085620 n02094433 n02099601 n02099712 n02106662 n02113799 n02123045 n02123394 n02124075 n02125311 n02129165 n02132136
n02165456 n02190166 n02206856 n02226429 n02231487 n02233338 n02236044 n02268443 n02279972 n02281406 n02321529 n02364673
n02395406 n02403003 n02410509 n02415577 n02423022 n02437312 n02480495 n02481823 n02486410 n02504458 n02509815 n02666196
n02669723 n02699494 n02730930 n02769748 n02788148 n02791270 n02793495 n02795169 n02802426 n02808440 n02814533 n02814860
n02815834 n02823428 n02837789 n02841315 n02843684 n02883205 n02892201 n02906734 n02909870 n02917067 n02927161 n02948072
n02950826 n02963159 n02977058 n02988304 n02999410 n03014705 n03026506 n03042490 n03085013 n03089624 n03100240 n03126707
n03160309 n03179701 n03201208 n03250847 n03255030 n03355925 n03388043 n03393912 n03400231 n03404251 n03424325 n03444034
n03447447 n03544143 n03584254 n03599486 n03617480 n03637318 n03649909 n03662601 n03670208 n03706229 n03733131 n03763968
n03770439 n03796401 n03804744 n03814639 n03837869 n03838899 n03854065 n03891332 n03902125 n03930313 n03937543 n03970156
n03976657 n03977966 n03980874 n03983396 n03992509 n04008634 n04023962 n04067472 n04070727 n04074963 n04099969 n04118538
n04133789 n04146614 n04149813 n04179913 n04251144 n04254777 n04259630 n04265275 n04275548 n04285008 n04311004 n04328186
n04356056 n04366367 n04371430 n04376876 n04398044 n04399382 n04417672 n04456115 n04465501 n04486054 n04487081 n04501370
n04507155 n04532106 n04532670 n04540053 n04560804 n04562935 n04596742 n04597913 n06596364 n07579787 n07583066 n07614500
n07615774 n07695742 n07711569 n07715103 n07720875 n07734744 n07747607 n07749582 n07753592 n07768694 n07871810 n07873807
n07875152 n07920052 n09193705 n09246464 n09256479 n09332890 n09428293 n12267677
"""
WORDNET_IDS = tuple(LISTED.split())
