"""The comparison with the MOSE authors' program, on a stand-in: the same module layout, with our own net and losses inside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import authors
from benchmarks.__main__ import call
from gracecl.errors import UserError

NET = """
from torch import nn
from gracecl.nets.resnet import ResNet18

class Net(nn.Module):
    def __init__(self, classes, nf):
        super().__init__()
        whole = self.whole = ResNet18(3, nf, 4)
        self.conv1, self.bn1 = whole.stem[0], whole.stem[1]
        self.layer1, self.layer2, self.layer3, self.layer4 = whole.stages
        self.attention_layers, self.feature_alignment_layer = whole.gates, whole.chains
        self.linear = nn.ModuleList(nn.Linear(8 * nf, classes) for _ in range(4))
        self.simclr = nn.ModuleList(nn.Linear(8 * nf, 128) for _ in range(4))
        self.final_addaption_layer = nn.Linear(8 * nf, 8 * nf)

def resnet18_sd(nclasses, nf=64):
    return Net(nclasses, nf)
"""
BUFFER = """
import torch

class Buffer:
    def __init__(self, args, input_size):
        self.x, self.y, self.t = torch.empty(0, *input_size).cuda(), torch.empty(0, dtype=torch.int64), torch.empty(0)
        print("a buffer")

    def add_reservoir(self, x, y, logits, t):
        self.x, self.y, self.t = torch.cat([self.x, x]), torch.cat([self.y, y]), torch.cat([self.t, torch.full((len(y),), t)])

    def draw(self, among, number):
        rows = among.nonzero().flatten()[:number]
        return self.x[rows], self.y[rows]
"""
LOSS = """
from gracecl.functional.losses import supervised_contrast

def sup_con_loss(features, temperature, labels):
    return supervised_contrast(features[None], labels, temperature)[0]
"""
AGENT = """
import torch
from torch import nn
from torch.nn import functional as F
from losses.loss import sup_con_loss
from utils import four

class MOSE:
    def __init__(self, model, buffer, optimizer, input_size, args):
        self.model, self.buffer, self.optimizer, self.args, self.class_holder = model, buffer, optimizer, args, []

    def train(self, task, loader):
        log, new = [], []
        for number, (x, y) in enumerate(loader):
            new += [label for label in dict.fromkeys(y.tolist()) if label not in new]
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            more, more_y = self.buffer.draw(self.buffer.t == task, 22 if number else 0)
            past, past_y = self.buffer.draw(self.buffer.t != task, self.args.buffer_batch_size - 10)
            new_y, all_y = torch.cat([y, more_y]).repeat(4), torch.cat([y, past_y]).repeat(4)
            cut = len(new_y)
            features = self.model.whole(torch.cat([four(torch.cat([x, more])), four(torch.cat([x, past]))]))
            student = F.normalize(self.model.final_addaption_layer(features[-1]), dim=1)
            losses = dict.fromkeys(["train/ins", "train/ce", "train/distill"], 0)
            for layer, feature in enumerate(features):
                logits = self.model.linear[layer](feature)
                losses["train/ins"] += sup_con_loss(self.model.simclr[layer](feature), self.args.ins_t, torch.cat([new_y, all_y]))
                places = torch.tensor([new.index(label) for label in new_y.tolist()])
                losses["train/ce"] += WEIGHT * F.cross_entropy(logits[cut:], all_y) + F.cross_entropy(logits[:cut, new], places)
                if layer < 3:
                    losses["train/distill"] += torch.dist(student, F.normalize(feature.detach(), dim=1))
            sum(losses.values()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.buffer.add_reservoir(x=x, y=y, logits=None, t=task)
            log.append(losses)
        return log
"""
UTILS = """
import kornia.augmentation as K
import torch
from kornia.augmentation.auto import RandAugment

def four(x):
    return torch.cat([x, x.flip(-1), 0.9 * x, 0.9 * x.flip(-1)])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_program(tmp_path / "MOSE")


def write_program(folder: Path, weight: float = 2.0) -> Path:
    files = {
        "agent/__init__.py": "import a_package_that_nobody_has",
        "agent/mose.py": AGENT.replace("WEIGHT", str(weight)),
        "models/Resnet18_SD.py": NET,
        "models/buffer.py": BUFFER,
        "losses/loss.py": LOSS,
        "utils/__init__.py": UTILS,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_both_step_on_as_many_images_and_agree(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, file = torch.get_num_threads(), checkout / "rows.json"
    assert call(["authors", "--mose", str(checkout), "--quick", "--json", str(file)]) == 0
    assert "a buffer" not in capsys.readouterr().out
    assert torch.get_num_threads() == threads
    objective, step = json.loads(file.read_text(encoding="utf-8"))
    assert objective["met"]
    assert objective["ratio"] < 1e-12  # a difference of single precision would be 1e-8
    assert step["details"]["images"] == step["details"]["images_against"] == 384
    assert step["ratio"] > 0


def test_another_objective_is_noticed(tmp_path: Path) -> None:
    program = authors.Program(write_program(tmp_path, weight=1.0))
    found = authors.same_objective(program, 2, (3, 8, 8))
    assert not found.met
    assert found.details["contrast_apart"] < 1e-12 > found.details["distillation_apart"]
    assert found.details["cross-entropy_apart"] > 0.1
    assert found.details["gradient_apart"] > 1e-3


def test_the_program_leaves_no_trace_in_the_process(checkout: Path) -> None:
    path, cuda, available = list(sys.path), torch.Tensor.cuda, torch.cuda.is_available
    names = {name for name in sys.modules if name.partition(".")[0] in (*authors.PACKAGES, "kornia")}
    authors.Program(checkout)
    assert sys.path == path
    assert names == {name for name in sys.modules if name.partition(".")[0] in (*authors.PACKAGES, "kornia")}
    assert (torch.Tensor.cuda, torch.cuda.is_available) == (cuda, available)


def test_a_program_that_cannot_be_imported_is_told_in_one_sentence(checkout: Path) -> None:
    (checkout / "losses" / "loss.py").write_text("import a_package_that_nobody_has", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot be imported .*a_package_that_nobody_has"):
        authors.Program(checkout)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["authors"], "--mose PATH"),
        (["authors", "--mose", "nowhere"], "there is no folder nowhere"),
        (["authors", "--mose", "."], "is no checkout"),
        (["passes", "--mose", "."], "--mose is for the part 'authors'"),
    ],
)
def test_a_wrong_path_is_told_before_anything_is_measured(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert len(printed.err.strip().splitlines()) == 1
