# Two commands do everything, environment included: make demo, make test.
# PYTHON picks the interpreter, CUPY the CuPy wheel (cuda13 or cuda12).
PYTHON ?= python3
CUPY ?= cuda13
BIN := .venv/bin

.PHONY: demo test slow lint types docs check clean
.DELETE_ON_ERROR:

# mpiexec gives its ranks no terminal, so whether there is one is asked here.
PROGRESS = $(shell test -t 2 && echo --progress)

demo: .venv/ready
	$(BIN)/cupy-zc demo digits $(PROGRESS)

test: .venv/ready
	$(BIN)/python -m pytest

slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

# Every warning is an error: a link that leads nowhere, a name without a docstring.
docs: .venv/ready
	$(BIN)/python -m sphinx -E -W -n -q --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

check: lint types docs test slow

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(CUPY),dev]'
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
