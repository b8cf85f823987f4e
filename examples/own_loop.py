"""Feedback in a training loop of your own: no trainer, no stream, no memory of ours."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import gracecl
from gracecl.functional.losses import cross_entropy

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
order = torch.argsort(y, stable=True)  # class after class: what was learned first is forgotten first

torch.manual_seed(0)
my_model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
net = gracecl.tap(my_model, classes=10, example=x[:2])
feedback = gracecl.Feedback(net.layers, "paper(adaptive=True)")  # the paper's α too; without, α stays 1, which is safer
optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
for step, rows in enumerate(order.split(10)):
    replayed = order[torch.randint(0, 10 * step + 1, (20,))]
    rows = torch.cat([rows, replayed])
    out = net(x[rows])
    loss = feedback(out.logits, cross_entropy(out.logits, y[rows]))  # Σ α·CE + γ·H, and it logs itself
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 36 == 35:
        past = order[: 10 * step]
        feedback.observe_past(net, x[past], y[past])  # once per task, or every k steps

print("accuracy of each layer on the past:", [round(a, 3) for a in feedback.accuracy.tolist()])
print("α of each layer now:", [round(float(a), 2) for a in feedback.history["alpha"][-1]])
