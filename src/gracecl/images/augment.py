"""Augmentation on the device, a batch at a time, with its own draw for every image.

A `View` is a tuple of operations. Each operation says how many random numbers an image needs (`draws`) and acts on normalised
images `[n, channels, height, width]` given those numbers `u [n, draws]`, which live on the host: which images to touch is known
there, so nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.inputs import Batched, Images, Inputs, TensorTree, leaves, plain, tree_of
from gracecl.registry import nearest
from gracecl.registry.options import OF_THE_DATA

Floats = npt.NDArray[np.float64]


NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5,), (0.5,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "none": ((0.0,), (1.0,)),
}
"""mean and std that nets were trained with elsewhere, for any number of channels or for three: `half` is that of timm's ViT-B/16,
`imagenet` that of most convolutional nets, `clip` that of CLIP, `none` leaves pixels in [0, 1]"""


def normalisation(name: str, given: Inputs) -> Inputs:
    """The images with the mean and std of their data, as they are, or with others by name; of grey ones with the mean over
    channels.
    """
    if name == OF_THE_DATA:
        return given
    if name not in NORMALISATIONS:
        known = (OF_THE_DATA, *NORMALISATIONS)
        raise UserError(f"unknown normalisation '{name}'{nearest(name, known)} (known: {', '.join(known)})")
    inputs = given.images
    channels = inputs.shape[0]
    grey = channels == 1
    mean, std = (
        value * channels if len(value) == 1 else (sum(value) / len(value),) if grey else value for value in NORMALISATIONS[name]
    )
    if len(mean) != channels:
        raise UserError(f"--normalise {name} is for images of {len(mean)} channels, not {channels}; use data, half or none")
    return Images(inputs.shape, mean, std, inputs.dtype)


class Operation(Protocol):
    @property
    def draws(self) -> int: ...

    def __call__(self, x: Any, u: Floats, inputs: Any) -> Any: ...


View = tuple[Operation, ...]


def draws(view: View) -> int:
    """Random numbers an image needs for this view."""
    return sum(operation.draws for operation in view)


def is_raw(view: View) -> bool:
    """Return whether it shows the image as it is or mirrored."""
    return all(isinstance(operation, Mirror) for operation in view)


def apply(view: View, x: Batched, u: Floats, inputs: Inputs) -> Batched:
    """The view of each image, using row i of `u` for image i."""
    used = 0
    for operation in view:
        x = operation(x, u[:, used : used + operation.draws], inputs if isinstance(operation, Own) else inputs.images)
        used += operation.draws
    return x


@dataclass(frozen=True)
class Mirror:
    """Left and right exchanged, always."""

    draws = 0

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        return x.flip(-1)


@dataclass(frozen=True)
class Rotate:
    """Turned counter-clockwise by so many quarters, always. Images must be square."""

    quarters: int
    draws = 0

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        return torch.rot90(x, self.quarters, (-2, -1))


@dataclass(frozen=True)
class TurnHalves:
    """The left half, the right half or both turned by 180 degrees where they stand; an odd middle column belongs to the right."""

    left: bool
    right: bool
    draws = 0

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        middle = x.shape[-1] // 2
        halves = ((x[..., :middle], self.left), (x[..., middle:], self.right))
        return torch.cat([half.flip(-2, -1) if turned else half for half, turned in halves], dim=-1)


@dataclass(frozen=True, eq=False)
class Blend:
    """Each image mixed with a given one: `share` of that, the rest of itself."""

    others: Tensor
    """raw images, as many as the block has"""
    share: Floats
    draws = 0

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        return torch.lerp(x, inputs.normalise(self.others).to(x), torch.from_numpy(self.share).to(x).view(-1, 1, 1, 1))


@dataclass(frozen=True)
class Flip:
    """Left and right exchanged with probability `p`."""

    p: float = 0.5
    draws = 1

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        return _replace(x, u[:, 0] < self.p, lambda some: some.flip(-1))


@dataclass(frozen=True)
class Grey:
    """With probability `p`, all three channels become 0.299 R + 0.587 G + 0.114 B of the normalised channels."""

    p: float = 0.25
    draws = 1

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        if x.shape[1] != 3:
            return x
        return _replace(x, u[:, 0] < self.p, lambda some: luminance(some).expand_as(some))


@dataclass(frozen=True)
class ResizedCrop:
    """A random window, resampled to the full size: area fraction uniform in [low, high], aspect ratio log-uniform in [3/4, 4/3].

    Ten candidates an image; the first that fits is used, the whole image if none does. Bilinear, reflecting at the border.
    """

    low: float = 0.3
    high: float = 1.0
    candidates = 10
    draws = 2 * candidates + 2

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        n, (height, width) = len(x), x.shape[-2:]
        area = self.low + (self.high - self.low) * u[:, : self.candidates]
        aspect = np.exp(math.log(3 / 4) + math.log(16 / 9) * u[:, self.candidates : 2 * self.candidates])
        w, h, fits = window_sizes(area, aspect, height, width)
        first = fits.argmax(axis=1)
        rows = np.arange(n)
        found = fits[rows, first]
        w = np.where(found, w[rows, first], width)
        h = np.where(found, h[rows, first], height)
        return crop(x, w, h, window_offset(u[:, -2], w, width), window_offset(u[:, -1], h, height))


@dataclass(frozen=True)
class PadCrop:
    """A window of the image's own size out of the image with `pad` black pixels around it."""

    pad: int = 4
    draws = 2

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        n, channels, height, width = x.shape
        padded = inputs.black.expand(n, channels, height + 2 * self.pad, width + 2 * self.pad).clone()
        padded[:, :, self.pad : self.pad + height, self.pad : self.pad + width] = x
        corner = torch.from_numpy((u * (2 * self.pad + 1)).astype(np.int64)).to(x.device)
        rows = corner[:, 0, None] + torch.arange(height, device=x.device)
        columns = corner[:, 1, None] + torch.arange(width, device=x.device)
        image = torch.arange(n, device=x.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class ColourJitter:
    """With probability `p`: brightness, contrast, saturation (factors 1 ± value) and hue (± value of a turn), in this order."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    p: float = 0.8
    draws = 5

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        touched = u[:, 0] < self.p
        spread = 2 * u[touched, 1:] - 1
        factors = 1 + spread[:, :3] * [self.brightness, self.contrast, self.saturation]
        factor = torch.from_numpy(factors).to(x)[:, :, None, None, None]
        turn = torch.from_numpy(spread[:, 3] * self.hue).to(x)[:, None, None]

        def jitter(some: Tensor) -> Tensor:
            some = (inputs.restore(some) * factor[:, 0]).clamp(0, 1)
            grey = luminance(some)
            some = torch.lerp(grey.mean(dim=(-2, -1), keepdim=True).expand_as(some), some, factor[:, 1]).clamp(0, 1)
            if some.shape[1] == 3:
                some = torch.lerp(luminance(some).expand_as(some), some, factor[:, 2]).clamp(0, 1)
                some = shift_hue(some, turn)
            return (some - inputs.mean) / inputs.std

        return _replace(x, touched, jitter)


def luminance(x: Tensor) -> Tensor:
    """[n, 1, height, width]: the weighted sum of three channels, or the only channel."""
    if x.shape[1] != 3:
        return x
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def window_sizes(area: Floats, aspect: Floats, height: int, width: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Width and height in pixels of each candidate window, and whether it fits into the image."""
    pixels = area * height * width
    w, h = np.rint(np.sqrt(pixels * aspect)), np.rint(np.sqrt(pixels / aspect))
    return w, h, (w >= 1) & (w <= width) & (h >= 1) & (h <= height)


def window_offset(u: Floats, window: Floats, size: int) -> Floats:
    """The window's centre in [-1, 1] coordinates: an integer uniform in [-(size - window), size - window], over the size."""
    room = size - window
    return (np.floor(u * (2 * room + 1)) - room) / size


def crop(x: Tensor, w: Floats, h: Floats, x_offset: Floats, y_offset: Floats) -> Tensor:
    """Each image's window of w × h pixels, resampled to the image's own size."""
    height, width = x.shape[-2:]
    nothing = np.zeros(len(w))
    affine = np.stack([w / width, nothing, x_offset, nothing, h / height, y_offset], axis=1).reshape(-1, 2, 3)
    theta = torch.from_numpy(affine).to(x.device, x.dtype)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def shift_hue(rgb: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of colours in [0, 1] by a fraction of a full circle, through hue–saturation–value and back."""
    value, strongest = rgb.max(dim=1)
    chroma = value - rgb.min(dim=1).values
    safe = torch.where(chroma == 0, torch.ones_like(chroma), chroma)
    red, green, blue = rgb.unbind(dim=1)
    sector = torch.stack([(green - blue) / safe, 2 + (blue - red) / safe, 4 + (red - green) / safe], dim=1)
    hue = (sector.gather(1, strongest[:, None])[:, 0] / 6 + turn) % 1
    # Each channel is a trapezoid over the hue circle: full, falling, empty, rising.
    offset = torch.tensor([5.0, 3.0, 1.0], device=rgb.device, dtype=rgb.dtype).view(1, 3, 1, 1)
    k = (offset + 6 * hue[:, None]) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


def mix(x: Tensor, first: Ints, second: Ints, share: Floats) -> Tensor:
    """Mixup of pairs of images, given by their rows in x: `share` of the first and the rest of the second."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        raise UserError("only numbers can be mixed, and the inputs are ids or have several parts; use a method without mixup")
    one, other = (x[torch.from_numpy(rows).to(x.device)] for rows in (first, second))
    return torch.lerp(other, one, torch.from_numpy(share).to(x).view(-1, *[1] * (x.ndim - 1)))


def unlike_pairs(labels: Ints, times: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Rows of images with different labels, to be mixed: each image with that of a random permutation, so many times."""
    first = np.tile(np.arange(len(labels)), times)
    second = np.concatenate([first[:0], *(rng.permutation(len(labels)) for _ in range(times))])
    unlike = labels[first] != labels[second]
    return first[unlike], second[unlike]


def central_shares(n: int, concentration: float, rng: np.random.Generator, low: float = 0.4, high: float = 0.6) -> Floats:
    """Shares of mixes that are drawn from Beta(concentration, concentration); 0.5 where that leaves [low, high]."""
    share = rng.beta(concentration, concentration, n)
    return np.where((share < low) | (share > high), 0.5, share)


def pair_number(a: Ints, b: Ints, n: int) -> Ints:
    """The place of the unordered pair {a, b} among those of 0, …, n - 1, in the order (0, 1), (0, 2), …, (1, 2), …"""
    low, high = np.minimum(a, b), np.maximum(a, b)
    number: Ints = low * (2 * n - low - 1) // 2 + high - low - 1
    return number


def _replace(x: Tensor, touched: npt.NDArray[np.bool_], change: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of x in which the touched images are changed."""
    rows = torch.from_numpy(np.flatnonzero(touched)).to(x.device)
    if len(rows) == 0:
        return x
    return x.index_copy(0, rows, change(x[rows]))


ROTATIONS: tuple[View, ...] = tuple(
    (*((TurnHalves(left, right),) if left or right else ()), *((Rotate(quarters),) if quarters else ()))
    for quarters in range(4)
    for left, right in ((False, False), (False, True), (True, True), (True, False))
)
"""OCM's 16 views of a square image, of which the first is the image itself: no, the right, both or the left half turned by 180
degrees, then the whole turned by 0, 90, 180 or 270"""

AUGMENTATIONS: dict[str, View] = {
    "none": (),
    "tau": (Grey(0.25), ResizedCrop(0.3, 1.0)),
    "simclr": (Flip(0.5), Grey(0.25), ResizedCrop(0.3, 1.0)),
    "full": (ResizedCrop(0.2, 1.0), Flip(0.5), ColourJitter(p=0.8), Grey(0.2)),
    "partial": (PadCrop(4), Flip(0.5)),
    "mild": (Grey(0.2), ResizedCrop(0.6, 1.0)),
    "crop": (ResizedCrop(0.05, 1.0), Flip(0.5)),
}
"""`tau` is MOSE's second view, `simclr` the same with a flip, `mild` GSA's; `partial` and `full` are the replay literature's;
`crop` is Online-LoRA's, for photographs"""


@dataclass(frozen=True)
class Own:
    """A view by a function of the user's: `f(x, generator)` of a batch as the net sees it, and a torch generator for its draws."""

    function: Callable[[Any, torch.Generator], Any]
    draws = 1

    def __call__(self, x: Batched, u: Floats, inputs: Inputs) -> Batched:
        if len(x) == 0:
            return x
        generator = torch.Generator().manual_seed(int(u[0, 0] * (1 << 53)))
        view = tree_of(self.function(plain(x), generator))
        shapes = [[leaf.shape for _, leaf in leaves(batch)] if _is_batch(batch) else [] for batch in (x, view)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"augment= returned {view!r:.80} for a batch of {len(x)} inputs; it takes (x, generator) and returns what has the "
                "shape of x"
            )
        return view


def _is_batch(x: Any) -> bool:
    return isinstance(x, TensorTree | Tensor)


def augmentation(name: str | Callable[[Any, torch.Generator], Any]) -> View:
    """The view of a name, or of a function of the user's own."""
    if callable(name):
        return (Own(name),)
    if name not in AUGMENTATIONS:
        raise UserError(f"unknown augmentation '{name}'{nearest(name, AUGMENTATIONS)} (known: {', '.join(AUGMENTATIONS)})")
    return AUGMENTATIONS[name]
