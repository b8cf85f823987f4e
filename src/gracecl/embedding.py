"""Features as data: what a net makes of each image of a data set, computed once and kept in a file."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from gracecl import nets, rng, streams
from gracecl.data import loading
from gracecl.data.dataset import Data
from gracecl.data.features import UNKNOWN, FeatureFile, FeatureWriter, NumberFormat, Origin, digest_of_images
from gracecl.data.locations import cache_folder, data_root
from gracecl.data.pixels import BLOCK, Pixels
from gracecl.data.progress import progress as shown_progress
from gracecl.data.unread import Unread
from gracecl.errors import UserError
from gracecl.files import Digest, as_path
from gracecl.images.augment import normalisation
from gracecl.inputs import Images
from gracecl.nets import pixels
from gracecl.nets.inference import Backend, Inference, backends, digest_of_trunk
from gracecl.nets.tapped import TappedNet
from gracecl.nets.trunk import take_options
from gracecl.registry import datasets as known_sets
from gracecl.registry import normal, objects, spec
from gracecl.registry.options import BY_THE_NET
from gracecl.registry.spec import AtLeast
from gracecl.streams import Stream

log = logging.getLogger(__name__)


def embed(
    net: str | nn.Module | Callable[[], nn.Module],
    data: str | Data | Stream,
    *,
    out: str | Path | None = None,
    size: Annotated[int, AtLeast(1)] | None = None,
    taps: Annotated[int, AtLeast(1)] = 1,
    normalise: str = BY_THE_NET,
    precision: NumberFormat = "single",
    backend: Backend = "auto",
    seed: Annotated[int, AtLeast(0)] = 0,
    root: str | Path | None = None,
    progress: bool = True,
) -> Data:
    """The features that a net makes of a data set's images, as a data set of vectors with the same labels.

    >>> features = gracecl.embed("resnet18(width=8)", "digits", out="digits.feat")     # or "efficientnet_lite0" and your data
    >>> gracecl.Learner("slda", net="identity()").fit(gracecl.stream(features, tasks=5))

    `net` is an expression, as in `gracecl list nets`, or a module; it computes in evaluation mode and does not learn. `data` is a
    data set, a stream, or the text of one: `cifar100`, `split-cifar100(size=128)`, a folder of images. The images are enlarged or
    reduced to `size` pixels a side while they are read. `taps` counts the tapped layers from the last, whose vectors then stand
    side by side; which layers these are, nets such as `timm(...)` are told by `at=[...]`. `normalise` is as in a run: what a
    pretrained net was trained with, else the mean and std of the data; or `data`, `imagenet`, `half`, `clip`, `none`.

    The features go to the file `out`, or into the cache beside the data sets, and are mapped from there. If the program is killed,
    the same call goes on where it was; if the file is complete, it is opened. `backend` is ONNX Runtime where it is installed
    (`pip install 'gracecl[fast]'`), else PyTorch. `seed` draws the weights of a net that is not pretrained.
    """
    spec.check_options(
        embed,
        "embed",
        {"size": size, "taps": taps, "normalise": normalise, "precision": precision, "backend": backend, "seed": seed},
    )
    images = unread(data, size, root)
    inputs = seen_as(images, pixels.meant(normalise, net))
    with rng.torch_seed(seed, "net"):
        built = nets.build(net, inputs, 0, taps)
    file = None if out is None else as_path(out, "out").expanduser().resolve()
    return features_of(built, name_of(net), images, inputs, file, precision, backend, root, progress).data()


def features_of(
    net: TappedNet,
    name: str,
    images: Unread,
    inputs: Images,
    file: Path | None = None,
    precision: NumberFormat = "single",
    backend: Backend = "auto",
    root: str | Path | None = None,
    progress: bool = True,
) -> FeatureFile:
    """The vectors of a net's trunk, from the file if it is complete; else computed into it. Without a file, one in the cache."""
    cache, (mean, std) = cache_folder(data_root(root)), inputs.statistics
    known = Origin(name, digest_of_trunk(net.backbone), UNKNOWN, inputs.shape, mean, std, "", precision)
    origins = [replace(known, backend=name) for name in backends(backend, net.classifier.weight.device)]
    if (ready := finished(file, origins, images, cache)) is not None:
        return ready
    inference = Inference(net, inputs, backend, cache)
    origin = replace(known, backend=inference.backend)
    writer = FeatureWriter(file or cached_file(cache, images, origin), images, origin, inference.widths)
    with writer.alone():
        if (ready := finished(file, [origin], images, cache)) is not None:
            writer.forget()
            return ready
        begin = writer.begin()
        with shown_progress(f"features by {inference.backend}", writer.total, done=writer.done, show=progress) as advance:
            for block in read_meanwhile(itertools.islice(blocks(images, begin), len(writer.sizes) - begin)):
                writer.add(inference(block), digest_of_images(block))
                advance(len(block))
        return writer.finish()


