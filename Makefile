# `make` alone lists the targets. Each one sets up what it needs in .venv.

.DEFAULT_GOAL := help
SHELL := /bin/bash

# Without its compiled files every start of vLLM costs seconds more.
unexport PYTHONDONTWRITEBYTECODE

PY := .venv/bin/python
# Whatever Python 3 there is: tools/bootstrap.py looks for the one to use.
BOOT_PY := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '' 2>/dev/null && { echo $$p; break; }; done)
QUICK_TESTS := $(wildcard tests/test_*.py) \
	$(filter-out tests/engine/ tests/__pycache__/,$(wildcard tests/*/))
ENGINE_TESTS := $(wildcard tests/engine/)
# Branch coverage; pytest fails below the threshold in pyproject.toml.
COV := --cov --cov-report=term-missing
SOAK_SECONDS ?= 600
# Needs no vLLM and no installed project: torch and pytest will do.
GPU_PY ?= $(if $(wildcard $(PY)),$(PY),$(BOOT_PY))
ARGS ?=

say = @printf '==> %s\n'

.PHONY: help setup test lint types imports spelling manifest docs test-fast \
	test-engine coverage format demo soak compat bench dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## make .venv with vLLM, the project and its tools (again: under a second)
	@$(or $(BOOT_PY),$(error No Python was found: install Python 3.11 to 3.13)) \
		tools/bootstrap.py

test: lint types imports spelling manifest docs ## all checks and all tests
	$(say) 'all tests; those that start an engine run beside the others, shown last'
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-fast engines-beside; \
		status=$$?; printf '==> engine tests\n'; cat build/engine-tests.log; \
		exit $$status

.PHONY: engines-beside
engines-beside: setup
	@mkdir -p build
	@$(PY) -m pytest $(ENGINE_TESTS) $(ARGS) >build/engine-tests.log 2>&1

lint: setup ## ruff: rules and format
	$(say) 'ruff: rules'
	@.venv/bin/ruff check .
	$(say) 'ruff: format'
	@.venv/bin/ruff format --check .

types: setup ## mypy, strict
	$(say) 'mypy'
	@$(PY) -m mypy

imports: setup ## import contracts
	$(say) 'import contracts'
	@.venv/bin/lint-imports

spelling: setup ## codespell
	$(say) 'spelling'
	@.venv/bin/codespell

manifest: setup ## check-manifest: the source distribution holds what git holds
	$(say) 'manifest'
	@.venv/bin/check-manifest --no-build-isolation

docs: setup ## check the reference and build the documentation into build/site
	$(say) 'documentation'
	@$(PY) tools/reference.py --check
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

test-fast: setup ## all tests but those that start an engine
	$(say) 'tests without engines'
	@$(PY) -m pytest $(COV) -m 'not engine' $(QUICK_TESTS) $(ARGS)

test-engine: setup ## the tests that start an engine
	$(say) 'engine tests'
	@$(PY) -m pytest -m engine $(ARGS)

# Without the project's own settings: they want plugins of pytest that may not be there.
gpu-check: ## GPU tests and benchmarks/transfer.py, under 8 minutes (GPU_PY=python)
	$(say) 'tests that need a GPU'
	@PYTHONPATH=.:tests $(GPU_PY) -m pytest -v -c /dev/null --rootdir=. \
		-p no:cacheprovider --import-mode=importlib \
		-o 'markers=gpu: needs an NVIDIA GPU' tests/worker/test_gpu.py $(ARGS)
	$(say) 'transfers'
	@mkdir -p build
	@PYTHONPATH=. $(GPU_PY) benchmarks/transfer.py --path --seconds 150 \
		--json build/transfer.json

coverage: ## what the last test run covered, over the whole package
	$(say) 'coverage of the whole package, as last measured'
	@$(PY) -m coverage report --include='vllm_ctx_offload/*' --fail-under=0

format: setup ## let ruff format and mend what it can; write the reference
	$(say) 'formatting'
	@$(PY) tools/reference.py
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

demo: setup ## a real server answers returning conversations from host memory
	$(say) 'demo'
	@$(PY) examples/demo.py $(ARGS)

soak: setup ## ten minutes of random load with failures (SOAK_SECONDS=...)
	$(say) 'soak for $(SOAK_SECONDS) s'
	@CTX_OFFLOAD_SOAK_SECONDS=$(SOAK_SECONDS) $(PY) -m pytest -m soak \
		--timeout=$$(($(SOAK_SECONDS) + 900)) tests/engine/test_soak.py $(ARGS)

compat: setup ## the tests against every supported release of vLLM
	@$(PY) tools/compat.py $(ARGS)

bench: setup ## the benchmarks
	$(say) 'benchmarks'
	@set -e; for name in hit_latency overhead noisy_neighbour manager worst_calls \
		metrics transfer; do \
		printf '==> %s\n' "$$name"; $(PY) benchmarks/$$name.py $(ARGS); done

dist: setup ## wheel and source distribution in dist/
	$(say) 'wheel and source distribution'
	@$(PY) -m build

clean: ## remove the environment, caches and what was built
	$(say) 'removing .venv, caches, build/ and dist/'
	@rm -rf .venv .cache build dist ./*.egg-info .coverage .coverage.* htmlcov \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
