"""What a learner is made of besides its data, as plain values, and how they become an engine."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from gracecl import detectors, nets, processes, rng
from gracecl.engine import auto
from gracecl.engine.engine import Engine
from gracecl.engine.live import Live
from gracecl.errors import Misfit, UserError
from gracecl.functional import optim
from gracecl.images.augment import augmentation
from gracecl.inputs import Images, Inputs
from gracecl.memory import Memories, check_store
from gracecl.methods.base import Method
from gracecl.nets import TappedNet
from gracecl.registry import nearest, spec
from gracecl.registry.options import Layout, LearnerOptions

SAFE_CHANNELS, FEWER_CHANNELS, SMALL_IMAGE = 16, 8, 32
"""from which on channels-last is safe on every CPU; with AVX2; and with AVX-512 for images of at most so many pixels a side"""
SHARED = ("er", "derpp", "scr", "mose", "grace", "mkd", "ema", "multi_update", "mirrored", "best", "closed")
"""parts of learners whose losses in several processes a test compares with those in one; slda and its kind are closed(...)"""
SMALLEST_CROPPED = 16
"""pixels a side below which a random crop leaves too little of an image"""
LOOKED_AT = 100_000
"""pixels, at least, if there are as many"""
GPUS = ("cuda", "mps", "xpu")
"""kinds of devices beside the CPU: NVIDIA's and AMD's, Apple's, Intel's"""
MOST_OF_ONE_VALUE = 0.25
"""of the pixels of photographs: in CIFAR-100, Tiny-ImageNet and CUB it is below 0.08, in digits and clothes on black above 0.34"""


@dataclass(frozen=True)
class Recipe(LearnerOptions):
    """What makes a learner, besides its data. Equal recipes and data give equal results to the bit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", auto.meant(self.method, self.net))
        super().__post_init__()

    def check(self, live: Live) -> Method:
        """Refuse names and expressions that mean nothing, before anything is built; return the method.

        `live` are objects that stand in place of expressions; those that no expression names must be among them.
        """
        live.check("the learner", vars(self), "give it as {name}=")
        if live.net is None:
            nets.check(self.net)
        if live.augment is None:
            augmentation(self.augment)
        if live.optimizer is None:
            optim.check(self.optimizer)
        if live.scheduler is None and self.scheduler is not None:
            optim.scheduler(self.scheduler)
        detectors.build(self.boundaries)
        device_of(self.device)
        check_store(self.store)
        method: Method = spec.parse_method(self.method) if live.method is None else live.method
        if any(part.in_use for part in method.parts):
            raise UserError(f"{method!r} is the method of another learner, whose state it holds; make another object for this one")
        return method

    def build(self, inputs: Inputs, classes: int, live: Live | None = None, folder: Path | None = None) -> Engine:
        """The engine for such inputs, at its first step; `folder` is where a memory on disk lies."""
        live = live or Live()
        method, device = self.check(live), device_of(self.device)
        inputs = inputs.to(device)
        with rng.torch_seed(self.seed, "net"):
            net = nets.build(self.net if live.net is None else live.net, inputs, classes, taps_for(method, self.taps)).to(device)
        net = net.to(memory_format=memory_format(self.layout, net, device, max(inputs.shape[1:], default=1)))  # type: ignore[call-overload]
        if processes.count() > 1 and self.sharing != "off":
            self._check_shared(method)
            net.sharing = self.sharing
        elif processes.count() > 1 and self.store.startswith("sharded"):
            raise UserError(
                "a sharded memory is spread over processes that learn as one, and with sharing='off' each learns by itself; "
                "use --store ram"
            )
        if self.cuda_graphs:
            if device.type != "cuda":
                raise UserError(f"--cuda-graphs needs a GPU, and this learner is on the {device.type}; leave it out")
            net.backbone.compile(mode="reduce-overhead")
        elif self.compile:
            functorch.donated_buffer = False  # a graph is gone through twice where a gradient that is not finite is traced
            net.backbone.compile()
        memories = Memories(self.memory, inputs, device, self.store, folder)
        return Engine(
            method,
            net,
            memories,
            seed=self.seed,
            augmentation=live.augment or augment_for(self.augment, inputs),
            optimizer=self.optimizer if live.optimizer is None else live.optimizer,
            scheduler=self.scheduler if live.scheduler is None else live.scheduler,
            scheduler_step=self.scheduler_step,
            precision=self.precision,
            detector=detectors.build(self.boundaries),
        )

    def _check_shared(self, method: Method) -> None:
        """Refuse what several processes cannot do together."""
        if unknown := [part.name for part in method.parts if part.name not in SHARED]:
            raise UserError(
                f"{unknown[0]} was not shown to learn in several processes what it learns in one; use one process (--nproc 1), "
                f"or a learner made of {', '.join(SHARED)}"
            )
        for option, given in {"compile": self.compile, "cuda_graphs": self.cuda_graphs}.items():
            if given:
                raise UserError(f"{option} is for one process, and this learner is in a group of {processes.count()}; leave it out")
        if self.store.startswith("disk"):
            raise UserError("a memory on disk belongs to one process, and this learner is in a group; use --store sharded or ram")