def finished(file: Path | None, origins: list[Origin], images: Unread, cache: Path) -> FeatureFile | None:
    """The complete file of one of these origins; a file that is named and holds others is refused."""
    places = [cached_file(cache, images, origin) if file is None else file for origin in origins]
    for origin, place in zip(origins, places, strict=True):
        if not place.exists():
            continue
        try:
            found = FeatureFile.open(place)
        except UserError as error:
            if file is not None:
                raise
            log.warning("%s; they are computed again", error)
            place.unlink()
            continue
        if file is None or found.about["request"]["backend"] == origin.backend or origin is origins[-1]:
            return found.check(origin.request(images.key))
    return None


def cached_file(cache: Path, images: Unread, origin: Origin) -> Path:
    """The file in the cache for features of this origin."""
    key = Digest().add(json.dumps(origin.request(images.key)).encode())
    return cache / f"features-{images.name}-{images.inputs.shape[1]}px-{key}.safetensors"


def blocks(images: Unread, begin: int) -> Iterator[Any]:
    """The images in blocks, training images first, without the first `begin` blocks."""

    def of(pixels: Pixels, skipped: int) -> Iterator[Any]:
        return pixels.blocks(images.extent, skipped * BLOCK)

    in_training = -(-len(images.train) // BLOCK)
    return itertools.chain(of(images.train, begin), of(images.test, max(0, begin - in_training)))


def read_meanwhile(images: Iterator[Any]) -> Iterator[Any]:
    """The same blocks; a thread reads the next one while this one is in use."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, images, None)
        while (block := coming.result()) is not None:
            coming = reader.submit(next, images, None)
            yield block


def unread(data: str | Data | Stream, size: int | None, root: str | Path | None) -> Unread:
    """The images of what is given, not decoded where they need not be."""
    if isinstance(data, Stream):
        data = data.data
    if isinstance(data, Data):
        return Unread.of(data, size)
    if not isinstance(data, str):
        raise UserError(f"data is a data set, a stream or the text of one, not a {type(data).__name__}")
    picked: dict[str, Any] = {}
    if data.startswith(loading.PLACES) or normal(data) in known_sets.names():
        name = data
    elif Path(data).expanduser().is_dir():
        name = f"{loading.FOLDER}{data}"
    elif "/" in data and "(" not in data:
        raise UserError(f"there is no folder {data}; give a data set, a stream or a folder with a folder of images for each class")
    else:
        _, name, picked = streams.read(data)
    if size is not None and "size" in picked:
        raise UserError("size is given twice, in the stream and as an option; leave one of them out")
    return loading.unread(name, root, **(picked if size is None else picked | {"size": size}))


def seen_as(images: Unread, normalise: str) -> Images:
    """What the net gets of an image."""
    return normalisation(normalise, images.inputs).images


def name_of(net: str | nn.Module | Callable[[], nn.Module]) -> str:
    """A net's expression without the options of its trunk, which do not show in its features; or what an object calls itself."""
    if not isinstance(net, str):
        return objects.name_of(net)
    call, _ = take_options(spec.parse_call(net))
    options = [*map(repr, call.args), *(f"{name}={value!r}" for name, value in call.kwargs.items())]
    return f"{normal(call.name)}({', '.join(options)})"
