"""Loss terms as pure functions over the layer axis: tensors `[L, B, …]` in, one number per layer `[L]` out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def full_precision(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged otherwise: softmax, norms and logarithms are never taken in half."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def cross_entropy(logits: Tensor, y: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each layer; with `classes [C]`, the softmax spans only the classes marked True."""
    logits = full_precision(logits)
    if classes is not None:
        logits = logits.masked_fill(~classes, -torch.inf)
    layers = len(logits)
    if layers == 1:  # PyTorch's own mean, at a third of the overhead
        return F.cross_entropy(logits.squeeze(0), y).unsqueeze(0)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(layers), reduction="none").view(layers, -1).mean(dim=1)


def entropy(logits: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean entropy of the softmax of each layer, in nats; with `classes [C]`, over the classes marked True."""
    logits = full_precision(logits)
    if classes is not None:
        logits = logits.masked_fill(~classes, -torch.inf)
    log_p = F.log_softmax(logits, dim=-1)
    p = log_p.exp()
    if classes is not None:
        log_p = log_p.masked_fill(~classes, 0.0)
    return -(p * log_p).sum(dim=-1).mean(dim=-1)


def supervised_contrast(embedding: Tensor, y: Tensor, temperature: float = 0.07) -> Tensor:
    """Supervised contrastive loss (Khosla et al., 2020) of each layer on unit vectors.

    For each anchor, the mean over the other images of its class of −log softmax(similarity / temperature), where the softmax runs
    over all images but the anchor. Anchors that are alone in their class are left out.
    """
    u = F.normalize(full_precision(embedding), dim=-1)
    similarity = u @ u.transpose(1, 2) / temperature
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
    log_p = F.log_softmax(similarity.masked_fill(itself, -torch.inf), dim=-1).masked_fill(itself, 0.0)
    positive = (y[:, None] == y[None, :]) & ~itself
    count = positive.sum(dim=1)
    per_anchor = -(log_p * positive).sum(dim=-1) / count.clamp(min=1)
    return per_anchor.sum(dim=-1) / (count > 0).sum().clamp(min=1)


def frobenius_distance(a: Tensor, b: Tensor) -> Tensor:
    """The norm of the whole difference matrix of each layer, one square root over all its entries; its gradient at 0 is 0."""
    norm: Tensor = torch.linalg.vector_norm(a - b, dim=(1, 2))
    return norm
