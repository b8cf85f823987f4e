"""A trained learner for other programs: its net as safetensors, or the whole predictor as an exported program or ONNX.

The predictor takes raw inputs as the learner does, such as uint8 images `[batch, channels, height, width]`, and gives scores
`[batch, seen classes]` as the learner's own inference rule does: normalisation, the net, and class means, a probe or whatever else
the rule needs are inside. Column k is the class `seen[k]`. What was exported is compared with the learner before it is kept.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import tempfile
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gracecl import checkpoint, nets, rng
from gracecl.core import Taps
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import scores_by
from gracecl.errors import UserError
from gracecl.files import check_readable, parse_json
from gracecl.inputs import Images, Inputs, Parts, restored
from gracecl.nets import TappedNet
from gracecl.nets.module import first_line

MODELS = (".safetensors", ".pt2", ".onnx")
TOLERANCE = 1e-5
"""relative to the largest score, between the learner's and what was exported"""
CHECKED = 16
"""inputs that they are compared on"""
BATCH = {0: torch.export.Dim("batch", min=1, max=65536)}
NAMES = ("images", "scores")
"""what goes into a predictor and comes out of it, in ONNX"""
OF_THE_NET, PROGRAM = "net.", "program"
"""how the names of the net's tensors begin in a file of weights, and the tensor that holds the program"""


class Predictor(nn.Module):
    """Map raw inputs to scores of the seen classes."""

    def __init__(self, engine: Engine, rule: str | None = None) -> None:
        super().__init__()
        self.net = copy.deepcopy(engine.ready_to_predict()).eval()  # the learner goes on as it was
        self.net.take_images()  # whatever the learner learned from
        self.chain = engine.chain
        self.rule = rule or engine.chain.rule
        self.seen = list(engine.progress.seen)

    def forward(self, images: Tensor) -> Tensor:
        x = self.net.inputs.normalise(images)
        return scores_by(self.rule, self.chain, self.net.predict(x), torch.tensor(self.seen, device=images.device))


