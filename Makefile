PYTHON ?= python3
unexport PYTHONPATH PYTHONHOME # packages from outside .venv would shadow its own

.PHONY: help set-up quickstart quickstart-translation test test-quick lint bench

help:
	@echo "make quickstart   set up, then train, evaluate and sample a small character model"
	@echo "make quickstart-translation"
	@echo "                  set up, then train a small model to translate number names, and score it"
	@echo "make test         set up, then run the tests; some of them: make test TESTS=tests/test_docs.py"
	@echo "make test-quick   set up, then run the quick tests: all but tests/end_to_end"
	@echo "make lint         set up, then check style and formatting"
	@echo "make bench        set up, then measure speed and memory; beside the published code with"
	@echo "                  checkouts of it, ORIGINAL=PATH of Transformer-XL's and"
	@echo "                  ORIGINAL_ADAPTIVE_SPAN=PATH of all-attention's"
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

bench: set-up
	@.venv/bin/python -m scripts.benchmark.transformer_xl --dtype fp32 bf16 bf16-autocast \
		--output benchmark $(if $(ORIGINAL),--original "$(ORIGINAL)")
	@.venv/bin/python -m scripts.benchmark.all_attention --dtype fp32 bf16 bf16-autocast \
		--output benchmark/all_attention \
		$(if $(ORIGINAL_ADAPTIVE_SPAN),--original "$(ORIGINAL_ADAPTIVE_SPAN)")
	@.venv/bin/python -m scripts.benchmark.product_key_memory --dtype fp32 bf16 bf16-autocast \
		--output benchmark/product_key_memory
	@.venv/bin/python -m scripts.benchmark.product_key_memory --slots 65536 --heads 1 4 8 \
		--knn 8 32 --tokens 512 4096 --mode train inference search \
		--output benchmark/product_key_memory_shapes
	@.venv/bin/python -m scripts.benchmark.weighted_transformer --output benchmark/weighted_transformer
