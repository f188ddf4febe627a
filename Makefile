PYTHON ?= python3
unexport PYTHONPATH PYTHONHOME # packages from outside .venv would shadow its own

.PHONY: help set-up quickstart quickstart-translation test test-quick lint bench gpu

help:
	@echo "make quickstart   set up, then train, evaluate and sample a small language model"
	@echo "make quickstart-translation"
	@echo "                  set up, then train a small model to translate number names, and score it"
	@echo "make test         set up, then run the tests; some of them: make test TESTS=tests/test_docs.py"
	@echo "make test-quick   set up, then run the quick tests: all but tests/end_to_end"
	@echo "make lint         set up, then check style and formatting"
	@echo "make gpu          set up, then run the tests and benchmarks that need a GPU, in 9 minutes"
	@echo "make bench        set up, then measure speed and memory, in about 150 minutes on 2 cores;"
	@echo "                  QUICK=1 takes about 5; beside the published code with checkouts of it,"
	@echo "                  ORIGINAL=PATH of Transformer-XL's, ORIGINAL_ADAPTIVE_SPAN=PATH of"
	@echo "                  all-attention's and ORIGINAL_XLM=PATH of product-key memories"
	@echo "Set-up builds .venv once, with $(PYTHON); for another Python: make test PYTHON=python3.12"

set-up:
	@bash scripts/set_up.sh "$(PYTHON)"

quickstart: set-up
	@.venv/bin/python -m scripts.quickstart.language_model

quickstart-translation: set-up
	@.venv/bin/python -m scripts.quickstart.translation

test: set-up
	@.venv/bin/python -m pytest $(TESTS)

test-quick: set-up
	@.venv/bin/python -m pytest --ignore tests/end_to_end $(TESTS)

lint: set-up
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

# The sum of what the commands say: quick, beside the published code, and alone.
ORIGINALS = $(ORIGINAL)$(ORIGINAL_ADAPTIVE_SPAN)$(ORIGINAL_XLM)
BENCH_MINUTES = $(if $(QUICK),5,$(if $(ORIGINALS),150,95))
original = $(if $($(1)),--original "$($(1))")
bench: RUN = .venv/bin/python -m scripts.benchmark
bench: HOW = $(if $(QUICK),--quick,--dtype fp32 bf16 bf16-autocast)
bench: SHAPES = --slots 65536 --heads 1 4 8 --knn 8 32 --tokens 512 4096 --mode train inference search
bench: TO = --output benchmark$(if $(QUICK),/quick)
bench: set-up
	@echo "about $(BENCH_MINUTES) minutes on 2 cores"
	@$(RUN).transformer_xl $(HOW) $(TO)/transformer_xl $(call original,ORIGINAL)
	@$(RUN).all_attention $(HOW) $(TO)/all_attention $(call original,ORIGINAL_ADAPTIVE_SPAN)
	@$(RUN).product_key_memory $(HOW) $(TO)/product_key_memory $(call original,ORIGINAL_XLM)
	@$(if $(QUICK),,$(RUN).product_key_memory $(SHAPES) $(TO)/product_key_memory_shapes \
		$(call original,ORIGINAL_XLM))
	@$(RUN).weighted_transformer $(if $(QUICK),--quick) $(TO)/weighted_transformer

# Each part writes what it has when its time is up.
gpu: set-up
	@mkdir -p gpu
	@status=0; \
	timeout --signal INT 270 .venv/bin/python -m pytest -n 0 -m gpu -rfE --junitxml gpu/tests.xml tests/gpu || status=$$?; \
	timeout --signal INT 270 .venv/bin/python -m benchmarks --device cuda --output gpu/benchmarks || status=$$?; \
	exit $$status
