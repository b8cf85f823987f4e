"""Closed forms on the features of a net that stays as it is: class means, discriminant analysis and ridge regression.

    W <- drawn once, if there is a map
    for each batch from the stream:
        z <- features of the tapped layers, chosen or joined (features), normalised (norm)
        h <- z, relu(W z), sigmoid(W z) or √(2/M) cos(√(2γ) W z + b) (map)
        add h to counts n_k, class means μ_k and the scatter within classes S_w
    whenever predictions are wanted, one Cholesky factor (functional/closed_forms.py):
        ncm    cosine of h and μ_k, or μ_kᵀh - ½ μ_kᵀμ_k
        lda    μ_kᵀ Λ h - ½ μ_kᵀ Λ μ_k, Λ = [ S_w / n, shrunk ]⁻¹; by OAS with n - K degrees of freedom unless a share is given
        ridge  (Cᵀ (G + λ I)⁻¹ h)_k with an intercept; λ by evidence unless it is given

Nothing has to be tuned: OAS begins near class means and ends as discriminant analysis, and the evidence picks λ from the sums alone
(gcv and held_out are other ways to choose it). The solver and its options read the same sums. Papers are presets of this method:
ncm, slda, ranpac, acil, gacl, foal, air, klda, randumb; fecam keeps the same sums for each class. See methods/closed_form.py for
what it does not do.

The same images in any order and any batches give the same scores to 1e-9, and `gracecl.merge(a, b)` adds what two learners know.
Three options depend on the order: gamma='first' (the first batch), shrink='held_out' (every fifth image), temperature=True.

Evaluations solve anew. Predictions while the stream goes on (`Learner.predict`, prequential ones) take the last solution that was
made for one until it is stale: a class is new, or as many images came as a tenth of all so far or a tenth of M, whichever is less
(refresh=200: 200 images; refresh=0: any). λ is then chosen anew where the images have doubled since. That solution is a part of the
state, so that a resumed learner predicts the same bits. temperature=True divides scores by a running temperature: each batch,
before it is added, is scored by the last solution, and that with the least decayed log loss is used; the solution is then made anew
whenever it is stale, asked for or not.

On a GPU each step with gamma='first', shrink='held_out' or temperature=True waits for the device, as the host asks how many images
came and what the last solution knew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Ints, Progress, Taps
from gracecl.errors import UserError
from gracecl.functional import closed_forms as forms
from gracecl.functional.closed_forms import Linear
from gracecl.functional.sums import Sums
from gracecl.machine import check_room
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.closed_form import BYTES_OF_A_DOUBLE, ClosedForm
from gracecl.methods.state import saved
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast

HELD_OUT_EVERY = 5
TEMPERATURES = 10 ** torch.linspace(-2, 2, 33, dtype=torch.float64)
DECAY = 0.99
"""of log losses, per batch"""
PREFER_1 = 1e-6
"""times the square of the temperature's power of ten is added to log losses that cannot tell temperatures apart"""
STALE_SHARE = 0.1
"""of the images so far or of M: that many new ones make a solution stale"""
SHRINKS = {"ncm": ("auto",), "lda": ("auto", "oas"), "ridge": ("auto", "evidence", "gcv", "held_out")}


