"""Loss terms as pure functions over the layer axis: tensors `[L, B, …]` in, one number per layer `[L]` out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

INFO_NCE_EPSILON = 1e-8
"""added where OCM's program divides and takes logarithms"""


def full_precision(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged otherwise: softmax, norms and logarithms are never taken in half."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def cross_entropy_of_each(logits: Tensor, y: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return `[L, B]`: the cross-entropy of every image in each layer; with `classes [C]`, the softmax spans only
    those marked True.
    """
    logits = full_precision(logits)
    if classes is not None:
        logits = logits.masked_fill(~classes, -torch.inf)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none").view(logits.shape[:2])


def cross_entropy(logits: Tensor, y: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each layer; with `classes`, the softmax spans only those marked: `[C]`, or `[B, C]` for each image."""
    logits = full_precision(logits)
    if classes is not None:
        logits = logits.masked_fill(~classes, -torch.inf)
    layers = len(logits)
    if layers == 1:  # PyTorch's own mean, at a third of the overhead
        return F.cross_entropy(logits.squeeze(0), y).unsqueeze(0)
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(layers), reduction="none").view(layers, -1).mean(dim=1)


def mixed_cross_entropy(logits: Tensor, y: Tensor, other: Tensor, share: Tensor, classes: Tensor | None = None) -> Tensor:
    """Cross-entropy of images that are mixed from two: `share` times that with their first label, the rest with the other one.

    `share` is one number for all images, or one for each, `[B]`.
    """
    if share.ndim:
        first, second = (cross_entropy_of_each(logits, label, classes) for label in (y, other))
        return torch.lerp(second, first, share.to(first)).mean(dim=1)
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
    per_anchor, count = contrast_of_each(anchors, y, others, others_y, temperature, exclude_self=exclude_self)
    return per_anchor.sum(dim=-1) / (count > 0).sum().clamp(min=1)


