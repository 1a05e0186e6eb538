# Everything a fresh machine needs is Python (3.10 to 3.13), git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLOWER := $(VENV)/flower

.PHONY: help demo reproduce bench test-fast test test-integrations test-extras test-matrix test-gpu fuzz faults api-fuzz loop-fuzz check docs notebooks format install clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "make %-18s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

install: $(STAMP)  ## .venv with clipwise and the development tools

demo: $(STAMP)  ## train on real digits, without privacy and at two privacy budgets
	$(BIN)/clipwise demo

PAPER ?= batch-clipping
reproduce: $(STAMP)  ## an experiment by name: make reproduce PAPER=lip-dp-sgd ARGS='--data DIR'; PAPER=--help lists all
	$(BIN)/python -m experiments $(PAPER) $(ARGS)

bench: $(STAMP)  ## time and memory beside non-private training: make bench ARGS=--quick
	$(BIN)/python -m benchmarks $(ARGS)

test-fast: $(STAMP)  ## the first case of each quick test, while editing
	$(BIN)/python -m pytest -n auto -m "not integration" --fast

test: $(STAMP)  ## the test suite, without the integrations
	$(BIN)/python -m pytest -n auto -m "not integration"

# Flower requires older versions of rich, typer and packaging than development does. It gets an environment of its own,
# which falls back to the packages of the main one.
$(FLOWER)/.installed: $(STAMP)
	$(BIN)/python -m venv $(FLOWER)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check -q -c constraints-flower.txt flwr
	touch $@

# Tests of the report use the Chromium of the machine, or Debian's package where it is missing.
CHROMIUM := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))
build/browser:
	@mkdir -p build
	@if [ -n "$(CHROMIUM)" ]; then touch $@; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium && touch $@; \
	else echo "The browser tests need Chromium: install the package chromium." >&2; fi

test-integrations: $(STAMP) $(FLOWER)/.installed build/browser  ## frameworks, browser, notebooks, processes, experiments
	$(BIN)/python -m pytest -n auto -m integration
	$(FLOWER)/bin/python -m pytest -n 0 -m integration tests/integrations/test_flower*.py

test-extras: $(STAMP)  ## each extra alone in a fresh environment; ARGS=--lowest: the lowest versions that it allows
	$(BIN)/python -m tests.extras $(ARGS)

# The versions of this machine, with those of pyenv; the workflow in .github runs all four.
VERSIONS := 3.10 3.11 3.12 3.13
found = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)) $(shell python$(1) -c "print('python$(1)')" 2>/dev/null))
PYTHONS ?= $(foreach version,$(VERSIONS),$(call found,$(version)))
test-matrix:  ## the test suite under every Python version that is installed; PYTHONS='python3.12 ...' chooses
	@echo "Python versions: $(PYTHONS)"
	for python in $(PYTHONS); do \
		$(MAKE) test PYTHON=$$python VENV=build/venv-$$(basename $$python) || exit 1; \
	done

test-gpu:  ## exactness, kernels and compiled steps on a GPU; needs torch, numpy and scipy, and no pytest
	PYTHONPATH=src $(PYTHON) -m tests.gpu.exactness
	PYTHONPATH=src $(PYTHON) -m tests.gpu.kernels --check
	PYTHONPATH=src $(PYTHON) -m tests.gpu.convolution --check
	PYTHONPATH=src $(PYTHON) -m tests.gpu.streaming
	PYTHONPATH=src $(PYTHON) -m tests.gpu.compiled
	PYTHONPATH=src $(PYTHON) -m tests.gpu.backprop
	PYTHONPATH=src $(PYTHON) -m tests.gpu.normalization
	PYTHONPATH=src $(PYTHON) -m tests.gpu.attention

fuzz: $(STAMP)  ## 2,000 random models against a forward pass per example
	$(BIN)/python -m tests.fuzz --models 2000 --seed 0

faults: $(STAMP)  ## 1,000 faults in private runs: crashes, full disks, interrupts
	$(BIN)/python -m tests.faults --count 1000 --seed 0

api-fuzz: $(STAMP)  ## 10,000 random uses of the public API
	$(BIN)/python -m tests.api_fuzz --cases 10000 --seed 0

loop-fuzz: $(STAMP)  ## 2,000 random training loops as users write them: a true statement or an error
	$(BIN)/python -m tests.user_loops --count 2000 --seed 0

check: $(STAMP)  ## style, types and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy src
	$(BIN)/mkdocs build --quiet --strict --site-dir build/site

docs: $(STAMP)  ## the documentation site, in build/site
	$(BIN)/mkdocs build --strict --site-dir build/site

notebooks: $(STAMP)  ## run the tutorials: their stored output, and the gallery of reports
	$(BIN)/python -m tests.docs.notebooks $(ARGS)

format: $(STAMP)  ## ruff format
	$(BIN)/ruff format .

clean:  ## remove .venv and build output
	rm -rf $(VENV) runs build dist
