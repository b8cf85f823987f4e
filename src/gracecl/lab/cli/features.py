"""`gracecl features`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.lab.cli.values import with_plugins
from gracecl.terminal import print_out


@with_plugins
def features(
    net: str,
    source: str,
    /,
    out: Path,
    size: int | None = None,
    taps: int = 1,
    normalise: str = "auto",
    precision: Literal["single", "half"] = "single",
    backend: Literal["auto", "torch", "onnx"] = "auto",
    seed: int = 0,
    threads: int | None = None,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
) -> None:
    """Compute the features that a net makes of a data set's images, once, for streams such as split-features(path='FILE').

    Given again after it was stopped, it goes on where it was.

    Args:
        net: an expression such as efficientnet_lite0 or "timm(name='resnet18', pretrained=True)"; 'gracecl list nets' names them
        source: a data set such as cifar100, a stream such as "split-cifar100(classes='0-19')", or a folder of images
        out: file to write
        size: pixels a side that the net sees (default: the data set's)
        taps: tapped layers, counted from the last; the vectors of several stand side by side
        normalise: mean and std of pixels: auto is a pretrained net's own, else data, the data set's; half, imagenet, clip or none
        precision: of the features in the file, 4 or 2 bytes each
        backend: what computes them: ONNX Runtime where it is installed, else PyTorch
        seed: of the weights of a net that is not pretrained
        threads: cores to use (default: all)
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register more
    """
    import torch

    from gracecl.data.features import FeatureFile
    from gracecl.embedding import embed
    from gracecl.lab.runs.run import with_threads

    with with_threads(threads or torch.get_num_threads()):
        made = embed(
            net,
            source,
            out=out,
            size=size,
            taps=taps,
            normalise=normalise,
            precision=precision,
            backend=backend,
            seed=seed,
            root=data,
        )
    origin = FeatureFile.open(out.expanduser().resolve()).origin
    count, width = len(made.train_y) + len(made.test_y), made.shape[0]
    print_out(f"{out}: {width:,} features of {count:,} images of {made.name}, {origin.precision} precision, by {origin.backend}")
    print_out(f'learn from them: gracecl run slda --net "identity()" --stream "split-features(path=\'{out}\')"')
