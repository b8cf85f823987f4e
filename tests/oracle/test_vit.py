"""The vision transformer: against its equations head by head, its taps, its weight files, and the libraries they come from."""

from __future__ import annotations

import importlib
import math
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gracecl import nets, rng
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.nets.tapped import TappedNet
from gracecl.nets.vit import ViT, resized_positions, vit
from gracecl.testing import METHOD_LAWS

SMALL = "patch=4, dim=12, depth=4, heads=3"
SHAPE = (3, 8, 12)
SQUARE = (3, 8, 8)


def build(expression: str, shape: tuple[int, int, int] = SHAPE, taps: int | None = None) -> TappedNet:
    with rng.torch_seed(0, "net"):
        return nets.build(expression, Images(shape), 5, taps)


def shaken(backbone: nn.Module, seed: int = 0) -> ViT:
    """Every parameter, biases and norms too, at some value of order one, so that no term can hide."""
    assert isinstance(backbone, ViT)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return backbone


def images(shape: tuple[int, int, int], number: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)


# The equations, one image, token and head at a time.


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias


def attended(x: Tensor, layer: nn.Module, heads: int) -> Tensor:
    size = x.shape[-1] // heads
    query, key, value = (
        x @ weight.T + bias for weight, bias in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    )
    mixed = []
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        chance = torch.softmax(query[:, columns] @ key[:, columns].T / math.sqrt(size), dim=-1)
        mixed.append(chance @ value[:, columns])
    return torch.cat(mixed, dim=-1) @ layer.proj.weight.T + layer.proj.bias


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def class_tokens(net: ViT, image: Tensor, patch: int, heads: int) -> list[Tensor]:
    """The class token after each block, before any final norm."""
    tokens = [net.cls_token[0, 0]]
    for top in range(0, image.shape[1], patch):
        for left in range(0, image.shape[2], patch):
            piece = image[:, top : top + patch, left : left + patch].flatten()
            tokens.append(net.patch_embed.proj.weight.flatten(1) @ piece + net.patch_embed.proj.bias)
    x = torch.stack(tokens) + net.pos_embed[0]
    found = []
    for block in net.blocks:
        x = x + attended(normed(x, block.norm1), block.attn, heads)
        hidden = gelu(normed(x, block.norm2) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias)
        x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        found.append(x[0])
    return found


@pytest.mark.parametrize(
    ("depth", "taps", "after"),
    [(12, 4, [3, 6, 9, 12]), (12, 1, [12]), (4, 4, [1, 2, 3, 4]), (5, 2, [2, 5]), (7, 3, [2, 4, 7]), (1, 1, [1])],
)
def test_taps_are_the_class_token_after_each_group_of_blocks(depth: int, taps: int, after: list[int]) -> None:
    net = shaken(build(f"vit(patch=4, dim=12, depth={depth}, heads=3, mlp_ratio=1.5)", taps=taps).backbone).double()
    x = images(SHAPE, dtype=torch.float64)
    features = net(x)
    assert features.shape == (taps, 2, 12)
    norms = [*net.tap_norms, net.norm]
    assert len(norms) == taps
    for number, image in enumerate(x):
        tokens = class_tokens(net, image, patch=4, heads=3)
        for tap, block in enumerate(after):
            expected = normed(tokens[block - 1], norms[tap])
            torch.testing.assert_close(features[tap, number], expected, rtol=1e-9, atol=1e-9)


def test_a_net_with_fewer_taps_shares_the_rest() -> None:
    """The single tap is the plain ViT: the same trunk, the model's final norm and nothing else."""
    full = shaken(build(f"vit({SMALL})").backbone)
    plain = build(f"vit({SMALL})", taps=1).backbone
    plain.load_state_dict({name: value for name, value in full.state_dict().items() if not name.startswith("tap_norms")})
    torch.testing.assert_close(plain(images(SHAPE))[0], full(images(SHAPE))[-1])


