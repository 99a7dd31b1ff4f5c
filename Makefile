# `make help` lists the targets. Everything runs in .venv, which is made on first use and repaired when it is half made.
PYTHON ?= python3
ARGS ?= env=CartPole algo=grpo
PYTEST_ARGS ?= -m "not slow"

.PHONY: help setup train test lint types docs wheel clean

RUN := .venv/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check --quiet
# Made last, so without it the environment is not whole; removed where the Python behind the environment has gone.
READY := .venv/.ready
$(shell .venv/bin/python -c '' 2>/dev/null || rm -f $(READY))

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables: ARGS (train), PYTEST_ARGS (test), PYTHON (which Python makes .venv, now $(PYTHON))'

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'rlkit needs Python 3.11 or newer; name one: make PYTHON=python3.11 ...' >&2; exit 1; }
	@if [ -f $@ ]; then rm $@; else echo 'Making .venv (some minutes, once) ...'; $(PYTHON) -m venv --clear .venv; fi
	@$(PIP) install -c constraints.txt -e '.[dev,oracle]'
	@touch $@

setup: $(READY) ## make or repair .venv with the tested versions

train: $(READY) ## train: make train ARGS="env=CartPole algo=ppo members=16"
	@$(RUN) rlkit.train $(ARGS)

# Two processes, each with whole files and one thread: a file's costly runs are shared by its tests.
test: $(READY) ## run the tests but the slow ones; all: make test PYTEST_ARGS=
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(READY) ## check style and format
	@$(RUN) ruff check --output-format concise .
	@$(RUN) ruff format --check --output-format concise .

# build/ goes first: what setuptools left there of a deleted file would enter the new wheel.
wheel: $(READY) ## build the wheel into dist/
	@rm -rf build dist
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

# On the installed package and from its folder: from the checkout's root mypy passes over envs/ without a word.
types: wheel ## check types of the installed package
	@$(PIP) install --no-deps --target build/installed dist/*.whl
	@cd build/installed && ../../.venv/bin/python -m mypy \
		--config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p rlkit

# Not --quiet, which would hide warnings from --strict too. The variable silences a notice that Material prints of its own
# future (support ends in May 2027); it is no warning.
docs: $(READY) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --config-file docs/mkdocs/mkdocs.yml

clean: ## remove .venv, built files and caches; runs/ stays
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -not -path './runs/*' -prune -exec rm -rf {} +
