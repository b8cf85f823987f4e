"""CUB-200-2011. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, 2011."""

from __future__ import annotations

from pathlib import Path

from gracecl.data.source import Archive, Contents, Source, contents_of_files, missing_files, some
from gracecl.errors import UserError
from gracecl.registry import datasets

CROP, SHORTER_SIDE = 224, 256
TRAIN_IMAGES, TEST_IMAGES = 5_994, 5_794


@datasets.register("cub200")
class Cub200(Source):
    """CUB-200-2011: 5,994 + 5,794 photographs of birds at 224 px, 200 classes; the shorter side is scaled to 256 first.

    At another size the same part of the picture is kept: the shorter side is scaled to 256/224 of it. A copy with some
    of the classes works, with these classes.
    """

    name = "cub200"
    folder = "CUB_200_2011"
    classes = 200
    size = CROP
    tasks = 10
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)
    archives = (
        Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
        ),
    )

    def files(self, folder: Path) -> list[Path]:
        images = [path for path, _, _ in self._images(folder)]
        if missing := missing_files(images):
            raise UserError(f"{missing[0]} is missing: move {folder} away and run 'gracecl data get {self.name}'")
        if not images:
            raise UserError(f"{folder / 'images'} has no images: move {folder} away and run 'gracecl data get {self.name}'")
        tables = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
        return images + [folder / table for table in tables]

    def read(self, folder: Path) -> Contents:
        images = self._images(folder)
        names = self._table(folder, "classes.txt")
        present = sorted({label for _, label, _ in images}, key=int)
        train, test = ([row[:2] for row in images if row[2] == part] for part in ("1", "0"))
        if not train or not test:
            raise UserError(f"{folder / 'train_test_split.txt'} leaves no image for training or none for testing")
        return contents_of_files(train, test, present, names, CROP, SHORTER_SIDE / CROP)

    def problems(self, folder: Path) -> list[str]:
        found = []
        names = self._table(folder, "classes.txt")
        if len(names) < self.classes:
            found.append(f"{folder / 'classes.txt'} names {len(names)} of {self.classes} classes")
        if absent := [name for name in names.values() if not (folder / "images" / name).is_dir()]:
            found.append(f"{len(absent)} of {self.classes} classes have no folder of images: {some(absent)}")
        images = self._images(folder)
        if missing := missing_files([path for path, _, _ in images]):
            found.append(f"{len(missing)} images are missing: {some([path.name for path in missing])}")
        for what, part, expected in (("training", "1", TRAIN_IMAGES), ("test", "0", TEST_IMAGES)):
            count = sum(split == part for _, _, split in images)
            if count != expected:
                found.append(f"there are {count:,} {what} images instead of {expected:,}")
        return found

    def _images(self, folder: Path) -> list[tuple[Path, str, str]]:
        """(image, number of its class, "1" for training) of the classes whose folders are there, in official order."""
        paths, labels, parts = (
            self._table(folder, table) for table in ("images.txt", "image_class_labels.txt", "train_test_split.txt")
        )
        if not paths.keys() == labels.keys() == parts.keys() or not all(label.isdecimal() for label in labels.values()):
            raise UserError(f"images.txt, image_class_labels.txt, train_test_split.txt in {folder} do not agree")
        if escaping := [path for path in paths.values() if ".." in Path(path).parts or Path(path).is_absolute()]:
            raise UserError(f"{folder / 'images.txt'} names a file outside the data set: {escaping[0]}")
        there = {path.name for path in (folder / "images").glob("*") if path.is_dir()}
        return [(folder / "images" / path, labels[row], parts[row]) for row, path in paths.items() if path.split("/")[0] in there]

    def _table(self, folder: Path, name: str) -> dict[str, str]:
        """The first word of each line -> the rest of it."""
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: move {folder} away and run 'gracecl data get {self.name}'")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        rows = (line.partition(" ") for line in lines if line.strip())
        return {key: rest.strip() for key, _, rest in rows}
