"""The page of a study: `<name>.md` and `<name>.json` beside its runs, made of those that are finished."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gracecl.errors import UserError
from gracecl.files import write_json, write_text
from gracecl.lab.studies import table
from gracecl.lab.studies.results import Results, Section
from gracecl.lab.studies.study import Study
from gracecl.registry import renderers

SETTING = ("stream", "net", "memory", "optimizer", "augment")
"""what runs of a study have in common, for the most part"""
NOTES = (
    "Percent: mean ± sample standard deviation over seeds; seeds are paired, each gives every method the same stream. Images and "
    "seconds are those of training, per step of the stream, with scoring, teachers, ends of tasks and fits before evaluation; the "
    "evaluation itself is not in them. Runs side by side share a machine, so seconds are rough."
)


@dataclass(frozen=True)
class Made:
    """Provenance of a page's runs."""

    command: str
    planned: int
    """runs that the study asks for"""
    taken_from: Mapping[str, int]
    """runs of other folders, by folder"""


def write(study: Study, results: Results, made: Made) -> str:
    """Write both files and the pictures; return the table."""
    found, configs = table.lines(results.runs), [run.config for run in results.runs]
    setting = {key: list(dict.fromkeys(config.get(key) for config in configs)) for key in SETTING}
    commits = Counter(str(config.get("commit")) for config in configs)
    versions = Counter(str(config.get("versions", {}).get("gracecl")) for config in configs)
    seeds = sorted({config["seed"] for config in configs})
    steps = sorted({line.steps for line in found})
    text = table.markdown(found, results.runs)
    sections = [section for name in study.show for section in rendered(name, results)]
    told = "; ".join(f"{key} {' / '.join(f'`{value}`' for value in values)}" for key, values in setting.items())
    made_by = f"Command: `{made.command}`. Finished: {len(configs)} of {made.planned} runs. Commit: {counted(commits)}. "
    made_by += f"Version: {counted(versions)}. Seeds: {', '.join(map(str, seeds))}. Steps: {', '.join(map(str, steps))}."
    if made.taken_from:
        made_by += f" Taken from other studies: {', '.join(f'{count} of `{folder}`' for folder, count in made.taken_from.items())}."
    above, below = ([section.text for section in sections if section.leads == leads] for leads in (True, False))
    parts = [f"# Study {study.name}", f"**{study.scale_sentence}**", study.about, *above, told, text, NOTES, made_by, *below]
    described = {
        "study": study.name,
        "scale": study.scale,
        "command": made.command,
        "planned": made.planned,
        "finished": len(configs),
        "commits": list(commits),
        "versions": list(versions),
        "taken_from": dict(made.taken_from),
        "taken_over": [os.path.relpath(run.path, results.out) for run in results.runs if not run.path.is_relative_to(results.out)],
        "seeds": seeds,
        "setting": setting,
        "lines": [asdict(line) for line in found],
    }
    more = {section.key: section.data for section in sections}
    if taken := more.keys() & described.keys():
        raise UserError(f"a section of the page has the key '{min(taken)}', which {study.name}.json has already; give it another")
    write_text(results.out / f"{study.name}.md", "\n\n".join(parts) + "\n")
    write_json(results.out / f"{study.name}.json", described | more)
    return text


def rendered(name: str, results: Results) -> list[Section]:
    """Call a renderer and check what it returns."""
    sections = renderers.get(name)(results)
    if not isinstance(sections, list) or not all(isinstance(section, Section) for section in sections):
        raise UserError(f"the renderer '{name}' returned {sections!r:.80}; return a list of gracecl.lab.studies.results.Section")
    return sections


def counted(found: Mapping[str, int]) -> str:
    """Format counts: `a` alone, or each name with its number of runs."""
    return f"`{next(iter(found))}`" if len(found) == 1 else ", ".join(f"`{name}` ({count} runs)" for name, count in found.items())
