"""Vision Transformer. Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021; tapped after equal groups of its blocks.

The image is cut into patches, each mapped to a token; a class token goes first, learned positions are added, and `depth` blocks
x ← x + attention(norm(x)), x ← x + mlp(norm(x)) follow. A tap reads the class token after the last block of its group, through a
LayerNorm of its own; the last tap uses the model's final norm. Tokens are never up- or downsampled, so every tap has the same
width. Twelve blocks and four taps: after blocks 3, 6, 9 and 12. A net with one tap is the plain ViT.

Parameters have timm's names. The norms' ε is 1e-6 as in the original and in timm (transformers' default is 1e-12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.errors import UserError
from gracecl.nets import weights as weight_files
from gracecl.nets.tapped import Backbone, stack_layers
from gracecl.registry import nets
from gracecl.registry.spec import Above, AtLeast, Within

NORM_EPSILON = 1e-6
INITIAL_SPREAD = 0.02


@nets.register("vit")
def vit(
    shape: tuple[int, int, int],
    taps: int,
    at_most: bool,
    patch: Annotated[int, AtLeast(1)] = 4,
    dim: Annotated[int, AtLeast(1)] = 192,
    depth: Annotated[int, Within(1, 1000)] = 12,
    heads: Annotated[int, AtLeast(1)] = 3,
    mlp_ratio: Annotated[float, Above(0)] = 4.0,
    weights: str | None = None,
) -> Backbone:
    """Vision Transformer, tapped at its class token after equal groups of blocks; ViT-B/16 is patch=16, dim=768, heads=12.

    `weights` is a local file, safetensors or PyTorch, with timm's or transformers' names; its classifier is left out, and its
    positions are interpolated where the file was made for images of another size.
    """
    channels, height, width = shape
    if dim % heads:
        raise UserError(f"vit: dim must be a multiple of heads, and {dim} is not one of {heads}")
    if height % patch or width % patch:
        raise UserError(
            f"vit(patch={patch}) cannot cut images of {height} × {width} pixels into whole patches; choose one that divides both"
        )
    if taps > depth and not at_most:
        raise UserError(f"vit(depth={depth}) has {depth} blocks to tap, not {taps}; use a larger depth or --taps {depth}")
    backbone = ViT(channels, (height // patch, width // patch), patch, dim, depth, heads, round(dim * mlp_ratio), min(taps, depth))
    if weights is not None:
        tensors = weight_files.vision_transformer(weight_files.read(weights))
        if "pos_embed" in tensors and tensors["pos_embed"].ndim == 3:
            tensors["pos_embed"] = resized_positions(tensors["pos_embed"], backbone.grid, weights)
        weight_files.load(backbone, tensors, weights, fresh=("tap_norms.",))
    return backbone


class PatchEmbedding(nn.Module):
    """Cuts images into patches and maps each to a token: `[B, channels, height, width] → [B, patches, dim]`."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return tokens


class Attention(nn.Module):
    """Multi-head self-attention; query, key and value come from one product, in this order."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Perceptron(nn.Module):
    """Two linear layers with GELU between them, the same for each token."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, NORM_EPSILON)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, NORM_EPSILON)
        self.mlp = Perceptron(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(Backbone):
    def __init__(
        self, channels: int, grid: tuple[int, int], patch: int, dim: int, depth: int, heads: int, hidden: int, taps: int
    ) -> None:
        super().__init__()
        self.layers, self.width, self.grid = taps, dim, grid
        self.tapped_blocks = [(tap + 1) * depth // taps - 1 for tap in range(taps)]
        self.patch_embed = PatchEmbedding(channels, patch, dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + grid[0] * grid[1], dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, NORM_EPSILON)
        self.tap_norms = nn.ModuleList(nn.LayerNorm(dim, NORM_EPSILON) for _ in range(taps - 1))
        for value in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(value, std=INITIAL_SPREAD)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                nn.init.trunc_normal_(module.weight, std=INITIAL_SPREAD)
                nn.init.zeros_(module.bias)

    def tap_parts(self) -> list[nn.Module]:
        return [self.tap_norms]

    @property
    def reads_vectors(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        norms = [*self.tap_norms, self.norm]
        return stack_layers([norm(token) for norm, token in zip(norms, self.class_tokens(x), strict=True)])

    def trunk_vectors(self, x: Tensor) -> list[Tensor]:
        *shallow, last = self.class_tokens(x)
        return [*(F.layer_norm(token, token.shape[1:], eps=NORM_EPSILON) for token in shallow), self.norm(last)]

    def read_vectors(self, vectors: Sequence[Tensor]) -> Tensor:
        *shallow, last = vectors
        weights = [(norm.get_parameter("weight"), norm.get_parameter("bias")) for norm in self.tap_norms]
        return stack_layers([*(value * scale + shift for value, (scale, shift) in zip(shallow, weights, strict=True)), last])

    def class_tokens(self, x: Tensor) -> list[Tensor]:
        """That of each tapped block."""
        patches = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed
        class_tokens = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in self.tapped_blocks:
                class_tokens.append(x[:, 0])
        return class_tokens


def resized_positions(positions: Tensor, grid: tuple[int, int], path: str) -> Tensor:
    """Position embeddings `[1, 1 + patches, dim]` of a square grid for another grid: the class token's kept, the rest bicubic."""
    patches = positions.shape[1] - 1
    if patches == grid[0] * grid[1]:
        return positions
    side = math.isqrt(patches)
    if side * side != patches:
        raise UserError(f"the position embeddings in {path} are for {patches} patches, which no square image has")
    maps = positions[:, 1:].float().transpose(1, 2).reshape(len(positions), -1, side, side)
    resized = F.interpolate(maps, grid, mode="bicubic", align_corners=False, antialias=True)
    return torch.cat([positions[:, :1].float(), resized.flatten(2).transpose(1, 2)], dim=1)
