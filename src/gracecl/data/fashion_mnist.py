"""Fashion-MNIST. Xiao et al., Fashion-MNIST: a Novel Image Dataset for Benchmarking, arXiv 1708.07747, 2017."""

from gracecl.data.idx import IdxSource
from gracecl.data.source import Archive
from gracecl.registry import datasets

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"


@datasets.register("fashion-mnist")
class FashionMnist(IdxSource):
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothes, 28 px, 10 classes."""

    name = "fashion-mnist"
    folder = "fashion-mnist"
    mean = (0.2860,)
    std = (0.3530,)
    class_names = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    train_counts = (6000,) * 10
    test_counts = (1000,) * 10
    digest = "74b31b84f08a8b4917a222600b0f6a5d659185eb6bbab9772c5a4915a7735b24"
    archives = (
        Archive(f"{ADDRESS}/train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        Archive(f"{ADDRESS}/train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        Archive(f"{ADDRESS}/t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        Archive(f"{ADDRESS}/t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    )
