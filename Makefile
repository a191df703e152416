# `make demo` and `make test` are complete on a fresh machine with Python and make: each builds .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of the packages' files only those that are used are compiled, when they are first used: half the time of the set-up.
INSTALL := python -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/$(INSTALL) --constraint constraints.txt
# Some machines are told to keep nothing that was compiled; then every process of the tests would compile all of it anew.
export PYTHONDONTWRITEBYTECODE :=

# The tests in parts of about the same size, which run beside each other; what no other part names is in the first. The
# open faults among ranks use the ranks that the distributed tests keep alive.
PARTS := pytest-others pytest-ranks pytest-scenarios pytest-collectors
FOLDERS_ranks := tests/distributed tests/scenarios/test_open_faults.py
FOLDERS_scenarios := tests/scenarios tests/packaging
FOLDERS_collectors := tests/collectors
ELSEWHERE_scenarios := tests/scenarios/test_open_faults.py
NAMED := $(foreach part,ranks scenarios collectors,$(FOLDERS_$(part)))
DEVICE_TESTS_ON_CPU := truth same_step stops random_states

.PHONY: demo test docs pictures simulated test-torch test-torches torch-environment test-peer test-device lint types pytest $(PARTS) mindspore format clean

demo: $(VENV)/demo.stamp
	$(BIN)/trainsentry demo

# Packages of both environments are fetched and unpacked at once; the two then build one after the other, as they share
# the compiled kernel in this folder, and before any test runs. The longest parts begin first. Three at a time take longer.
test:
	$(MAKE) --jobs=2 --output-sync=target $(VENV)/dev.stamp $(VENV)-mindspore/packages
	$(MAKE) --jobs=2 --output-sync=target $(VENV)-mindspore/stamp lint types
	$(MAKE) --jobs=2 --output-sync=target $(PARTS) mindspore simulated

# The documentation as a site in build/site: `python -m http.server -d build/site` shows it, with the search.
docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

pytest: $(PARTS)

pytest-others: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(NAMED:%=--ignore=%) --ignore=tests/simulated

# Where there is no accelerator, a part of its suite checks itself on the CPU.
pytest-collectors: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(FOLDERS_collectors)
	TRAINSENTRY_TEST_DEVICE=cpu $(BIN)/python -m pytest $(DEVICE_TESTS_ON_CPU:%=tests/on_device/test_%.py)

pytest-ranks pytest-scenarios: pytest-%: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(FOLDERS_$*) $(ELSEWHERE_$*:%=--ignore=%)

# An NPU on the CPU, compiled for the tests. torch's PrivateUse1 has one name a process, so it has a process of its own.
simulated: $(VENV)/dev.stamp
	$(BIN)/python -m pytest tests/simulated

# MindSpore needs NumPy 1 and is tested without torch, so it has an environment of its own.
mindspore: $(VENV)-mindspore/stamp
	$(VENV)-mindspore/bin/python -m pytest tests/on_mindspore

$(VENV)-mindspore/packages: constraints-mindspore.txt
	$(PYTHON) -m venv $(VENV)-mindspore
	$(VENV)-mindspore/bin/$(INSTALL) --constraint constraints-mindspore.txt mindspore "numpy<2" "pandas<3" pyarrow
	touch $@

$(VENV)-mindspore/stamp: $(VENV)-mindspore/packages pyproject.toml
	$(VENV)-mindspore/bin/$(INSTALL) --constraint constraints-mindspore.txt --editable '.[mindspore,test]'
	touch $@

# The part of the tests that meets torch, on another torch: `make test-torch VERSION=2.6.0`, with PYTHON=python3.12 on
# another Python. A CPU build (0.2 GB to fetch) is taken where pip finds one; the usual build brings CUDA's libraries:
# 2.6.0 has 5.2 GB installed, 2.15.0 has 5.3 GB, two minutes each on a fast line. The tests then take five minutes.
OLDEST := 2.6.0
NEWEST := 2.15.0
VERSION ?= $(OLDEST)
ANY_BUILD ?= yes
OTHER = .venv-torch-$(VERSION)-$(notdir $(PYTHON))
TORCH_TESTS := tests/collectors/torch tests/scenarios/test_harmless.py tests/distributed/test_strategies.py

