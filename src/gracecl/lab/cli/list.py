"""`gracecl list`."""

from __future__ import annotations

from typing import Literal

from gracecl.errors import UserError
from gracecl.lab.cli.values import with_plugins
from gracecl.terminal import print_out


@with_plugins
def list_names(
    kind: Literal["methods", "streams", "nets", "datasets", "controllers", "detectors", "renderers"],
    /,
    describe: bool = False,
    markdown: bool = False,
    plugin: tuple[str, ...] = (),
) -> None:
    """Print the names there are, a line each; of methods, what they need, keep and cost.

    Args:
        kind: what to list
        describe: of methods, a sentence each instead
        markdown: of methods, the table as the page docs/methods.md
        plugin: modules or files that register more
    """
    from gracecl import registry
    from gracecl.lab import catalogue

    if kind != "methods" and (describe or markdown):
        raise UserError(f"--describe and --markdown are for methods; 'gracecl list {kind}' describes each by itself")
    if kind == "methods" and not describe:
        print_out(catalogue.markdown() if markdown else catalogue.table(), end="" if markdown else "\n")
        return

    found = {
        "methods": registry.methods,
        "streams": registry.streams,
        "nets": registry.nets,
        "datasets": registry.datasets,
        "controllers": registry.controllers,
        "detectors": registry.detectors,
        "renderers": registry.renderers,
    }[kind].summaries()
    if kind == "streams":
        found = {f"{family.replace('_', '-')}-DATA": text for family, text in found.items()}
    widest = max(map(len, found))
    for name, text in found.items():
        print_out(f"{name:<{widest}}  {text}")
    if kind == "streams":
        print_out(
            f"\nDATA is {', '.join(registry.datasets.names())} or folder. What begins with 'Around' also takes another stream:"
        )
        print_out("\"noisy(longtail(i-blurry-cifar100(tasks=5), 100), 0.2)\". 'gracecl stream show STREAM' draws one.")
