"""Where the time of a step goes, by operation."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from benchmarks.scene import Scene

SHOWN = 14


def text(quick: bool) -> str:
    """A table of the operations that take longest in a step of the paper's system."""
    width, steps = (4, 1) if quick else (20, 5)
    scene = Scene("grace(mose())", f"resnet18(width={width})")
    images = scene.images_per_step()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(steps):
            scene.step()
    operations = sorted(watched.key_averages(), key=lambda operation: -operation.self_cpu_time_total)
    total = sum(operation.self_cpu_time_total for operation in operations)
    lines = [
        f"One step of grace(mose()), ResNet-18 of width {width}, {images} images: {total / steps / 1e3:.0f} ms.",
        "",
        "| operation | share | ms per step | calls per step |",
        "|---|---|---|---|",
    ]
    for operation in operations[:SHOWN]:
        own = operation.self_cpu_time_total
        lines.append(f"| {operation.key} | {own / total:.1%} | {own / steps / 1e3:.1f} | {operation.count / steps:.0f} |")
    return "\n".join(lines)
