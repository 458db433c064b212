# Two commands do everything, environment included: make demo, make test.
# PYTHON picks the interpreter, CUPY the CuPy wheel (cuda13 or cuda12).
PYTHON ?= python3
CUPY ?= cuda13
BIN := .venv/bin

.PHONY: demo test lint types check clean
.DELETE_ON_ERROR:

demo: .venv/ready
	$(BIN)/python examples/pool_map.py

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

check: lint types test

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(CUPY),mpi,dev]'
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