def test_parameters_of_vit_b16() -> None:
    """85,798,656 with 224 px: embedding, 197 positions, twelve blocks, final norm; three norms more for four taps."""
    with torch.device("meta"):
        plain, tapped = (vit((3, 224, 224), taps, False, patch=16, dim=768, heads=12) for taps in (1, 4))
    assert sum(value.numel() for value in plain.parameters()) == 85_798_656
    assert sum(value.numel() for value in tapped.parameters()) == 85_798_656 + 3 * 2 * 768


def test_initialisation() -> None:
    net = build("vit(dim=96, depth=2)", (3, 32, 32)).backbone
    for name, value in net.named_parameters():
        if "norm" in name:
            assert (value == float(name.endswith("weight"))).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        elif value.numel() > 1000:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name


def test_as_many_taps_as_blocks_where_nobody_asked() -> None:
    assert build("vit(patch=4, dim=12, depth=2, heads=3)").layers == 2
    assert build("vit(patch=4, dim=12, depth=9, heads=3)").layers == 4


@pytest.mark.parametrize(
    ("expression", "taps", "word"),
    [
        ("vit(patch=5)", None, "patch=5"),
        ("vit(patch=8)", None, "8 × 12"),
        ("vit(patch=4, depth=3)", 4, "3 blocks"),
        ("vit(patch=4, dim=10, heads=3)", None, "multiple of heads"),
        ("vit(patch=0)", None, "at least 1"),
        ("vit(patch=4, depth=0)", None, "between 1 and 1000"),
        ("vit(patch=4, mlp_ratio=0)", None, "mlp_ratio"),
        ("vit(patch=4, weights=3)", None, "weights"),
    ],
)
def test_impossible_nets_are_refused(expression: str, taps: int | None, word: str) -> None:
    with pytest.raises(UserError, match=word):
        build(expression, taps=taps)


def test_resumes_exactly() -> None:
    METHOD_LAWS["resumes_exactly"]("grace(er())", net="vit(patch=4, dim=12, depth=4, heads=2)")


# Weight files.


def timm_file(dim: int = 12, depth: int = 4, grid: int = 2, seed: int = 5) -> dict[str, Tensor]:
    """The tensors of a timm file for square images of 4 · grid pixels, with a classifier of 7 classes."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    tensors = {
        "cls_token": some(1, 1, dim),
        "pos_embed": some(1, 1 + grid * grid, dim),
        "patch_embed.proj.weight": some(dim, 3, 4, 4),
        "patch_embed.proj.bias": some(dim),
    }
    for block in range(depth):
        sizes = {"norm1": (dim,), "attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim), "norm2": (dim,)}
        for part, size in (sizes | {"mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}).items():
            tensors[f"blocks.{block}.{part}.weight"] = some(*size)
            tensors[f"blocks.{block}.{part}.bias"] = some(size[0])
    for name, size in (("norm.weight", (dim,)), ("norm.bias", (dim,)), ("head.weight", (7, dim)), ("head.bias", (7,))):
        tensors[name] = some(*size)
    return tensors


OLD_NAMES = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.output.dense", "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense", "attn.q": "attention.attention.query", "attn.k": "attention.attention.key",
    "attn.v": "attention.attention.value",
}  # fmt: skip
NEW_NAMES = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2", "attn.q": "attention.q_proj", "attn.k": "attention.k_proj", "attn.v": "attention.v_proj",
}  # fmt: skip
OUTER_NAMES = {
    "cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings", "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias", "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
}  # fmt: skip


def transformers_file(layers: str, names: dict[str, str], prefix: str = "vit.") -> dict[str, Tensor]:
    """The same tensors under transformers' names, with query, key and value apart."""
    written = {}
    for name, value in timm_file().items():
        if name.startswith("head"):
            written[name.replace("head", "classifier")] = value
        elif name in OUTER_NAMES:
            written[prefix + OUTER_NAMES[name]] = value
        else:
            _, block, part = name.split(".", 2)
            part, kind = part.rsplit(".", 1)
            pieces = {part: value}
            if part == "attn.qkv":
                pieces = {f"attn.{letter}": piece for letter, piece in zip("qkv", value.chunk(3), strict=True)}
            for own, piece in pieces.items():
                written[f"{prefix}{layers}.{block}.{names[own]}.{kind}"] = piece
    return written


