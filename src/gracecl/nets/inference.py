"""A net that does not learn, as a fast function of raw images: ONNX Runtime where it is installed, else PyTorch.

The net gets so many images at once that its maps stay in a core's caches; the number follows from the net and the size of the
images alone, not from the machine. ONNX Runtime computes as many such batches side by side as there are threads. PyTorch gets the
net with its batch norms folded into the convolutions before them, and with channels last. Both give the net's features to 1e-4 of
their size, which is compared on made-up images first.
"""

from __future__ import annotations

import copy
import importlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gracecl.errors import UserError
from gracecl.files import Digest, replacing
from gracecl.inputs import Images
from gracecl.nets.batches import batch_for
from gracecl.nets.tapped import Backbone, BatchNorm, TappedNet
from gracecl.rng import torch_seed

log = logging.getLogger(__name__)

Backend = Literal["auto", "torch", "onnx"]
Floats = npt.NDArray[np.float32]
TOLERANCE = 1e-4
"""by which features of a backend may differ from PyTorch's, as a part of the largest"""
FOLDED = (nn.BatchNorm2d, BatchNorm)
"""batch norms that do nothing else; those of other libraries may hold an activation"""


class Vectors(nn.Module):
    """Raw images → the vectors of a net's taps, side by side, `[B, Σ widths]`."""

    def __init__(self, backbone: Backbone, inputs: Images) -> None:
        super().__init__()
        self.backbone, self.inputs = backbone, inputs

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat(self.backbone.trunk_vectors(self.inputs.normalise(images)), dim=1)


class Compute(Protocol):
    """Images of a whole batch → features, from any thread."""

    def __call__(self, images: Tensor) -> Tensor: ...


class Inference:
    """The features of raw images, computed in batches by a backend."""

    def __init__(self, net: TappedNet, inputs: Images, backend: Backend = "auto", keep: Path | None = None) -> None:
        """`keep` is a folder for programs of ONNX Runtime, which are made once for each net."""
        wanted = backends(backend, net.classifier.weight.device)
        self.device = net.classifier.weight.device
        vectors = Vectors(copy.deepcopy(net.backbone), inputs.to(self.device)).eval().requires_grad_(False)
        example = vectors.inputs.normalise(inputs.blank(2, self.device))
        with torch.inference_mode():
            self.batch = batch_for(vectors.backbone, example)
            self.widths = tuple(value.shape[1] for value in vectors.backbone.trunk_vectors(example))
            self.backend, self.compute = f"torch {torch.__version__}", as_torch(vectors, inputs)
        self.side_by_side = 1
        """batches that are computed at a time; PyTorch gives all of its threads to one"""
        if wanted[0] != self.backend:
            self._use_onnx(vectors, inputs, keep, required=backend == "onnx")

    def _use_onnx(self, vectors: Vectors, inputs: Images, keep: Path | None, required: bool) -> None:
        """Take ONNX Runtime, or say why not."""
        runtime = importlib.import_module("onnxruntime")
        try:
            self.compute = as_onnx(vectors, inputs, self.batch, runtime, keep)
            self.backend, self.side_by_side = f"onnxruntime {runtime.__version__}", torch.get_num_threads()
        except Exception as error:  # noqa: BLE001 (whatever an exporter does not know)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if required:
                raise UserError(f"this net cannot be computed by ONNX Runtime ({reason}); use backend 'torch'") from None
            log.warning("features are computed by PyTorch, as ONNX Runtime cannot compute this net (%s)", reason)

    def __call__(self, images: npt.NDArray[Any]) -> Floats:
        """float32 [B, Σ widths] of `[B, channels, height, width]`."""
        out = np.empty((len(images), sum(self.widths)), np.float32)

        def fill(start: int) -> None:
            some = torch.from_numpy(np.ascontiguousarray(images[start : start + self.batch]))
            count = len(some)
            if count < self.batch:  # a batch is always full, so that the sums in it are always the same
                some = torch.cat([some, some.new_zeros(self.batch - count, *some.shape[1:])])
            with torch.inference_mode():
                out[start : start + count] = self.compute(some)[:count].cpu().numpy()

        starts = range(0, len(images), self.batch)
        if self.side_by_side == 1:
            list(map(fill, starts))
        else:
            with ThreadPoolExecutor(self.side_by_side) as pool:
                list(pool.map(fill, starts))
        return out


def backends(backend: Backend, device: torch.device) -> list[str]:
    """What may compute features here, with its version, the preferred one first. Which one does, `Inference` says."""
    if backend not in get_args(Backend):
        raise UserError(f"backend must be one of {', '.join(get_args(Backend))}, not {backend!r}")
    by_torch = [f"torch {torch.__version__}"] if backend != "onnx" else []
    if backend == "torch" or device.type != "cpu":
        return by_torch
    try:
        importlib.import_module("onnx")
        return [f"onnxruntime {importlib.import_module('onnxruntime').__version__}", *by_torch]
    except ImportError as error:
        if backend == "onnx":
            raise UserError(f"backend 'onnx' needs {error.name}; install it with: pip install 'gracecl[fast]'") from None
        log.info("features are computed by PyTorch; ONNX Runtime is faster: pip install 'gracecl[fast]'")
        return by_torch


