# Everything a contributor or a visitor needs; README and CI use these targets and no other commands.
VENV ?= .venv
BIN := $(VENV)/bin
# pip would compile one module after the other.
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # some packages carry files that are not Python
# Two test processes with one thread each are faster here than one with two.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: install demo test formats test-all test-exhaustive test-browser docs site mutants bench check fix dist clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	$(COMPILE)
	touch $@

demo: install  ## train er, mose and grace on the embedded digits, print a table, make the page runs/demo/report.html
	$(BIN)/gracecl run er mose grace --stream split-digits --memory 100 --net "resnet18(width=6)" --seeds 0-1 --eval-every 15 --out runs/demo

test: install  ## the tests to run while working: four minutes on two cores
	$(TEST) -m "not slow and not exhaustive and not browser"

$(VENV)/.formats: $(VENV)/.installed  # what only some tests need, so that a demo need not wait for it
	$(PIP_INSTALL) -c constraints.txt -e ".[formats]"
	$(COMPILE)
	touch $@

formats: $(VENV)/.formats

test-all: formats  ## what must pass before a change lands, but for the browser's tests
	$(TEST) -m "not exhaustive and not browser"

test-exhaustive: formats  ## before a release: every pair of methods, every bit, every law around every method; a quarter of an hour
	$(TEST) -m exhaustive

test-browser: install  ## the report's page in a real browser; installs Debian's chromium where there is none
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium > /dev/null; }
	$(BIN)/python -c "import playwright" 2> /dev/null || $(PIP_INSTALL) -c constraints.txt -e ".[browser]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/test_browser.py

docs: install  ## the manual, into docs/_build/html; warnings are errors; NOTEBOOKS=off shows tutorials without their output
	$(BIN)/python -c "import sphinx, furo, myst_nb" 2> /dev/null || $(PIP_INSTALL) -c constraints.txt -e ".[docs]"
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -c docs $(if $(NOTEBOOKS),-D nb_execution_mode=$(NOTEBOOKS)) . docs/_build/html

site: docs  ## the manual beside those of other versions: SITE/0.3.0, with a choice of version in the side bar; SITE=dir
	$(BIN)/python docs/manual/versions.py $(or $(SITE),docs/_build/site)

mutants: install  ## single errors in a copy of the source, one for every equation at least: a test must find each; ONLY=methods/er.py or CHANGED=main for some of them
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants $(ONLY) $(if $(CHANGED),--changed $(CHANGED))

bench: install  ## ratios of what gracecl costs, into runs/bench.json; half an hour on two cores; PARTS="steps memory" for some of them
	mkdir -p runs
	$(BIN)/python -m benchmarks $(PARTS) --json runs/bench.json

check: install  ## formatting, style, types, import order
	$(BIN)/ruff format --check src tests benchmarks docs/conf.py docs/manual
	$(BIN)/ruff check src tests benchmarks docs/conf.py docs/manual
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: install  ## format and mend what can be mended automatically
	$(BIN)/ruff format src tests benchmarks docs/conf.py docs/manual
	$(BIN)/ruff check --fix src tests benchmarks docs/conf.py docs/manual

dist: install  ## source archive and wheel, into dist/
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) runs build dist