FILES = {
    "timm": timm_file(),
    "transformers": transformers_file("encoder.layer", OLD_NAMES),
    "transformers, the model alone": transformers_file("encoder.layer", OLD_NAMES, prefix="")
    | {"pooler.dense.weight": torch.ones(12, 12), "embeddings.mask_token": torch.ones(1, 1, 12)},
    "transformers 5": transformers_file("layers", NEW_NAMES),
    "transformers 5, the model alone": transformers_file("layers", NEW_NAMES, prefix=""),
}


def written(folder: Path, tensors: dict[str, Tensor], suffix: str = ".safetensors") -> str:
    path = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return str(path)


def loaded(path: str, shape: tuple[int, int, int] = SQUARE, options: str = SMALL, taps: int | None = None) -> ViT:
    backbone = build(f"vit({options}, weights='{path}')", shape, taps).backbone
    assert isinstance(backbone, ViT)
    return backbone


def check_loaded(net: ViT, tensors: dict[str, Tensor]) -> None:
    fresh = {"tap_norms"}
    state = {name: value for name, value in net.state_dict().items() if name.split(".")[0] not in fresh}
    assert state.keys() == {name for name in tensors if not name.startswith("head")}
    for name, value in state.items():
        assert torch.equal(value, tensors[name]), name


@pytest.mark.parametrize("naming", FILES)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_files_of_every_naming_are_the_same_net(naming: str, suffix: str, tmp_path: Path) -> None:
    net = loaded(written(tmp_path, FILES[naming], suffix))
    check_loaded(net, timm_file())
    tokens = class_tokens(net, images(SQUARE)[0], patch=4, heads=3)
    torch.testing.assert_close(net(images(SQUARE))[-1, 0], normed(tokens[-1], net.norm), rtol=1e-4, atol=1e-4)
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in net.tap_norms)


@pytest.mark.parametrize("envelope", ["model", "state_dict"])
def test_weights_inside_a_training_checkpoint(envelope: str, tmp_path: Path) -> None:
    torch.save({envelope: timm_file(), "epoch": 3}, tmp_path / "weights.pt")
    check_loaded(loaded(str(tmp_path / "weights.pt")), timm_file())


def test_half_precision_files_become_single_precision(tmp_path: Path) -> None:
    half = {name: value.half() for name, value in timm_file().items()}
    net = loaded(written(tmp_path, half))
    assert all(value.dtype == torch.float32 for value in net.parameters())
    check_loaded(net, {name: value.float() for name, value in half.items()})


def cubic(distance: float) -> float:
    """Keys' kernel with a = -1/2."""
    d = abs(distance)
    if d < 1:
        return 1.5 * d**3 - 2.5 * d**2 + 1
    return -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2 if d < 2 else 0.0


def interpolation(size: int, wanted: int) -> Tensor:
    """`[wanted, size]`: how much each old point counts at each new one; the kernel is stretched where points get fewer."""
    step = size / wanted
    rows = []
    for new in range(wanted):
        weight = [cubic((old + 0.5 - (new + 0.5) * step) / max(step, 1.0)) for old in range(size)]
        rows.append([value / sum(weight) for value in weight])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("grid", [(3, 3), (7, 7), (2, 3), (6, 9)])
