"""A memory of images as JPEG bytes: more images in the same bytes, each a little changed.

An image is compressed once, when it is stored, and decompressed whenever it is drawn; both happen on the host. Compression loses:
what is drawn is not what came. The same bytes give the same image under one version of Pillow's decoder, so resume is exact there.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.inputs import Batched, Images, Inputs
from gracecl.machine import check_room
from gracecl.memory.reservoir import BOOKKEEPING, Memory
from gracecl.rows import Numbers, Rows

QUALITY = 90
CHANNELS = (1, 3)
"""of images that JPEG knows"""


class JpegRows:
    """Slots of JPEG bytes; an empty one is a black image."""

    def __init__(self, capacity: int, inputs: Inputs) -> None:
        self.shape, self.dtype = (capacity, *inputs.shape), inputs.dtype
        self.content: list[bytes] = [b""] * capacity

    def read(self, numbers: Numbers) -> Tensor:
        found = np.zeros((len(numbers), *self.shape[1:]), np.uint8)
        for row, number in zip(found, numbers.tolist(), strict=True):
            if self.content[number]:
                pixels = np.asarray(Image.open(io.BytesIO(self.content[number]), formats=("JPEG",)))
                row[:] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return torch.from_numpy(found)


class JpegMemory(Memory):
    """Slots of compressed images: `store="jpeg(quality=90)"`."""

    def __init__(self, capacity: int, inputs: Inputs, device: torch.device | str = "cpu", quality: int = QUALITY) -> None:
        if not isinstance(inputs, Images) or inputs.dtype != torch.uint8 or inputs.shape[0] not in CHANNELS:
            raise UserError(
                f"a memory of JPEG bytes holds grey or RGB images of bytes, and the inputs are {inputs}; use --store ram"
            )
        self.quality = quality
        super().__init__(capacity, inputs, device)

    def room(self) -> Batched:
        check_room(self.capacity * BOOKKEEPING, f"the labels of a memory of {self.capacity} images", "use a smaller --memory")
        self._slots = JpegRows(self.capacity, self.inputs)
        return Rows(self._slots, device=self.device)

    def write(self, slots: Ints, where: Tensor, rows: Batched) -> None:
        for slot, image in zip(slots.tolist(), rows.cpu().numpy(), strict=True):
            self._slots.content[slot] = compressed(image, self.quality)

    def saved_images(self) -> Any:
        held = self._slots.content[: self.filled]
        sizes = np.array([len(content) for content in held], np.int64)
        return {"jpeg": torch.frombuffer(bytearray(b"".join(held) or b"\0"), dtype=torch.uint8), "sizes": sizes}

    def load_images(self, saved: Any) -> None:
        if not isinstance(saved, dict):
            slots = np.arange(self.filled)
            self.write(slots, torch.from_numpy(slots), saved)
            return
        content, ends = saved["jpeg"].numpy().tobytes(), np.cumsum(saved["sizes"]).tolist()
        for slot, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            self._slots.content[slot] = content[begin:end]


def compressed(image: Any, quality: int) -> bytes:
    """JPEG bytes of `[channels, height, width]`; colours keep their full resolution, as images here are small."""
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, subsampling=0, optimize=True)
    return file.getvalue()
