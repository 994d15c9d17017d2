# Two commands: `make lab` to learn, `make test` to check. Both set up .venv when it is missing.
PYTHON  ?= python3
VENV    ?= .venv
# A second environment: the trainers of others, which `make test` does without.
ADAPTERS ?= .venv-adapters
# Passed to pip at set-up, for example PIP_ARGS="--index-url ..." for a mirror or a CPU build of torch.
PIP_ARGS ?=
# Processes that share the tests, a file each at a time; "auto" = one per core, 4 at most; 0 = none but pytest itself.
WORKERS ?= auto
# Passed to JupyterLab, for example LAB_ARGS="--no-browser --port 8890".
LAB_ARGS ?=
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
# Answers beforehand what JupyterLab asks in a corner at its first start: no news, and no look for updates.
NO_NEWS := {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}
# The oldest supported Python, and an environment with the oldest supported packages.
OLDEST_PYTHON ?= python3.11
OLDEST  := .venv-oldest
LESSONS := $(sort $(wildcard lessons/[0-9]*.py))

# Idle OpenMP threads sleep instead of spinning: on a busy machine spinning makes torch crawl (5 s became 106 s).
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup lab lessons test test-adapters test-oldest browser check format lint types notebooks bench pins readme clean

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"safetrain needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Name another: make setup PYTHON=python3.12")'
	@echo "Setting up $(VENV): about 1.4 GB with a CPU build of torch, more with CUDA. Minutes without a word, then it is done."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@echo '$(NO_NEWS)' > $(VENV)/share/jupyter/lab/settings/overrides.json
	@touch $@

setup: $(READY)  ## create .venv with the pinned packages

lab: $(READY)  ## open the lessons in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir=lessons --LabApp.default_url=/lab/tree/00_start_here.ipynb $(LAB_ARGS)

lessons: $(READY)  ## run every lesson headless
	@set -e; for lesson in $(LESSONS); do echo "== $$lesson"; $(BIN)/python $$lesson; done

test: $(READY)  ## unit tests, doctests and every notebook
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 4 --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout=120 --nbval-sanitize-with tests/nbval_sanitize.cfg $(PYTEST_ARGS)

$(ADAPTERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt \
	  -e '.[huggingface,lightning,tensorboard]' pytest
	@touch $@

test-adapters: $(ADAPTERS)/.ready  ## the callbacks in Hugging Face's and Lightning's own trainers (sets up another environment)
	$(ADAPTERS)/bin/python -m pytest -q tests/adapters tests/diagnose/test_probe_frameworks.py tests/diagnose/test_readers.py $(PYTEST_ARGS)

browser: $(READY)  ## the lessons in JupyterLab, worked through by a real Chromium (installs Playwright)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -q -rs tests/browser $(PYTEST_ARGS)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints-oldest.txt -e '.[test]'
	@touch $@

test-oldest: $(OLDEST)/.ready  ## unit tests and doctests with the oldest supported versions, in .venv-oldest (large)
	$(OLDEST)/bin/python -m pytest -q safetrain_core tests --ignore=tests/lessons $(PYTEST_ARGS)

check: lint types test  ## what must be green before a commit

format: $(READY)  ## format the code
	$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

lint: $(READY)  ## format check, lint, import contract
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

types: $(READY)  ## type check
	$(BIN)/mypy --no-error-summary

notebooks: $(READY)  ## rebuild the notebooks from the scripts and run them
	$(BIN)/python tests/lessons/build_notebooks.py $(LESSONS)

bench: $(READY)  ## the measured claims, beside other packages (installs them: large); keeps tests/benchmarks/RESULTS.md
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt -e '.[peers]'
	$(BIN)/python -m pytest -q -s tests/benchmarks $(PYTEST_ARGS)

pins: $(READY)  ## rewrite constraints.txt from what is installed
	$(BIN)/python tests/update_pins.py $(ADAPTERS)/bin/python

readme: $(READY)  ## rewrite the generated parts of the README
	$(BIN)/python tests/update_readme.py

clean:  ## remove the environment and what runs left
	rm -rf $(VENV) $(ADAPTERS) $(OLDEST) runs lessons/runs *.egg-info
