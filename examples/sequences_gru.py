"""Sequences [T, D] through a GRU: waves of six shapes, which come two at a time; the labels are names."""

import numpy as np
from torch import nn

import gracecl

rng = np.random.default_rng(0)
SHAPES = {"sine": np.sin, "square": lambda t: np.sign(np.sin(t)), "saw": lambda t: (t / np.pi) % 2 - 1}
SHAPES |= {f"fast {name}": lambda t, wave=wave: wave(3 * t) for name, wave in SHAPES.items()}


def batch(names, size=20):
    labels = rng.choice(names, size)
    time = np.linspace(0, 6, 30) + rng.uniform(0, 6, (size, 1))
    waves = np.stack([SHAPES[label](t) for label, t in zip(labels, time, strict=True)])
    return np.stack([waves, np.gradient(waves, axis=1)], axis=2) + 0.1 * rng.normal(size=(size, 30, 2)), labels


class GRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 32, batch_first=True)

    def forward(self, x):
        return self.gru(x)[1][-1]


learner = gracecl.Learner("er", memory=120, net=GRU(), optimizer="adam(lr=0.01)")
names = list(SHAPES)
for task in (names[:2], names[2:4], names[4:]):
    for _ in range(60):
        learner.learn(*batch(task))
x, y = batch(names, 300)
print(f"{learner.evaluate(x, y).overall:.0f} % of six shapes of waves; the first are {', '.join(learner.predict(x[:3]))}")