test-torch: $(OTHER)/stamp
	$(OTHER)/bin/python -m pytest $(TORCH_TESTS)

$(OTHER)/stamp: pyproject.toml
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/$(INSTALL) "torch==$(VERSION)+cpu" || \
		{ test "$(ANY_BUILD)" = yes && $(OTHER)/bin/$(INSTALL) "torch==$(VERSION)"; }
	$(OTHER)/bin/python -m pip freeze | grep "^torch==" > $(OTHER)/constraints.txt
	$(OTHER)/bin/$(INSTALL) --constraint $(OTHER)/constraints.txt --editable '.[test]'
	touch $@

# What continuous integration runs beside `make test`: the oldest and the newest torch, where there is a CPU build to be
# had. Where there is none it says so; before a release `make test-torch` runs both with the builds of five gigabytes.
test-torches:
	for version in $(OLDEST) $(NEWEST); do \
		if $(MAKE) torch-environment VERSION=$$version ANY_BUILD=no; then $(MAKE) test-torch VERSION=$$version || exit 1; \
		else echo "torch $$version: no CPU build is to be had here, not tested"; fi; done

torch-environment: $(OTHER)/stamp

# Runs msprobe's own tools on our dumps, in an environment of their own that is made once.
test-peer: $(VENV)/dev.stamp
	TRAINSENTRY_PEERS=$$($(BIN)/python -c "import sys; sys.path.insert(0, 'benchmarks'); import peers; print(peers.peers_python())") \
		$(BIN)/python -m pytest tests/peer

# The suite of an accelerator, with the torch that drives it: that of PYTHON, if it finds one; the other packages come on
# top of it, in an environment of their own. DEVICE_PYTHON names an interpreter that has all of them already. Where torch
# finds no accelerator the suite is skipped; TRAINSENTRY_TEST_DEVICE=cpu runs what the CPU can do.
HAS_DEVICE := import torch; raise SystemExit(not torch.accelerator.is_available())
PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))
DEVICE := $(VENV)-device
TRAINSENTRY_TEST_DEVICE ?= auto

test-device:
ifdef DEVICE_PYTHON
	TRAINSENTRY_TEST_DEVICE=$(TRAINSENTRY_TEST_DEVICE) $(DEVICE_PYTHON) -m pytest -rs tests/on_device
else
	if $(PYTHON) -c "$(HAS_DEVICE)" 2> /dev/null; then \
		$(MAKE) $(DEVICE)/stamp && $(MAKE) test-device DEVICE_PYTHON=$(DEVICE)/bin/python; \
	else $(MAKE) $(VENV)/dev.stamp && $(MAKE) test-device DEVICE_PYTHON=$(BIN)/python; fi
endif

$(DEVICE)/stamp: pyproject.toml
	$(PYTHON) -m venv --system-site-packages $(DEVICE)
	$(PYTHON) -c "$(PACKAGES)" > "$$(echo $(DEVICE)/lib/python*/site-packages)/device.pth"
	$(PYTHON) -m pip freeze | grep -iE "^(torch|torch_npu|triton|triton-ascend)==" > $(DEVICE)/constraints.txt || true
	$(DEVICE)/bin/$(INSTALL) --constraint $(DEVICE)/constraints.txt --editable '.[test]'
	touch $@

# The pictures of the documentation, of a real run by the present code: some minutes, and Chromium must be installed.
pictures: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/pictures.py

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
	rm -rf $(VENV) $(VENV)-mindspore $(DEVICE) .venv-torch-* build dist *.egg-info .mypy_cache .ruff_cache
