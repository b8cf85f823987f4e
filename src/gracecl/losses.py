"""Loss terms as pure functions over the layer axis: tensors `[L, B, …]` in, one number per layer `[L]` out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def full_precision(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged otherwise: softmax, norms and logarithms are never taken in half."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def cross_entropy_of_each(logits: Tensor, y: Tensor) -> Tensor:
    """`[L, B]`: the cross-entropy of every image in each layer."""
    logits = full_precision(logits)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none").view(logits.shape[:2])


def cross_entropy(logits: Tensor, y: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each layer; with `classes [C]`, the softmax spans only the classes marked True."""
    logits = full_precision(logits)
    if classes is not None:
        logits = logits.masked_fill(~classes, -torch.inf)
    layers = len(logits)
    if layers == 1:  # PyTorch's own mean, at a third of the overhead
        return F.cross_entropy(logits.squeeze(0), y).unsqueeze(0)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(layers), reduction="none").view(layers, -1).mean(dim=1)


def mixed_cross_entropy(logits: Tensor, y: Tensor, other: Tensor, share: Tensor, classes: Tensor | None = None) -> Tensor:
    """Cross-entropy of images that are mixed from two: `share` times that with their first label, the rest with the other one."""
    return share * cross_entropy(logits, y, classes) + (1 - share) * cross_entropy(logits, other, classes)


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
    """Supervised contrastive loss (Khosla et al., 2020) of each layer on unit vectors, each image against all the others.

    For each anchor, the mean over the other images of its class of −log softmax(similarity / temperature), where the softmax runs
    over all images but the anchor. Anchors that are alone in their class are left out.
    """
    u = F.normalize(full_precision(embedding), dim=-1)
    return contrast(u, y, u, y, temperature, exclude_self=True)


def contrast(
    anchors: Tensor, y: Tensor, others: Tensor, others_y: Tensor, temperature: float, *, exclude_self: bool = False
) -> Tensor:
    """Supervised contrast of anchors `[L, A, E]` with others `[L, K, E]`, vectors that are compared as they are given.

    For each anchor, the mean over the others of its class of −log softmax(similarity / temperature), where the softmax runs over
    all of the others; then the mean over the anchors that have any. With `exclude_self` the others are the anchors themselves, in
    the same order, and none is compared with itself.
    """
    similarity = full_precision(anchors @ others.transpose(1, 2)) / temperature
    positive = y[:, None] == others_y[None, :]
    if exclude_self:
        itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
        log_p = F.log_softmax(similarity.masked_fill(itself, -torch.inf), dim=-1).masked_fill(itself, 0.0)
        positive = positive & ~itself
    else:
        log_p = F.log_softmax(similarity, dim=-1)
    count = positive.sum(dim=1)
    per_anchor = -(log_p * positive).sum(dim=-1) / count.clamp(min=1)
    return per_anchor.sum(dim=-1) / (count > 0).sum().clamp(min=1)


def proxy_contrast(similarity: Tensor, y: Tensor) -> Tensor:
    """Proxy-based contrast (Lin et al., 2023) of each layer: the mean over images of −s_y + log Σ_c n_c exp(s_c).

    n_c is how many images of the batch are of class c; `similarity [L, N, C]` is that of each image with each class's proxy, over
    the temperature. It is `contrast` of the images with the proxy of each image's class, in which a proxy stands as often as its
    class occurs, but takes N × C products instead of N × N.
    """
    log_count = F.one_hot(y, similarity.shape[-1]).sum(dim=0).to(full_precision(similarity).dtype).log()
    return cross_entropy(full_precision(similarity) + log_count, y) + log_count[y].mean()


def classes_among(y: Tensor, classes: int) -> Tensor:
    """`[C]`: True for the classes that occur among the labels."""
    return torch.zeros(classes, dtype=torch.bool, device=y.device).index_fill(0, y, True)


def unit(x: Tensor, epsilon: float, dim: int = -1) -> Tensor:
    """Vectors divided by their norm plus a small number, as programs do that do not clamp the norm instead."""
    x = full_precision(x)
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return x / (norm + epsilon)


def frobenius_distance(a: Tensor, b: Tensor) -> Tensor:
    """The norm of the whole difference matrix of each layer, one square root over all its entries; its gradient at 0 is 0."""
    norm: Tensor = torch.linalg.vector_norm(a - b, dim=(1, 2))
    return norm


def logit_distance(logits: Tensor, targets: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean squared difference of each layer's logits from given ones; with `classes [C]`, over the classes marked True."""
    square = (full_precision(logits) - full_precision(targets)) ** 2
    if classes is None:
        return square.mean(dim=(1, 2))
    return (square * classes).sum(dim=2).mean(dim=1) / classes.sum()


def distillation(logits: Tensor, targets: Tensor, temperature: float, classes: Tensor | None = None) -> Tensor:
    """Mean KL(softmax(targets / temperature) ‖ softmax(logits / temperature)) of each layer; with `classes [C]`, over those marked.

    Its gradient shrinks with temperature²; a caller that wants it comparable over temperatures multiplies by that.
    """
    student, teacher = full_precision(logits) / temperature, full_precision(targets) / temperature
    if classes is not None:
        student, teacher = student.masked_fill(~classes, -torch.inf), teacher.masked_fill(~classes, -torch.inf)
    log_p, log_q = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    p = log_p.exp()
    if classes is not None:
        log_p, log_q = log_p.masked_fill(~classes, 0.0), log_q.masked_fill(~classes, 0.0)
    return (p * (log_p - log_q)).sum(dim=-1).mean(dim=-1)
