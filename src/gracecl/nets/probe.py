"""A linear classifier on the features of a net that stays as it is, fitted to the images of a memory."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gracecl.core import Ints
from gracecl.nets.tapped import TappedNet


class LinearProbe:
    """Logistic regression at each tap, of scikit-learn, in which every class weighs the same however many images it has.

    Images go through the net once, as they are. A class without images is never predicted; with no image at all nothing is known
    and all scores are 0.
    """

    def __init__(self, net: TappedNet, images: Tensor, labels: Ints, seen: tuple[int, ...], inverse_strength: float) -> None:
        """`seen` are the classes in the order in which they were met; `inverse_strength` is scikit-learn's C."""
        like = net.classifier.weight
        self.weight = torch.zeros(net.layers, net.width, net.classes, device=like.device)
        self.bias = torch.zeros(net.layers, 1, net.classes, device=like.device)
        held = [label for label in seen if label in set(labels.tolist())]
        if held:
            self.bias[:, :, [label for label in range(net.classes) if label not in held]] = -torch.inf
        if len(held) < 2:
            return
        features = torch.cat([taps.features for _, taps in net.sweep(images)], dim=1).double().cpu().numpy()
        rank = {label: number for number, label in enumerate(held)}  # so that the fit does not depend on class numbers
        ranks = [rank[label] for label in labels.tolist()]
        for layer, of_layer in enumerate(features):
            weight, bias = logistic_regression(of_layer, ranks, inverse_strength)
            self.weight[layer, :, held], self.bias[layer, 0, held] = weight.to(self.weight), bias.to(self.bias)

    def __call__(self, features: Tensor) -> Tensor:
        """Return `[L, B, C]`: the scores of the classes, whose softmax are their probabilities."""
        return torch.baddbmm(self.bias, features.float(), self.weight)


def logistic_regression(features: object, labels: list[int], inverse_strength: float) -> tuple[Tensor, Tensor]:
    """Weights `[D, C]` and biases `[C]` for labels 0, …, C - 1, all of which occur."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    regression = LogisticRegression(C=inverse_strength, class_weight="balanced", max_iter=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after so many iterations what is left does not matter
        regression.fit(features, labels)
    weight, bias = torch.from_numpy(regression.coef_).T, torch.from_numpy(regression.intercept_)
    if weight.shape[1] == 1:  # of two classes it gives the difference alone
        weight, bias = (torch.cat([torch.zeros_like(part), part], dim=-1) for part in (weight, bias))
    return weight, bias
