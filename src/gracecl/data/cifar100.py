"""CIFAR-100. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."""

from gracecl.data.cifar import Cifar
from gracecl.data.source import Archive
from gracecl.registry import datasets


@datasets.register("cifar100")
class Cifar100(Cifar):
    """CIFAR-100: 50,000 + 10,000 colour images of 32 px, 100 classes (fine labels)."""

    name = "cifar100"
    folder = "cifar-100-python"
    classes = 100
    tasks = 10
    archives = (
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    )
    train_files = ("train",)
    test_file = "test"
    meta_file = "meta"
    label_key = "fine_labels"
    names_key = "fine_label_names"
    digest = "8ec0b703b02af4eaf1178317658a7737fa3d9701b8fedd2aa07dfd67adc2ae75"