def augment_for(augment: str, inputs: Inputs) -> str:
    """The default augmentation is for images; other inputs are shown as they are."""
    return "none" if augment == LearnerOptions.augment and not isinstance(inputs, Images) else augment


def shows_default(augment: str, method: Method) -> bool:
    """Whether the method trains on images in the default augmentation."""
    return augment == LearnerOptions.augment and method.chain.traits.trains != "never"


def name_unfit_augmentation(augment: str, method: Method, inputs: Inputs) -> None:
    """Say that images are too small for the default augmentation, which a method that trains shows them in."""
    shape = inputs.shape
    if isinstance(inputs, Images) and min(shape[1:]) < SMALLEST_CROPPED and shows_default(augment, method):
        warnings.warn(
            f"images of {shape[1]} × {shape[2]} pixels are too small for the crops of the default augmentation '{augment}', which "
            "cost accuracy there; give augment='none' (--augment none)",
            Misfit,
            stacklevel=3,
        )


def name_flat_images(augment: str, method: Method, examples: Any) -> None:
    """Say that the first raw images do not look like photographs, for which the default augmentation was made."""
    of_images = isinstance(examples, Tensor) and examples.ndim == 4 and min(examples.shape[-2:]) >= SMALLEST_CROPPED
    if not of_images or not shows_default(augment, method):
        return
    values = examples.flatten()
    values = values[:: max(1, len(values) // LOOKED_AT)]
    share = float(values.unique(return_counts=True)[1].max() / len(values))
    if share > MOST_OF_ONE_VALUE:
        warnings.warn(
            f"{share:.0%} of the pixels have one value, as in characters or drawings and not in photographs, for which the default "
            f"augmentation '{augment}' was made; compare with augment='none' (--augment none)",
            Misfit,
            stacklevel=3,
        )


def taps_for(method: Method, taps: int | None) -> int | None:
    """`taps = auto`: the paper's four where the method works on layers, else the last alone."""
    return taps if taps is not None or method.chain.traits.all_taps else 1


def memory_format(layout: Layout, net: TappedNet, device: torch.device, side: int) -> torch.memory_format:
    """The layout of the net's weights, which its maps take on; the images have `side` pixels a side.

    Channels-last convolutions are faster by a fifth to a third on CPUs. But oneDNN as of PyTorch 2.13 writes outside its buffers in
    the backward pass of strided 1×1 convolutions with few channels in that layout: fewer than 8 with AVX2, and fewer than 16 with
    AVX-512 where maps have 64 pixels a side and more. Up to 40 the heap checker finds nothing there at any number of channels; 8 is
    asked for in small images, so that both kinds of CPU give a net the same layout.
    """
    if layout == "contiguous" or (layout == "auto" and device.type != "cpu"):
        return torch.contiguous_format
    strided = [
        part for part in net.modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1) and part.stride != (1, 1)
    ]
    kind = torch.backends.cpu.get_cpu_capability()
    fewest = FEWER_CHANNELS if kind == "AVX2" or (kind == "AVX512" and side <= SMALL_IMAGE) else SAFE_CHANNELS
    if device.type == "cuda" or all(part.in_channels >= fewest for part in strided):
        return torch.channels_last
    if layout == "auto":
        return torch.contiguous_format
    raise UserError(
        f"--layout channels_last is unsafe on this CPU with fewer than {fewest} channels in images of {side} pixels; "
        "use a wider net or --layout auto"
    )


def layout_of(net: nn.Module) -> Layout:
    """What a built net's maps take on, which an `auto` may be another time on another CPU."""
    kernels = [part.weight for part in net.modules() if isinstance(part, nn.Conv2d) and part.weight[0, 0].numel() > 1]
    last = any(kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous() for kernel in kernels)
    return "channels_last" if last else "contiguous"


def device_of(name: str) -> torch.device:
    """Return the device of this name, which this machine must have."""
    device = named_device(name)
    if device.type != "cpu" and not is_available(device.type):
        what = "GPU" if device.type == "cuda" else f"device of the kind {device.type}"
        raise UserError(f"device '{name}' was asked for, but this PyTorch sees no {what}; use --device cpu")
    return device


def named_device(name: str) -> torch.device:
    """Return the device of this name, which another machine may have; auto is the best of this one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device '{name}'{nearest(name, ['cpu', *GPUS])}; use cpu, {', '.join(GPUS)} or cuda:1") from None
    if device.type not in ("cpu", *GPUS):
        raise UserError(f"cannot learn on the device '{name}'; use cpu, {', '.join(GPUS[:-1])} or {GPUS[-1]}")
    return device


def is_available(kind: str) -> bool:
    """Whether PyTorch has such a device here."""
    return bool((torch.backends.mps if kind == "mps" else getattr(torch, kind)).is_available())
