"""Settings of the manual, which `make docs` builds from the whole repository: pages link to results and examples where they lie."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from gracecl import __version__

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))  # the package `manual`, which makes pages of code and results

project = "gracecl"
author = "The gracecl authors"
copyright = author
version = release = __version__
language = "en"
smartquotes = False  # options and code stand in sentences, and "--taps" must stay what one types

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/start/*.md",
    "docs/tutorials/*.md",
    "docs/methods/*.md",
    "docs/project/*.md",
    "docs/reference/**",
    "results/**.md",
    "results/**/*.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [
    ".*",
    "src",
    "tests",
    "runs",
    "build",
    "dist",
    "examples",
    "benchmarks",
    "docs/_build",
    "docs/manual",
    "results/bench/profile.md",
]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton", "manual"]

# Text.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Notebooks: executed once, again when their text changes.
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "notebooks")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"
# Reports begin below the first level; docstrings of scikit-learn name its own pages and terms.
suppress_warnings = ["myst.header", "ref.ref", "ref.term"]

# API reference.
autosummary_generate = True
autodoc_member_order = "bysource"
autoclass_content = "both"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
default_role = "code"
napoleon_google_docstring = True
warnings.filterwarnings("ignore", category=DeprecationWarning)

# Looks.
html_theme = "furo"
html_title = f"gracecl {version}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
templates_path = [str(DOCS / "_templates")]  # absolute: autosummary would look below the source folder
html_sidebars = {
    "**": [f"sidebar/{part}.html" for part in ("scroll-start", "brand", "versions", "search", "navigation", "scroll-end")]
}
html_additional_pages = {"index": "to_docs.html"}
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
