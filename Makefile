# `make demo` and `make test` are complete on a fresh machine with Python and make: each builds .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of the packages' files only those that are used are compiled, when they are first used: half the time of the set-up.
INSTALL := python -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/$(INSTALL) --constraint constraints.txt
# Some machines are told to keep nothing that was compiled; then every process of the tests would compile all of it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-peer lint types pytest pytest-alone pytest-ranks mindspore format clean

# Folders whose tests keep process groups, whole trainers or builds busy; the others run beside them.
RANKS := tests/packaging tests/distributed tests/scenarios

demo: $(VENV)/demo.stamp
	$(BIN)/trainsentry demo

# The two environments are built one after the other: they share the compiled kernel in this folder.
test: $(VENV)/dev.stamp
	$(MAKE) --jobs=2 --output-sync=target lint types $(VENV)-mindspore/stamp
	$(MAKE) --jobs=2 --output-sync=target pytest-ranks pytest-alone mindspore

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

pytest: pytest-alone pytest-ranks

pytest-alone: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(RANKS:%=--ignore=%)

pytest-ranks: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(RANKS)

# MindSpore needs NumPy 1 and is tested without torch, so it has an environment of its own.
mindspore: $(VENV)-mindspore/stamp
	$(VENV)-mindspore/bin/python -m pytest tests/on_mindspore

$(VENV)-mindspore/stamp: pyproject.toml constraints-mindspore.txt
	$(PYTHON) -m venv $(VENV)-mindspore
	$(VENV)-mindspore/bin/$(INSTALL) --constraint constraints-mindspore.txt --editable '.[mindspore,test]'
	touch $@

# Runs msprobe's own tools on our dumps, in an environment of their own that is made once.
test-peer: $(VENV)/dev.stamp
	TRAINSENTRY_PEERS=$$($(BIN)/python -c "import sys; sys.path.insert(0, 'benchmarks'); import peers; print(peers.peers_python())") \
		$(BIN)/python -m pytest tests/peer

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[torch]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV) $(VENV)-mindspore build dist *.egg-info .mypy_cache .ruff_cache
