"""CIFAR-10. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."""

from gracecl.data.cifar import Cifar
from gracecl.data.source import Archive
from gracecl.registry import datasets


@datasets.register("cifar10")
class Cifar10(Cifar):
    """CIFAR-10: 50,000 + 10,000 colour images of 32 px, 10 classes."""

    name = "cifar10"
    folder = "cifar-10-batches-py"
    classes = 10
    tasks = 5
    archives = (
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    )
    train_files = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
    test_file = "test_batch"
    meta_file = "batches.meta"
    label_key = "labels"
    names_key = "label_names"
