"""MNIST. LeCun et al., Gradient-based learning applied to document recognition, 1998."""

from gracecl.data.idx import IdxSource
from gracecl.data.source import Archive
from gracecl.registry import datasets

ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist"


@datasets.register("mnist")
class Mnist(IdxSource):
    """MNIST: 60,000 + 10,000 grey images of handwritten digits, 28 px, 10 classes."""

    name = "mnist"
    folder = "mnist"
    mean = (0.1307,)
    std = (0.3081,)
    class_names = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    train_counts = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    test_counts = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    digest = "d1610322d66eb72154240973bb563901dd63501f385ab5e4a56ea0e6cadebb85"
    archives = (
        Archive(f"{ADDRESS}/train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        Archive(f"{ADDRESS}/train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        Archive(f"{ADDRESS}/t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        Archive(f"{ADDRESS}/t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
