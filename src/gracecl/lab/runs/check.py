"""Check the options of a run before data is loaded or a net is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gracecl import detectors, nets, streams
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.images.augment import augmentation, normalisation
from gracecl.inputs import Images
from gracecl.registry import spec
from gracecl.registry.options import BY_THE_NET, RunOptions

RGB = Images((3, 1, 1))
EXPRESSIONS: Mapping[str, Callable[[str], Any]] = {
    "method": spec.parse_method,
    "net": nets.check,
    "stream": streams.check,
    "augment": augmentation,
    "optimizer": optim.check,
    "scheduler": lambda text: text is None or optim.scheduler(text),
    "boundaries": detectors.build,
    "normalise": lambda text: text == BY_THE_NET or normalisation(text, RGB),
}
"""parsers of the options that are names or expressions; each raises UserError"""


def check_option(owner: str, name: str, value: Any) -> None:
    """Refuse a value that an option of a run cannot have; `owner` is who gave it."""
    spec.check_options(RunOptions, owner, {name: value})
    if name in EXPRESSIONS:
        try:
            EXPRESSIONS[name](value)
        except UserError as error:
            raise UserError(f"{owner}: {name}: {error}") from None