def digest_of_trunk(backbone: Backbone) -> str:
    """Of all that the vectors of a backbone's taps depend on: parameters and buffers by name, and what the modules are."""
    of_taps = {id(value) for part in backbone.tap_parts() for value in (*part.parameters(), *part.buffers())}
    state = {name: value for name, value in backbone.state_dict(keep_vars=True).items() if id(value) not in of_taps}
    return digest_of_tensors(state if backbone.reads_vectors else backbone.state_dict())


def digest_of_tensors(tensors: dict[str, Tensor]) -> str:
    digest = Digest()
    for name, value in sorted(tensors.items()):
        digest.add(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.add(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data if value.numel() else b"")
    return str(digest)


# PyTorch.


def as_torch(vectors: Vectors, inputs: Images) -> Compute:
    """The net with folded batch norms and, on a CPU, channels last."""
    folded = with_folded_norms(vectors, inputs)
    device = next((value.device for value in vectors.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        folded = folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return lambda images: folded(images.to(device))


def with_folded_norms(vectors: Vectors, inputs: Images) -> Vectors:
    """A copy in which convolutions do what the batch norms behind them did; the net itself, if that changes what it computes."""
    folded = copy.deepcopy(vectors)
    example = example_images(inputs, 2)
    for convolution, norm in convolutions_with_norms(folded, example):
        fused = fuse_conv_bn_eval(folded.get_submodule(convolution), folded.get_submodule(norm))  # type: ignore[type-var, arg-type]
        folded.set_submodule(convolution, fused)
        folded.set_submodule(norm, nn.Identity())
    return folded if is_close(folded(example), vectors(example)) else vectors


def convolutions_with_norms(module: nn.Module, example: Tensor) -> list[tuple[str, str]]:
    """Names of convolutions and of the batch norms that are given what they return; both run once in a forward pass."""
    made: dict[int, tuple[str, Tensor]] = {}
    pairs: list[tuple[str, str]] = []
    runs: dict[str, int] = {}

    def look(name: str) -> Any:
        def hook(part: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            runs[name] = runs.get(name, 0) + 1
            if isinstance(part, nn.Conv2d):
                made[id(output)] = name, output  # which is kept, so that no other tensor gets its place
            elif id(given[0]) in made and part.track_running_stats:
                pairs.append((made[id(given[0])][0], name))

        return hook

    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Conv2d) or type(part) in FOLDED]
    hooks = [part.register_forward_hook(look(name)) for name, part in parts]
    try:
        module(example)
    finally:
        for hook in hooks:
            hook.remove()
    return [pair for pair in pairs if all(runs[name] == 1 for name in pair)]


# ONNX Runtime.


def as_onnx(vectors: Vectors, inputs: Images, batch: int, runtime: Any, keep: Path | None) -> Compute:
    """The net as a program of ONNX Runtime for batches of this size, compared with the net itself."""
    program = exported(vectors, inputs, batch, keep)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1  # threads get batches of their own, and none waits for another
    options.log_severity_level = 3
    session = runtime.InferenceSession(program, options, providers=["CPUExecutionProvider"])

    def compute(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    example = example_images(inputs, batch)
    with torch.inference_mode():
        if not is_close(compute(example), vectors(example)):
            raise ValueError("its features differ from PyTorch's")
    return compute


def exported(vectors: Vectors, inputs: Images, batch: int, keep: Path | None) -> bytes:
    """The program in ONNX, from the folder `keep` if it is there."""
    about = f"{torch.__version__} {vectors!r} {inputs.shape} {inputs.statistics} {batch} {digest_of_tensors(vectors.state_dict())}"
    file = None if keep is None else keep / f"net-{Digest().add(about.encode())}.onnx"
    if file is not None and file.is_file():
        return file.read_bytes()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad(), quiet_exporter():
        warnings.simplefilter("ignore")  # of the exporter's own parts, and of sizes that become constants
        written, example = Path(folder) / "net.onnx", example_images(inputs, batch)
        torch.onnx.export(vectors, (example,), written, input_names=["images"], output_names=["features"], dynamo=False)
        program = written.read_bytes()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_bytes(program)
    return program


@contextmanager
def quiet_exporter() -> Iterator[None]:
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        yield
    finally:
        exporter.setLevel(before)


# Comparing.


def example_images(inputs: Images, count: int) -> Tensor:
    """Made-up images, the same ones each time."""
    with torch_seed(0, "images to compare backends with"):
        noise = torch.rand(count, *inputs.shape)
    return (noise * 255).to(torch.uint8) if inputs.dtype == torch.uint8 else noise.to(inputs.dtype)


def is_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether features agree to `TOLERANCE`."""
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=1e-30))
