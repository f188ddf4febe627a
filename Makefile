PYTHON ?= python3

# Packages from outside .venv would shadow its own.
unexport PYTHONPATH PYTHONHOME

.PHONY: help set-up quickstart test lint bench

help:
	@echo "make quickstart   set up, then train, evaluate and sample a small character model"
	@echo "make test         set up, then run the tests"
	@echo "make lint         set up, then check style and formatting"
	@echo "make bench        set up, then measure speed and memory; with ORIGINAL=PATH beside a"
	@echo "                  checkout of the published Transformer-XL code"
	@echo "Set-up builds .venv once, with $(PYTHON); for another Python: make test PYTHON=python3.12"

set-up:
	@$(PYTHON) scripts/set_up.py

quickstart: set-up
	@.venv/bin/python scripts/quickstart.py

test: set-up
	@.venv/bin/python -m pytest

lint: set-up
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

bench: set-up
	@.venv/bin/python scripts/benchmark_transformer_xl.py --dtype fp32 bf16 bf16-autocast \
		--output benchmark $(if $(ORIGINAL),--original "$(ORIGINAL)")
