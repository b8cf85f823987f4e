"""Your own network with a head at each of its blocks: for a loop of your own, and under any method, given as it is or by a name."""

import torch
from torch import nn

import gracecl
from gracecl.data import load
from gracecl.nets import ModuleBackbone
from gracecl.registry import nets


def cnn(channels):
    pairs = [(channels, 16), (16, 32), (32, 64)]
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairs))


net = gracecl.tap(cnn(1), classes=10)
print("tapped at", *net.backbone.names, "with logits", *net(torch.randn(4, 1, 32, 32)).logits.shape)
nets.register("cnn")(lambda shape, taps, at_most: ModuleBackbone(cnn(shape[0]), None, taps, at_most, (1, *shape)))
digits = load("digits")
learner = gracecl.Learner("grace(er())", net=cnn(1), memory=100, augment="none")  # or net="cnn", as commands have it
for start in range(0, 400, 10):
    learner.learn(digits.train_x[start : start + 10], digits.train_y[start : start + 10])
print(learner, f"{learner.evaluate(digits.test_x, digits.test_y).overall:.0f} % of the test digits after 400 images")
