PYTHON ?= python3

# Packages from outside .venv would shadow its own.
unexport PYTHONPATH PYTHONHOME

.PHONY: help set-up quickstart test lint

help:
	@echo "make quickstart   set up, then train, evaluate and sample a small character model"
	@echo "make test         set up, then run the tests"
	@echo "make lint         set up, then check style and formatting"
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