def export(engine: Engine, file: Path, rule: str | None, about: dict[str, Any]) -> str:
    """Export the engine's predictor or, as safetensors, its net; `about` is for the file's metadata."""
    check_format(file)
    predictor = Predictor(engine, rule)
    net, inputs = predictor.net, predictor.net.inputs
    images = examples(inputs).to(engine.device)
    with torch.no_grad():
        wanted = predictor(images)
    about = about | {
        "taps": net.layers,
        "classes": net.classes,
        **inputs.saved(),
        "seen": predictor.seen,
        "rule": predictor.rule,
        "torch": torch.__version__,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".safetensors":
        kept = [getattr(part, "means", None) for part in engine.chain.parts]
        means = next((value for value in kept if isinstance(value, Tensor)), None)
        write_net(file, net, images, means, about)
        with torch.no_grad():
            x = net.inputs.normalise(images)
            ours = net(x).logits.cpu()
            _compare(_run_program(file, images.cpu()), ours, file)
            with suppress(CannotRebuild):
                _compare(load_net(file)(x.cpu()).logits, ours, file)
        return f"{file} holds the net; docs/reports.md says how to use it, with gracecl or without"
    program = _exported(predictor, (images,), (BATCH,))
    if file.suffix == ".pt2":
        checkpoint.write_atomically(file, lambda beside: _save_program(program, beside, about))
        with torch.no_grad():
            found = torch.export.load(str(file)).module()(images)
    else:
        checkpoint.write_atomically(file, lambda beside: _save_onnx(program, images, beside, about))
        found = _run_onnx(file, images)
    _compare(found, wanted, file)
    what = "images" if isinstance(inputs, Images) else "inputs"
    taken = f"{str(inputs.dtype).removeprefix('torch.')} {what} {list(inputs.shape)}"
    return f"{file} holds the predictor by {predictor.rule}: {taken} in, scores of the classes {predictor.seen} out"


def check_format(file: Path) -> None:
    """Refuse a name that says no format."""
    if file.suffix not in MODELS:
        raise UserError(f"the name of {file} must end in {', '.join(MODELS[:-1])} or {MODELS[-1]}")


def examples(inputs: Inputs) -> Tensor:
    """Random inputs, the same each time."""
    if isinstance(inputs, Parts) or not (inputs.dtype == torch.uint8 or inputs.dtype.is_floating_point):
        raise UserError(f"images and floats can be exported, and the inputs are {inputs}; use Learner.save")
    shape, of = (CHECKED, *inputs.shape), rng.generator("images to compare on")
    if inputs.dtype == torch.uint8:
        return torch.from_numpy(of.integers(0, 256, shape, np.uint8))
    return torch.from_numpy(of.random(shape)).to(inputs.dtype)


class CannotRebuild(UserError):
    """The net differs from what its expression makes."""


class AsFunction(nn.Module):
    """A net as a function of its weights and raw inputs; it keeps neither."""

    def __init__(self, net: TappedNet, inputs: Inputs) -> None:
        super().__init__()
        self._net, self._inputs = (net,), inputs  # in a tuple, so that its weights are not this module's

    def forward(self, weights: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        named = {name.removeprefix(OF_THE_NET): value for name, value in weights.items()}
        out: Taps = torch.func.functional_call(self._net[0], named, (self._inputs.normalise(images),))
        return out.logits, out.features


def write_net(file: Path, net: TappedNet, images: Tensor, means: Tensor | None, about: dict[str, Any]) -> None:
    """Write parameters and buffers by name, class means if there are any, and in the header what the net is made of.

    With them, as bytes, the program that computes with them: whoever has PyTorch can use the net, without this library.
    """
    net = copy.deepcopy(net).cpu()
    state = {name: value for name, value in net.state_dict().items() if not name.startswith("extras.")}
    tensors = {f"{OF_THE_NET}{name}": value.detach().contiguous().clone() for name, value in sorted(state.items())}
    function = AsFunction(net, _inputs(about))
    program = _exported(function, (tensors, images.cpu()), (dict.fromkeys(tensors), BATCH))
    program.example_inputs = None  # they hold the weights once more
    with io.BytesIO() as packed:
        torch.export.save(program, packed)
        tensors[PROGRAM] = torch.frombuffer(bytearray(zlib.compress(packed.getvalue())), dtype=torch.uint8)
    if means is not None:
        tensors["class_means"] = means.detach().cpu().contiguous().clone()
    metadata = {"format": "pt", "gracecl": json.dumps(about)}
    checkpoint.write_atomically(file, lambda beside: save_file(tensors, beside, metadata=metadata))


def load_net(file: str | Path) -> TappedNet:
    """Load the net that `write_net` wrote, in evaluation mode; it takes what `net.inputs.normalise` made of raw inputs.

    A net whose heads or layers were changed by its method cannot be made anew; the program in the file computes it all the same.
    """
    check_readable(Path(file))
    with safe_open(str(file), "pt") as saved:
        about = parse_json(saved.metadata()["gracecl"])
        names = [name for name in saved.keys() if name.startswith(OF_THE_NET)]  # noqa: SIM118
        state = {name.removeprefix(OF_THE_NET): saved.get_tensor(name) for name in names}
    use_program = "use the program in the file, as docs/reports.md shows"
    try:
        net = nets.build(about["net"], _inputs(about), about["classes"], about["taps"])
    except UserError as error:
        raise CannotRebuild(f"the net in {file}, {about['net']}, cannot be made here ({error}); {use_program}") from None
    try:
        net.load_state_dict(state)
    except RuntimeError:
        raise CannotRebuild(
            f"{about['method']} gave the net in {file} other layers than {about['net']} has; {use_program}"
        ) from None
    return net.eval()


def _inputs(about: dict[str, Any]) -> Inputs:
    """What a file of weights says of the inputs of its net; those of 0.2.0 are of images alone."""
    return restored({"kind": "Images", "dtype": "uint8"} | about)


def _run_program(file: Path, images: Tensor) -> Tensor:
    """Return the logits of the program that a file of weights holds."""
    tensors = dict(sorted(load_file(file).items()))
    program = torch.export.load(io.BytesIO(zlib.decompress(tensors[PROGRAM].numpy().tobytes()))).module()
    logits: Tensor = program({name: value for name, value in tensors.items() if name.startswith(OF_THE_NET)}, images)[0]
    return logits


def _exported(module: nn.Module, example: tuple[Any, ...], free: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """Export a module as a program; `free` says which sizes of its arguments may change."""
    try:
        with torch.no_grad():
            return torch.export.export(module, example, dynamic_shapes=free, strict=False)
    except Exception as error:  # noqa: BLE001 (modules of one's own may hold whatever torch cannot trace)
        raise UserError(f"torch cannot export this net ({first_line(error)}); keep the learner with Learner.save") from None


def _save_program(program: torch.export.ExportedProgram, file: Path, about: dict[str, Any]) -> None:
    with open(file, "wb") as opened:  # a name that does not end in .pt2 would be refused
        torch.export.save(program, opened, extra_files={"gracecl.json": json.dumps(about)})


def _save_onnx(program: torch.export.ExportedProgram, images: Tensor, file: Path, about: dict[str, Any]) -> None:
    _need("onnx", "onnxscript")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of the converter's own parts
        made = torch.onnx.export(program, (images,), input_names=[NAMES[0]], output_names=[NAMES[1]], dynamo=True, verbose=False)
        assert made is not None
        made.save(Path(folder) / "model.onnx", external_data=False)
        onnx = importlib.import_module("onnx")
        model = onnx.load(Path(folder) / "model.onnx")
        onnx.helper.set_model_props(model, {"gracecl": json.dumps(about)})
        onnx.save(model, file)


def _run_onnx(file: Path, images: Tensor) -> Tensor:
    _need("onnxruntime")
    session = importlib.import_module("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {NAMES[0]: images.cpu().numpy()})[0])


def _need(*modules: str) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(f"ONNX needs {name}; install it with: pip install onnx onnxscript onnxruntime") from None


def _compare(found: Tensor, wanted: Tensor, file: Path) -> None:
    """Delete an exported file whose outputs differ from the learner's."""
    finite = wanted.isfinite()
    scale = float(wanted[finite].abs().max().clamp(min=1.0)) if finite.any() else 1.0
    off = float((found.cpu() - wanted.cpu())[finite.cpu()].abs().max()) if finite.any() else 0.0
    if off > TOLERANCE * scale or not torch.equal(found.cpu().isfinite(), finite.cpu()):
        file.unlink(missing_ok=True)
        raise UserError(f"what was exported differs from the learner by {off:.2g}, so {file} was not kept; export another format")
