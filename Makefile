# Every target is one line that also works when pasted. Tools live in .venv, made by `make setup`.
#   TORCH_INDEX_URL  package index for torch (default: pip's own), for example the project's index of CPU builds
#   WHEELS_DIR       folder of wheels that pip may use besides its index
#   PYTHON           interpreter for .venv, 3.11 or newer
#   RERUNS           repeat a failing test so often, and name it (unset: a failure is a failure)
#   NIXL             nixl-cu12 (default) or nixl-cu13: the CUDA major of torch; without a GPU either works
SHELL := /bin/bash
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
NIXL ?= nixl-cu12
BIN := .venv/bin
STAMP := .venv/setup.stamp
PYTEST = $(BIN)/pytest -q $(if $(RERUNS),--reruns $(RERUNS) -rR)
PACKAGES := ./protos ./libs/core ./libs/kvtransfer[$(NIXL)] ./libs/client ./services/coordinator ./services/router ./services/worker[torch,fetch]
PIP_DOWNLOAD = $(BIN)/python -m pip download -q -c constraints.txt $(if $(WHEELS_DIR),--find-links $(WHEELS_DIR))
PIP_INSTALL = $(BIN)/python -m pip install -q -c constraints.txt $(if $(WHEELS_DIR),--find-links $(WHEELS_DIR))

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm proto lint fmt typecheck test test-integration test-simulation test-e2e test-parity test-docker \
	test-vllm test-nightly test-gpu demo up down bench dashboards docs dist wheels check clean proto-release

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with every package and tool (quick when nothing changed)

$(STAMP): constraints.txt requirements-dev.txt Makefile $(wildcard */pyproject.toml */*/pyproject.toml protos/isthmus/v1/*.proto) protos/generate.py protos/hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Isthmus needs Python 3.11 or newer, this is {sys.version.split()[0]}: make setup PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) hatchling editables grpcio-tools
	$(PIP_INSTALL) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(PIP_INSTALL) --no-build-isolation -r requirements-dev.txt $(addprefix -e ,$(PACKAGES))
	touch $(STAMP)

setup-vllm: $(STAMP) ## make .venv-vllm with vLLM (CPU) and our packages
	$(BIN)/python tools/setup_vllm.py

proto: $(STAMP) ## generate the Python stubs of protos/ again
	$(BIN)/python protos/generate.py

lint: $(STAMP) ## ruff, import contracts, buf lint, buf breaking
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/buf lint protos && $(BIN)/buf breaking protos --against protos/baseline.binpb

fmt: $(STAMP) ## format code and schema
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format . && $(BIN)/buf format -w protos

typecheck: $(STAMP) ## pyright, strict
	$(BIN)/pyright

test: $(STAMP) ## unit and contract tests
	$(PYTEST) -n logical --dist worksteal tests/unit tests/contract

test-integration: $(STAMP) ## several components, real gRPC, real NIXL on this machine
	$(PYTEST) -n 3 --dist loadfile -m "not model" tests/integration

test-simulation: $(STAMP) ## seeded schedules of faults under a virtual clock
	$(BIN)/pytest -q tests/simulation

test-e2e: $(STAMP) ## whole clusters of real processes, the real model included
	$(PYTEST) tests/e2e && $(PYTEST) -m model tests/integration

test-parity: $(STAMP) ## tokens of instances of every shape against an unsplit run
	$(PYTEST) tests/parity

test-docker: $(STAMP) ## images and compose; tools/start_docker.sh brings an engine
	$(PYTEST) tests/docker

test-vllm: $(STAMP) ## vLLM as the engine; `make setup-vllm` first
	$(PYTEST) tests/vllm

test-gpu: $(STAMP) ## on a machine with NVIDIA GPUs
	$(BIN)/pytest -q -m gpu tests/integration tests/parity

test-nightly: $(STAMP) ## what takes longer than a pull request should
	$(BIN)/pytest -q -m nightly tests

demo: $(STAMP) ## a real model split in two answers a question; prints where the time went
	$(BIN)/isthmus demo

up: $(STAMP) ## a local cluster until Ctrl-C; options in ARGS, for example ARGS="--engine mock"
	$(BIN)/isthmus up $(ARGS)

down: $(STAMP) ## stop every local cluster that `up` started
	$(BIN)/isthmus down

bench: $(STAMP) ## requests through a mock cluster: throughput, latency, hand-off
	$(BIN)/python benchmarks/mock_cluster.py $(ARGS)

dashboards: $(STAMP) ## write the Grafana dashboards and the table of metrics again
	$(BIN)/python deploy/observability/dashboards.py && $(BIN)/python tools/metrics_table.py

dist: $(STAMP) ## wheels of our packages in dist/
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist ./protos ./libs/core ./libs/kvtransfer ./libs/client ./services/coordinator ./services/router ./services/worker

wheels: dist ## what images need from the index, in deploy/wheels (CPU build of torch where pip gives one)
	mkdir -p deploy/wheels && $(PIP_DOWNLOAD) -d deploy/wheels --find-links dist 'isthmus-worker[torch,fetch]' 'kvtransfer[$(NIXL)]' isthmus-router isthmus-coordinator isthmus-client hatchling grpcio-tools
	rm -f deploy/wheels/isthmus* deploy/wheels/kvtransfer*

docs: $(STAMP) ## the documentation as a web site in site/
	$(BIN)/mkdocs build --strict

check: lint typecheck test ## what every change must pass

clean: ## remove caches and build outputs (keeps .venv)
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist site && find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

proto-release: $(STAMP) ## freeze the schema: later changes must be compatible with it
	$(BIN)/buf build protos -o protos/baseline.binpb
