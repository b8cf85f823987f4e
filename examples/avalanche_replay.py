"""Avalanche's own Replay strategy with and without feedback, on the digits in five experiences of two classes."""

import torch

# "operator torchvision::nms does not exist" means that torch and torchvision are of different builds: install matching ones.
from avalanche.benchmarks import nc_benchmark
from avalanche.training import Replay
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import gracecl
from gracecl.integrations.avalanche import GracePlugin, LastExit

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
train, test = (TensorDataset(x[rows], y[rows]) for rows in (slice(0, 1400), slice(1400, None)))
for data, targets in ((train, y[:1400]), (test, y[1400:])):
    data.targets = targets.tolist()

for name, plugins in (("replay", []), ("replay with feedback", [GracePlugin()])):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    net = gracecl.tap(model, classes=10, example=x[:2])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    settings = {"mem_size": 100, "train_mb_size": 10, "plugins": plugins, "evaluator": None}
    strategy = Replay(model=LastExit(net), optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **settings)
    benchmark = nc_benchmark(train, test, n_experiences=5, task_labels=False, seed=0)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    net.eval()
    right = (net(x[1400:]).logits[-1].argmax(dim=1) == y[1400:]).float().mean().item()
    print(f"{name}: {100 * right:.1f} % of the test images right after all experiences")
