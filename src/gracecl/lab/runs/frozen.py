"""Runs on a frozen trunk: what it makes of the images is computed once, kept beside the data sets, and learned from in their place.

The numbers are those of a run that passes every image through the trunk each time, up to the rounding of the backend (1e-4 of a
feature). The memory then keeps vectors and not images.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracecl import embedding, nets, rng, streams
from gracecl.data import loading
from gracecl.data.unread import NoImages
from gracecl.engine.live import Live
from gracecl.engine.recipe import device_of, taps_for
from gracecl.methods.base import Method
from gracecl.nets import pixels
from gracecl.nets.inference import example_images, is_close
from gracecl.nets.mode import in_mode
from gracecl.nets.tapped import TappedNet
from gracecl.nets.trunk import take_options
from gracecl.registry import spec
from gracecl.registry import streams as families
from gracecl.registry.options import LIMITS
from gracecl.streams import Family, Stream
from gracecl.terminal import print_err

if TYPE_CHECKING:
    from gracecl.lab.runs.run import RunConfig

OWN = "gracecl."
"""how the modules of this package begin; what others do with images is not known"""


class Kept(NamedTuple):
    """A run's stream of features, and its net, which takes them."""

    stream: Stream
    net: TappedNet


def kept_features(config: RunConfig, data_root: str | Path | None, live: Live) -> Kept | None:
    """The features that a run can learn from in place of images; None, and a sentence why, if it cannot."""
    if config.features == "off" or not is_frozen(config, live):
        return None
    family, dataset, picked = streams.read(config.stream)
    method: Method = spec.parse_method(config.method) if live.method is None else live.method
    if why := reason_against(config, method, family, live):
        refuse(why)
        return None
    try:
        images = loading.unread(dataset, data_root, **picked)
    except NoImages:
        return None
    inputs = embedding.seen_as(images, pixels.meant(config.normalise, config.net))
    device = device_of(config.device)
    with rng.torch_seed(config.seed, "net"):
        net = nets.build(config.net, inputs.to(device), len(images.class_names), taps_for(method, config.taps)).to(device)
    if not net.backbone.reads_vectors or varies(net):
        maps = "what learns at the taps of this net looks at maps; use --taps 1"
        refuse("the trunk computes at random while it trains (dropout)" if net.backbone.reads_vectors else maps)
        return None
    file = embedding.features_of(net, embedding.name_of(config.net), images, inputs, backend=config.features, root=data_root)
    made_by = {
        "backend": file.origin.backend,
        "origin": file.origin.digest,
        "width": sum(file.widths),
        "bytes": 4 * sum(file.widths),
    }
    net.take_vectors(file.widths, made_by)
    say_once(
        f"the trunk is frozen: learning from its {sum(file.widths):,} features of each image, by {file.origin.backend}, kept in "
        f"{file.path} ('--features off' computes them in every pass)"
    )
    return Kept(family(file.data(), config.seed), net)


def is_frozen(config: RunConfig, live: Live) -> bool:
    """Whether nothing in the trunk learns, as the net's expression says it."""
    if live.net is not None:
        return False
    _, trunk = take_options(spec.parse_call(config.net))
    return trunk.freeze and not trunk.lora


def reason_against(config: RunConfig, method: Method, family: Family, live: Live) -> str:
    """Why features cannot stand in for images; empty if they can."""
    parts = [part.traits for part in method.parts]
    needs = next((part for part in method.parts if part.traits.images or part.traits.makes_inputs or part.traits.attention), None)
    if needs is not None:
        return f"{needs.name} needs the images themselves"
    if any(not type(part).__module__.startswith(OWN) for part in method.parts):
        return "a method of one's own may look at the images"
    if parts[0].trains != "never" and (config.augment != "none" or live.augment is not None):
        return "the method trains on augmented images; with --augment none they would be computed once"
    if any(getattr(config, name) for name in LIMITS):
        return "budgets count every pass"
    if config.precision != "fp32":
        return f"they are computed in {config.precision}"
    names = []
    inside: Family | None = family
    while inside is not None:
        names.append(inside.call.name)
        inside = inside.inside
    if "domain" in names or any(not families.get(name).__module__.startswith(OWN) for name in names):
        return "the stream shows images of its own making"
    return ""


def refuse(why: str) -> None:
    say_once(f"the trunk is frozen, and its features are computed in every pass: {why}")


@cache
def say_once(sentence: str) -> None:
    print_err(sentence)


def varies(net: TappedNet) -> bool:
    """Whether the trunk gives other vectors in training than in evaluation mode."""
    images = net.inputs.images
    x = images.normalise(example_images(images, 2).to(net.classifier.weight.device))
    with torch.no_grad(), rng.torch_seed(0, "dropout"):
        with in_mode(net, training=True):
            one = torch.cat(net.backbone.trunk_vectors(x), dim=1)
        with in_mode(net, training=False):
            other = torch.cat(net.backbone.trunk_vectors(x), dim=1)
    return not is_close(one, other)
