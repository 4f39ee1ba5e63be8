# `make help` lists the targets. Each makes its own environment in .venv when there is none.

PYTHON ?= python3
# The build of torch is chosen first and alone, so that nothing after it asks for another one.
TORCH ?= torch==2.13.0
RANKS ?= 2

BIN := .venv/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install -qq
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node $(RANKS)

# Several ranks share the cores: one thread each.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed  ## train two nets on two ranks with and without fusedddp, compare, plot
	@$(TORCHRUN) examples/train_digits.py
	@$(TORCHRUN) examples/compare_gpt.py --plot build/demo.png

test: .venv/.installed  ## run all tests
	@$(BIN)/python -m pytest

check: .venv/.installed  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed  ## step time and memory of every way to synchronise, on two ranks
	@$(TORCHRUN) benchmarks/bench_step.py

clean:  ## remove the environment and everything that was generated
	rm -rf .venv build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml
	@echo "installing into .venv (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[dev,cli,plot]'
	@touch $@
