"""A Lightning module with and without feedback, on the digits."""

import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gracecl
from gracecl.integrations.lightning import GraceCallback, LastExit

warnings.filterwarnings("ignore", ".*")  # Lightning's hints on loaders and loggers
digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        self.model = LastExit(gracecl.tap(body, classes=10, example=x[:2]))

    def training_step(self, batch, number):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


quiet = {
    "max_epochs": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
for name, callbacks in (("plain", []), ("with feedback", [GraceCallback()])):
    seed_everything(0, verbose=False)
    module = Classifier()
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)
    Trainer(callbacks=callbacks, accelerator="cpu", **quiet).fit(module, loader)
    module.eval()
    right = (module.model(x[1400:]).argmax(dim=1) == y[1400:]).float().mean().item()
    print(f"{name}: {100 * right:.1f} % of the test images right")