def test_positions_of_another_grid_are_interpolated(grid: tuple[int, int], tmp_path: Path) -> None:
    tensors = timm_file(grid=4)
    net = loaded(written(tmp_path, tensors), (3, 4 * grid[0], 4 * grid[1]))
    maps = tensors["pos_embed"][0, 1:].double().reshape(4, 4, 12)
    down, across = interpolation(4, grid[0]), interpolation(4, grid[1])
    expected = torch.einsum("yi,xj,ijd->yxd", down, across, maps).reshape(-1, 12)
    torch.testing.assert_close(net.pos_embed[0, 1:].double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(net.pos_embed[0, 0], tensors["pos_embed"][0, 0])
    assert net(images((3, 4 * grid[0], 4 * grid[1]))).isfinite().all()


def test_positions_of_no_square_are_refused() -> None:
    with pytest.raises(UserError, match="6 patches"):
        resized_positions(torch.zeros(1, 7, 12), (2, 2), "file")


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        (without(timm_file(), "norm.bias", "cls_token"), SMALL, ["lacks", "norm.bias", "cls_token"]),
        (timm_file() | {"dist_token": torch.ones(1, 1, 12)}, SMALL, ["also has", "dist_token"]),
        (timm_file(), "patch=4, dim=12, depth=3, heads=3", ["also has", "blocks.3.attn.proj.bias", "8 more"]),
        (timm_file(), "patch=4, dim=12, depth=5, heads=3", ["lacks", "blocks.4.norm1.weight", "8 more"]),
        (timm_file(), "patch=4, dim=24, depth=4, heads=3", ["cls_token", "[1, 1, 12]", "[1, 1, 24]"]),
        (timm_file(), "patch=2, dim=12, depth=4, heads=3", ["patch_embed.proj.weight", "[12, 3, 4, 4]", "[12, 3, 2, 2]"]),
        (timm_file() | {"pos_embed": torch.zeros(5)}, SMALL, ["pos_embed", "[5]"]),
        (
            without(FILES["transformers"], "vit.encoder.layer.1.attention.attention.key.bias"),
            SMALL,
            ["lacks", "blocks.1.attn.qkv.bias", "blocks.1.attn.query.bias"],
        ),
    ],
)
def test_other_weights_are_refused_by_name(tensors: dict[str, Tensor], options: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        loaded(written(tmp_path, tensors), options=options)
    for word in words:
        assert word in str(error.value)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never run",))


def test_unreadable_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in {
        "a.safetensors": b"no such thing",
        "b.pth": b"no such thing",
        "c.pt": b"",
        "d.npz": b"PK",
        "e.pt": pickle.dumps({"cls_token": Harmful()}, protocol=2),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            loaded(str(tmp_path / name))
    torch.save({"cls_token": Harmful()}, tmp_path / "f.pt")
    torch.save([torch.zeros(2)], tmp_path / "g.pt")
    for name in ("f.pt", "g.pt", "absent.pt"):
        with pytest.raises(UserError, match=name):
            loaded(str(tmp_path / name))
    assert capsys.readouterr().out == ""


# The libraries that such files come from, where they are installed.


def library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError):  # the latter from a torchvision that does not fit this PyTorch
        pytest.skip(f"{name} cannot be imported")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_transformers_gives_the_same_features(suffix: str, tmp_path: Path) -> None:
    transformers = library("transformers")
    sizes = {"hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, layer_norm_eps=1e-6)
    torch.manual_seed(0)
    model = transformers.ViTModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if suffix == "pth":
        path = tmp_path / "model.pth"
        torch.save(model.state_dict(), path)
    else:
        model.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
    net = loaded(str(path))
    with torch.no_grad():
        out = model(images(SQUARE), output_hidden_states=True)
        ours = net(images(SQUARE))
        torch.testing.assert_close(ours[-1], out.last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)
        for tap in range(3):
            torch.testing.assert_close(ours[tap], net.tap_norms[tap](out.hidden_states[tap + 1][:, 0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [2, 3, 5])
def test_timm_gives_the_same_features(grid: int, tmp_path: Path) -> None:
    library("timm")
    transformer = importlib.import_module("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = transformer.VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=4, num_heads=3, num_classes=7).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    path = written(tmp_path, model.state_dict())
    model.set_input_size(4 * grid)
    with torch.no_grad():
        expected = model.forward_features(images((3, 4 * grid, 4 * grid)))[:, 0]
        torch.testing.assert_close(
            loaded(path, (3, 4 * grid, 4 * grid))(images((3, 4 * grid, 4 * grid)))[-1], expected, rtol=1e-5, atol=1e-5
        )