@methods.register("closed")
@dataclass(eq=False, repr=False)
class Closed(ClosedForm):
    """Class means, LDA or ridge regression on a pretrained net's features, from one set of sums; no training, no memory."""

    map: Literal["none", "relu", "sigmoid", "rff"] = "none"
    """features as they are, a random layer, or random Fourier features of a Gaussian kernel"""
    size: Annotated[int, AtLeast(1)] = 2000
    """M, the number of random features"""
    solver: Literal["ncm", "lda", "ridge"] = "lda"
    """what is solved for"""
    shrink: Annotated[float, AtLeast(0)] | Literal["auto", "oas", "evidence", "gcv", "held_out"] = "auto"
    """lda: the share of the covariance that is replaced, or oas; ridge: λ, or how it is chosen; auto is oas and evidence"""
    features: Literal["last", "each", "mean", "concat"] = "last"
    """the last tapped layer, a solution for each, or their mean or joined features (of four layers unless --taps says more)"""
    norm: Literal["none", "unit", "layer", "tukey"] = "none"
    """features as they are, of unit length, of mean 0 and variance 1, or their square roots (non-negative ones only)"""
    spread: Literal["normal", "fan_in"] = "normal"
    """W from N(0, 1), or uniform within ±1/√D as nn.Linear draws it"""
    gamma: Annotated[float, Above(0)] | Literal["first"] = "first"
    """γ of the kernel exp(-γ |z - z'|²); first is 1 / (D · variance) of the first batch"""
    score: Literal["cosine", "euclidean"] = "cosine"
    """of ncm"""
    shrink_to: Literal["identity", "variance"] = "variance"
    """of lda with a share: towards I, or I times the mean variance, which does not depend on the scale of features"""
    priors: Literal["uniform", "empirical"] = "uniform"
    """of lda: classes equally likely, or as likely as they were in the stream"""
    intercept: bool = True
    """of ridge"""
    weights: Literal["none", "sqrt", "balanced", "exact"] = "none"
    """of ridge: images count 1, n_k^-½ or 1/n_k; exact is balanced with a scatter kept for each class (K M² numbers)"""
    members: Annotated[int, AtLeast(1)] = 1
    """draws of the map, whose softmaxes are averaged"""
    temperature: bool = False
    """divide scores by a running temperature, so that their softmax are probabilities"""
    refresh: Annotated[int, AtLeast(0)] | Literal["auto"] = "auto"
    """new images after which predictions between evaluations take a new solution; auto is a tenth of all, or of M if less"""

    state: ClassVar[tuple[str, ...]] = ("held_out", "recent", "solved_at", "share", "chosen_at", "log_losses", "gammas")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.shrink, str):
            if self.shrink not in SHRINKS[self.solver]:
                told = " or ".join(map(repr, SHRINKS[self.solver]))
                raise UserError(f"{self.name}: shrink={self.shrink!r} is not for solver={self.solver!r}; use {told}")
        elif self.solver == "ncm" or (self.solver == "lda" and self.shrink > 1) or (self.solver == "ridge" and self.shrink == 0):
            wanted = {"ncm": "'auto'", "lda": "at most 1", "ridge": "above 0"}[self.solver]
            raise UserError(f"{self.name}: shrink must be {wanted} with solver={self.solver!r}")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(trains="never", met_only=True, approximates=True, all_taps=self.features in ("mean", "concat"))

    @property
    def family(self) -> str:
        """Of its scores among the rules."""
        return self.solver

    @property
    def rule(self) -> str:
        return f"{self.family}_last"

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        device = net.classifier.weight.device
        taps = net.layers if self.features == "each" else 1
        width = net.width * (net.layers if self.features == "concat" else 1)
        members = self.members if self.map != "none" else 1
        size = self.size if self.map != "none" else width
        layers = taps * members
        if self.map != "none":
            check_room(BYTES_OF_A_DOUBLE * layers * width * size, f"{size} projections", "use fewer projections")
            shape = (layers, width, size)
            normal = self.spread == "normal"
            drawn = torch.randn(shape, dtype=torch.float64) if normal else torch.rand(shape, dtype=torch.float64)
            self.projection = (drawn if normal else (2 * drawn - 1) / math.sqrt(width)).to(device)
        if self.map == "rff":
            self.phase = (2 * math.pi * torch.rand(layers, 1, size, dtype=torch.float64)).to(device)
        self.begin(layers, size, each_class=self.weights == "exact")
        self.held_out = self.new_sums(layers, size) if self.shrink == "held_out" else Sums(0, net.classes, 0, device)
        self.forget_solution()
        self.log_losses = torch.zeros(layers, len(TEMPERATURES), dtype=torch.float64, device=device)
        self.gammas = torch.zeros(layers, dtype=torch.float64, device=device)
        if not isinstance(self.gamma, str):
            self.gammas += self.gamma

    # Features.

    def chosen(self, features: Tensor) -> Tensor:
        """`[L, B, D]` of the tapped layers, as one or several, normalised."""
        if self.features == "last":
            features = features[-1:]
        elif self.features == "mean":
            features = features.mean(dim=0, keepdim=True)
        elif self.features == "concat":
            features = features.transpose(0, 1).flatten(1).unsqueeze(0)
        if self.norm == "unit":
            return F.normalize(features, dim=-1)
        if self.norm == "layer":
            return F.layer_norm(features, features.shape[-1:])
        return features.sqrt() if self.norm == "tukey" else features

    def mapped(self, features: Tensor) -> Tensor:
        """h `[L · members, B, M]` of the tapped layers' features `[L, B, D]`."""
        z = self.chosen(features.double())
        if self.map == "none":
            return z
        projected = z.repeat_interleave(self.members, dim=0) @ self.projection
        if self.map == "rff":
            kernel = projected * (2 * self.gammas).sqrt()[:, None, None] + self.phase
            return math.sqrt(2 / projected.shape[-1]) * kernel.cos()
        return projected.relu() if self.map == "relu" else projected.sigmoid()

    # Learning.

    def add(self, features: Tensor, labels: Ints) -> None:
        if self.map == "rff" and self.gamma == "first" and self.gammas[0] == 0:
            z = self.chosen(features)
            spread = z.shape[-1] * z.var(dim=(1, 2), correction=0)
            self.gammas = (1 / torch.where(spread > 0, spread, z.shape[-1])).repeat_interleave(self.members)
        h = self.mapped(features)
        if self.temperature:
            self.calibrate(h, labels)
        if self.shrink == "held_out":
            held = (self.images + np.arange(len(labels))) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            for sums, rows in ((self.sums, np.flatnonzero(~held)), (self.held_out, np.flatnonzero(held))):
                if len(rows):
                    sums.add(h[:, torch.from_numpy(rows).to(h.device)], labels[rows])
        else:
            self.sums.add(h, labels)
        if self.temperature and self.stale:
            self.renew()

    @property
    def images(self) -> int:
        """n, of those held out too."""
        return len(self.sums) + len(self.held_out)

    def calibrate(self, h: Tensor, labels: Ints) -> None:
        """Add the log losses of a batch under the last solution, at each temperature, of the classes that this knew."""
        y = torch.from_numpy(labels).to(h.device)
        rows = self.recent.known[y].nonzero().squeeze(1)
        if len(rows) == 0:
            return
        scores = self.scored(self.recent, h[:, rows])
        log_p = (scores / TEMPERATURES.to(h.device)[:, None, None, None]).log_softmax(dim=-1)  # [T, L, B, C]
        own = log_p.gather(-1, y[rows].expand(*log_p.shape[:2], -1)[..., None]).squeeze(-1)
        self.log_losses = DECAY * self.log_losses - own.sum(dim=-1).T

    def merge(self, other: ClosedForm, numbers: Tensor | None = None) -> None:
        if not isinstance(other, Closed) or not torch.equal(self.gammas, other.gammas):
            raise UserError(f"{self.name}: the learners have maps of other widths; give both the same gamma")
        super().merge(other, numbers)
        self.held_out.merge(other.held_out, numbers)
        self.log_losses = self.log_losses + other.log_losses
        self.forget_solution()
        if self.temperature:
            self.renew()

    # Predictions.

    def solve(self) -> Linear:
        """The classifier that follows from the sums."""
        if self.solver == "ncm":
            return forms.nearest_means(self.sums, self.score)
        if self.solver == "lda":
            return forms.discriminant(self.sums, self.covariance(), self.priors)
        ridge = self.ridge(self.all_sums)
        return ridge.at(self.ridges(ridge))

    @property
    def all_sums(self) -> Sums:
        """Those held out included."""
        if self.shrink != "held_out":
            return self.sums
        whole = self.new_sums(*self.sums.means.shape[::2])
        whole.merge(self.sums)
        whole.merge(self.held_out)
        return whole

    def covariance(self) -> Tensor:
        """`[L, M, M]`: S_w / n, shrunk."""
        images, layers = self.sums.images, self.sums.means.new_ones(len(self.sums.means))
        covariance = self.sums.within / images
        if isinstance(self.shrink, str):
            return forms.shrunk(covariance, forms.oas(covariance, images - len(self.sums.met)))
        return forms.shrunk(covariance, self.shrink * layers, self.shrink_to)

    def ridge(self, sums: Sums) -> forms.Ridge:
        return forms.Ridge(sums, self.intercept, "balanced" if self.weights == "exact" else self.weights)

    def ridges(self, ridge: forms.Ridge | None = None) -> Tensor:
        """`[L]`: λ for each layer; what `ridge` solves for on the way is solved for once."""
        if not isinstance(self.shrink, str):
            return self.shrink * self.sums.means.new_ones(len(self.sums.means))
        if self.shrink == "held_out":
            return forms.by_images_held_out(self.sums, self.held_out)
        choose = forms.by_cross_validation if self.shrink == "gcv" else forms.by_evidence
        return choose(self.ridge(self.sums) if ridge is None else ridge)

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        if progress.evaluating:
            self.solution = self.solve()
            return
        if not self.temperature and self.stale:
            self.renew()
        self.solution = self.recent

    # The solution that is taken while the stream goes on.

    def forget_solution(self) -> None:
        """Begin without one."""
        layers, classes, size = self.sums.means.shape
        self.recent = Linear.of_nothing(layers, size, classes, self.sums.counts.device)
        self.solved_at, self.chosen_at = 0, 0  # images
        self.share = self.sums.means.new_ones(layers)
        """λ as a multiple of the scale of features, as it was chosen last"""

    @property
    def stale(self) -> bool:
        """Whether a class is not in the last solution, or many images are not."""
        images, size = self.images, self.sums.means.shape[2]
        enough = STALE_SHARE * min(images, size) if self.refresh == "auto" else self.refresh
        unknown = (self.sums.counts > 0) & ~self.recent.known
        return bool(unknown.any()) or images - self.solved_at >= max(1, enough)

    def renew(self) -> None:
        """Solve for the images so far; λ stays the same share of the scale until they have doubled."""
        if self.solver != "ridge" or not isinstance(self.shrink, str) or self.refresh == 0:
            self.recent = self.solve()
        else:
            ridge = self.ridge(self.all_sums)
            chosen = self.share * ridge.scale
            if self.images >= 2 * self.chosen_at:
                chosen = self.ridges(ridge)
                self.share, self.chosen_at = chosen / ridge.scale, self.images
            self.recent = ridge.at(chosen)
        self.solved_at = self.images

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "solved_at" not in state:  # saved by 0.2.0
            state = state | {name: saved(getattr(self, name)) for name in ("recent", "solved_at", "share", "chosen_at")}
        super().load_state_dict(state)

    def scored(self, solution: Linear, h: Tensor) -> Tensor:
        """`[L · members, B, C]`, at temperature 1."""
        return solution(F.normalize(h, dim=-1) if self.solver == "ncm" and self.score == "cosine" else h)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        scores = self.scored(self.solution, self.mapped(out.features))
        if self.temperature:
            powers = TEMPERATURES.log10().square().to(scores.device)
            best = (self.log_losses + PREFER_1 * powers).argmin(dim=1)
            scores = scores / TEMPERATURES.to(scores.device)[best][:, None, None]
        if self.members > 1:
            of_each = scores.reshape(-1, self.members, *scores.shape[1:]).log_softmax(dim=-1)
            scores = of_each.logsumexp(dim=1) - math.log(self.members)
        return {self.family: scores}
