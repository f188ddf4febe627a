PYTHON ?= python3
unexport PYTHONPATH PYTHONHOME # packages from outside .venv would shadow its own

.PHONY: help set-up quickstart quickstart-translation test test-quick lint bench

help:
	@echo "make quickstart   set up, then train, evaluate and sample a small language model"
	@echo "make quickstart-translation"
	@echo "                  set up, then train a small model to translate number names, and score it"
	@echo "make test         set up, then run the tests; some of them: make test TESTS=tests/test_docs.py"
	@echo "make test-quick   set up, then run the quick tests: all but tests/end_to_end"
	@echo "make lint         set up, then check style and formatting"
	@echo "make bench        set up, then measure speed and memory, in about $(BENCH_MINUTES) minutes on 2 cores;"
	@echo "                  QUICK=1 takes about $(QUICK_MINUTES); beside the published code with checkouts of it,"
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

# The sum of what the commands say, beside all of the published code.
BENCH_MINUTES = 150
QUICK_MINUTES = 5
bench: HOW = $(if $(QUICK),--quick,--dtype fp32 bf16 bf16-autocast)
bench: RESULTS = benchmark$(if $(QUICK),/quick)
bench: set-up
	@echo "about $(if $(QUICK),$(QUICK_MINUTES),$(BENCH_MINUTES)) minutes on 2 cores"
	@.venv/bin/python -m scripts.benchmark.transformer_xl $(HOW) \
		--output $(RESULTS)/transformer_xl $(if $(ORIGINAL),--original "$(ORIGINAL)")
	@.venv/bin/python -m scripts.benchmark.all_attention $(HOW) \
		--output $(RESULTS)/all_attention \
		$(if $(ORIGINAL_ADAPTIVE_SPAN),--original "$(ORIGINAL_ADAPTIVE_SPAN)")
	@.venv/bin/python -m scripts.benchmark.product_key_memory $(HOW) \
		--output $(RESULTS)/product_key_memory $(if $(ORIGINAL_XLM),--original "$(ORIGINAL_XLM)")
	@$(if $(QUICK),true,.venv/bin/python -m scripts.benchmark.product_key_memory --slots 65536 \
		--heads 1 4 8 --knn 8 32 --tokens 512 4096 --mode train inference search \
		--output $(RESULTS)/product_key_memory_shapes \
		$(if $(ORIGINAL_XLM),--original "$(ORIGINAL_XLM)"))
	@.venv/bin/python -m scripts.benchmark.weighted_transformer $(if $(QUICK),--quick) \
		--output $(RESULTS)/weighted_transformer