def contrast_of_each(
    anchors: Tensor, y: Tensor, others: Tensor, others_y: Tensor, temperature: float, *, exclude_self: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `[L, A]` and `[A]`: the term of each anchor in `contrast`, 0 for one that has no others of its class;
    how many it has.
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
    return -(log_p * positive).sum(dim=-1) / count.clamp(min=1), count


def asymmetric_contrast(vectors: Tensor, y: Tensor, is_anchor: Tensor, temperature: float) -> Tensor:
    """Supervised contrast of which only some images are anchors (Cha et al., 2021), of vectors `[L, B, E]` as they are given.

    All images stay among those that an anchor is compared with, and the sum over the anchors `is_anchor [B]` is divided by the
    number of all images.
    """
    of_each, _ = contrast_of_each(vectors, y, vectors, y, temperature, exclude_self=True)
    return (of_each * is_anchor).mean(dim=-1)


def log_relations(vectors: Tensor, temperature: float) -> Tensor:
    """Return `[L, B, B - 1]`: log softmax, over the other images in their order, of each image's similarity with
    them / temperature.

    The products are taken in full precision, as a small temperature magnifies what half precision would round away.
    """
    layers, images, _ = vectors.shape
    with torch.autocast(vectors.device.type, enabled=False):
        vectors = full_precision(vectors)
        similarity = vectors @ vectors.transpose(1, 2) / temperature
    # Row after row, every (B + 1)-th entry is one of the diagonal: cut off the first, then each is the last of a row.
    others = similarity.flatten(1)[:, 1:].view(layers, images - 1, images + 1)[..., :-1].reshape(layers, images, images - 1)
    return F.log_softmax(others, dim=-1)


def relation_distillation(vectors: Tensor, targets: Tensor, temperature: float, target_temperature: float) -> Tensor:
    """Instance-wise relation distillation (Cha et al., 2021) of each layer, of vectors `[L, B, E]` as they are given.

    The mean over images of the cross-entropy between how similar the targets of the other images are to its own and how similar
    their vectors are; gradients go into the vectors alone.
    """
    q = log_relations(targets.detach(), target_temperature).exp()
    return -(q * log_relations(vectors, temperature)).sum(dim=-1).mean(dim=-1)


def proxy_contrast(similarity: Tensor, y: Tensor) -> Tensor:
    """Proxy-based contrast (Lin et al., 2023) of each layer: the mean over images of −s_y + log Σ_c n_c exp(s_c).

    n_c is how many images of the batch are of class c; `similarity [L, N, C]` is that of each image with each class's proxy, over
    the temperature. It is `contrast` of the images with the proxy of each image's class, in which a proxy stands as often as its
    class occurs, but takes N × C products instead of N × N.
    """
    log_count = F.one_hot(y, similarity.shape[-1]).sum(dim=0).to(full_precision(similarity).dtype).log()
    return cross_entropy(full_precision(similarity) + log_count, y) + log_count[y].mean()


def split_similarity(features: Tensor, projected: Tensor, start: int) -> Tensor:
    """Return `[L, N, N]`: of unit projections `[L, N, E]` with E columns of the unit features, from `start` on,
    and with one another.

    OCM (Guo et al., 2022) compares a projection with a random part of the features. The columns are not brought to unit length
    again, and the result is not symmetric.
    """
    z, f = unit(projected, INFO_NCE_EPSILON), unit(features, INFO_NCE_EPSILON)
    return products(z, f[..., start : start + z.shape[-1]] + z)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return `[L, N, M]`: inner products of the rows of a `[L, N, E]` with those of b `[L, M, E]`.

    They are taken in full precision, as a small temperature magnifies what half precision would round away.
    """
    with torch.autocast(a.device.type, enabled=False):
        return full_precision(a) @ full_precision(b).transpose(1, 2)


def info_nce_terms(similarity: Tensor, temperature: float, *, exclude_self: bool = False) -> Tensor:
    """Return `[L, N, M]`: −log of the softmax of each row of similarities, which 1e-8 keeps from 0, as OCM's
    program does.

    With `exclude_self` no row is compared with itself: its own place has probability 0 and no gradient.
    """
    similarity = full_precision(similarity)
    weight = ((similarity - similarity.detach().amax(dim=-1, keepdim=True)) / temperature).exp()
    if exclude_self:
        weight = weight.masked_fill(torch.eye(weight.shape[-1], dtype=torch.bool, device=weight.device), 0.0)
    return -(weight / (weight.sum(dim=-1, keepdim=True) + INFO_NCE_EPSILON) + INFO_NCE_EPSILON).log()


def info_nce(terms: Tensor, y: Tensor) -> Tensor:
    """Mean over rows of the mean of `terms [L, N, N]` over the columns of the row's class, its own place among them."""
    same = (y[:, None] == y[None, :]).to(terms.dtype)
    return (terms * (same / same.sum(dim=1, keepdim=True))).sum(dim=-1).mean(dim=-1)


def info_nce_of_pairs(terms: Tensor) -> Tensor:
    """Mean over rows of `terms [L, 2B, 2B]` where a row meets its other view: row i and row i + B are views of one image."""
    half = terms.shape[-1] // 2
    return sum_of_diagonals(terms, half) / (2 * half)


def sum_of_diagonals(x: Tensor, offset: int) -> Tensor:
    """Sums of the two diagonals that lie `offset` above and below the main one."""
    return sum((x.diagonal(away, dim1=-2, dim2=-1).sum(dim=-1) for away in (offset, -offset)), x.new_zeros(()))


def mean_per_class(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return `[L, C, E]`: the mean of each class's vectors `z [L, N, E]`, zero for a class without any."""
    # A product with the membership matrix, not a scatter: the order of summation is fixed on every device.
    member = F.one_hot(y, classes).T.to(z.dtype)
    return member @ z / member.sum(dim=1, keepdim=True).clamp(min=1)


def prototype_contrast(means: Tensor, others: Tensor, present: Tensor, temperature: float = 0.5) -> Tensor:
    """OnPro's contrast (Wei et al., 2023) of the class means of two views, `[L, C, E]` each, over the classes marked `present [C]`.

    Each of the 2K mean directions against all the others; right is the same class's in the other view. A single class gives 0.
    """
    p = F.normalize(full_precision(torch.cat([means, others], dim=1)), dim=-1)
    present = present.repeat(2)
    left_out = ~present | torch.eye(len(present), dtype=torch.bool, device=p.device)
    log_p = F.log_softmax((products(p, p) / temperature).masked_fill(left_out, -torch.inf), dim=-1)
    return -sum_of_diagonals(log_p.masked_fill(~present, 0.0), len(present) // 2) / present.sum().clamp(min=1)


def classes_among(y: Tensor, classes: int) -> Tensor:
    """Return `[C]`: True for the classes that occur among the labels."""
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


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over images of 1 - cos of the angle between their vectors in each layer: from 0, the same direction, to 2."""
    return (1 - (unit(a, 1e-12) * unit(b, 1e-12)).sum(dim=-1)).mean(dim=1)


def binary_cross_entropy(logits: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
    """Mean over images of the cross-entropies of each class's sigmoid with its target, summed over the `classes [C]` marked True.

    Targets between 0 and 1 are those of distillation; `[B, C]` or, for each layer its own, `[L, B, C]`.
    """
    logits = full_precision(logits)
    each = F.binary_cross_entropy_with_logits(logits, targets.to(logits).expand_as(logits), reduction="none")
    return (each * classes).sum(dim=-1).mean(dim=-1)


def margin_ranking(scores: Tensor, y: Tensor, rivals: Tensor, nearest: int, margin: float, images: Tensor) -> Tensor:
    """How far each layer's `scores [L, B, C]` of the images' classes do not exceed those of the nearest rivals by the margin.

    The mean over the images marked in `images [B]` and their `nearest` best classes among `rivals [C]` of
    max(0, margin - own score + rival's score), 0 where no image is marked.
    """
    scores = full_precision(scores)
    own = scores.gather(-1, y.expand(len(scores), -1)[..., None])
    best = scores.masked_fill(~rivals, -torch.inf).topk(nearest, dim=-1).values
    short = (margin - own + best).relu().mean(dim=-1)
    return (short * images).sum(dim=1) / images.sum().clamp(min=1)


def logit_distance(logits: Tensor, targets: Tensor, classes: Tensor | None = None) -> Tensor:
    """Mean squared difference of each layer's logits from given ones; with `classes [C]`, over the classes marked True."""
    square = (full_precision(logits) - full_precision(targets)) ** 2
    if classes is None:
        return square.mean(dim=(1, 2))
    return (square * classes).sum(dim=2).mean(dim=1) / classes.sum()


def distillation(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    classes: Tensor | None = None,
    *,
    blocks: Tensor | None = None,
    measure: Literal["divergence", "cross_entropy"] = "divergence",
    over_classes: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Mean KL(softmax(targets / temperature) ‖ softmax(logits / temperature)) of each layer; with `classes [C]`, over those marked.

    With `blocks [K, W]` (see `class_blocks`) every block of classes has a softmax of its own, and the result is their sum.
    `cross_entropy` leaves out the targets' own entropy, which changes no gradient. `over_classes="mean"` divides the term of
    each softmax by the number of classes that it spans, as elementwise means do. Gradients shrink with temperature²; a caller
    that wants them comparable over temperatures multiplies by that.
    """
    student, teacher = full_precision(logits) / temperature, full_precision(targets) / temperature
    if blocks is not None:
        if classes is not None:
            raise ValueError("distillation takes classes or blocks, not both")
        classes = blocks >= 0
        columns = blocks.clamp(min=0).flatten()
        student, teacher = (z.index_select(-1, columns).view(*z.shape[:-1], *blocks.shape) for z in (student, teacher))
    if classes is not None:
        student, teacher = student.masked_fill(~classes, -torch.inf), teacher.masked_fill(~classes, -torch.inf)
    log_p, log_q = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    p = log_p.exp()
    if classes is not None:
        log_p, log_q = log_p.masked_fill(~classes, 0.0), log_q.masked_fill(~classes, 0.0)
    terms = (p * (log_p - log_q) if measure == "divergence" else -p * log_q).sum(dim=-1)
    if over_classes == "mean":
        terms = terms / (student.shape[-1] if classes is None else classes.sum(dim=-1))
    per_image = terms if blocks is None else terms.sum(dim=-1)
    return per_image.mean(dim=-1)


def class_blocks(groups: Sequence[Sequence[int]]) -> Tensor:
    """Return `[K, W]` for `distillation`: a row of class numbers for each group, those of smaller groups filled up
    with -1.
    """
    width = max(map(len, groups), default=0)
    return torch.tensor([[*group, *[-1] * (width - len(group))] for group in groups], dtype=torch.int64).view(len(groups), width)
