PYTHON ?= python3
unexport PYTHONPATH PYTHONHOME # packages from outside .venv would shadow its own
unexport PYTHONDONTWRITEBYTECODE # every Python would compile torch and fairseq anew, for seconds

.PHONY: help set-up quickstart quickstart-translation test test-quick lint bench gpu

help:
	@echo "make quickstart   set up, then train, evaluate and sample a small language model"
	@echo "make quickstart-translation"
	@echo "                  set up, then train a small model to translate number names, and score it"
	@echo "make test         set up, then run the tests; some of them: make test TESTS=tests/test_docs.py"
	@echo "make test-quick   set up, then run the quick tests: all but tests/end_to_end"
	@echo "make lint         set up, then check style, formatting and types"
	@echo "make gpu          set up, then run the tests and benchmarks that need a GPU, in 8 minutes"
	@echo "make bench        set up, then measure speed and memory; QUICK=1 for minutes in place of hours;"
	@echo "                  ORIGINAL='PATH ...' beside checkouts of the published code"
	@echo "Set-up builds .venv once, with $(PYTHON); for another Python: make test PYTHON=python3.12"

set-up:
	@bash scripts/set_up.sh "$(PYTHON)"

quickstart: set-up
	@.venv/bin/python -m scripts.quickstart.language_model

quickstart-translation: set-up
	@.venv/bin/python -m scripts.quickstart.translation

# beside a GPU, fairseq fails to clip gradients on a CPU; the tests for GPUs are in `make gpu`
test test-quick: export CUDA_VISIBLE_DEVICES =

test: set-up
	@.venv/bin/python -m pytest $(TESTS)

test-quick: set-up
	@.venv/bin/python -m pytest --ignore tests/end_to_end $(TESTS)

lint: set-up
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

bench: set-up
	@.venv/bin/python -m benchmarks $(if $(QUICK),--quick) $(if $(ORIGINAL),--original $(ORIGINAL))

# Each stage writes what it has when its time is up.
gpu: set-up
	@.venv/bin/python -m benchmarks.gpu $(if $(ORIGINAL),--original $(ORIGINAL))
