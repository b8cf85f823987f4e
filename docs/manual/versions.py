"""Put a built manual beside those of other versions: `python docs/manual/versions.py SITE`.

SITE/0.3.0/ is the manual of that version, SITE/versions.js what the choice of a version in its side bar reads, and
SITE/index.html leads to the newest. A manual that is built alone shows its version and no choice.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

BUILT = Path(__file__).parent.parent / "_build/html"
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
NEWEST = """\
<!doctype html>
<meta charset="utf-8">
<title>gracecl</title>
<meta http-equiv="refresh" content="0; url={}/docs/index.html">
"""


def publish(built: Path, version: str, site: Path) -> list[str]:
    """Copy a built manual to its place, and list the versions that are there, the newest first."""
    shutil.copytree(built, site / version, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    found = sorted((path.name for path in site.iterdir() if VERSION.fullmatch(path.name)), key=numbers, reverse=True)
    (site / "versions.js").write_text(f"showVersions({json.dumps(found)});\n", encoding="utf-8")
    (site / "index.html").write_text(NEWEST.format(found[0]), encoding="utf-8")
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    from gracecl import __version__

    publish(BUILT, __version__, Path(sys.argv[1]))
