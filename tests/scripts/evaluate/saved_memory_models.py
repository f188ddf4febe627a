"""Checkpoints of models with product-key memories, and their data."""

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from tests import tiny
from tests.product_key_memory.tiny import MEMORY, tiny_language_model, tiny_transformer
from tests.scripts.evaluate import saved_models
from tests.scripts.evaluate.saved_models import task_options, write_state

EOS = 2
TOKENS = 97
# numbers of tokens of the sentences in two languages
PAIRS = ((4, 6), (9, 3), (2, 2), (7, 5), (5, 5), (3, 8), (1, 1))
SOURCES, TARGETS = map(sum, zip(*PAIRS, strict=True))
# options of the models that tests.product_key_memory.tiny builds
_BLOCKS = {**tiny.SIZES, "decoder_ffn_embed_dim": 24, "tokens_per_sample": 16}
_BLOCKS |= {"max_target_positions": None, "memory_optimizer": None}
_BLOCKS |= {"add_bos_token": False, "tpu": False}
_PAIRS = {"dropout": 0.0, "encoder_memory_layers": "2", "decoder_memory_layers": "1"}
for part in ("encoder", "decoder"):
    _PAIRS |= {f"{part}_layers": 2, f"{part}_embed_dim": 16, f"{part}_ffn_embed_dim": 24}
    _PAIRS |= {f"{part}_attention_heads": 2}


def write_blocks(path, add_bos_token=False, **options):
    """Write a language model over blocks of text."""
    options = {**MEMORY, "memory_layers": "2", **options}
    model = tiny_language_model(**options)
    options = {**_BLOCKS, **options, "_name": "pkm_transformer_lm"}
    task = {"tokens_per_sample": 10, "add_bos_token": add_bos_token}
    write_state(path, model, options, task_options("language_modeling", **task))


def sentence(number, language):
    """Return a sentence (1, T) of a language, 0 or 1."""
    tokens = tiny.tokens(1, PAIRS[number][language], number)
    tokens[0, -1] = EOS
    return tokens


def write_pairs(folder):
    """Write the dictionaries and the test split of a translation task."""
    folder.mkdir()
    for language, name in enumerate(("lower", "upper")):
        tiny.dictionary().save(str(folder / f"dict.{name}.txt"))
        path = str(folder / f"test.lower-upper.{name}")
        builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
        for number in range(len(PAIRS)):
            builder.add_item(sentence(number, language)[0])
        builder.finalize(f"{path}.idx")


def write_translator(path, **task):
    """Write a translation model, with these options of its task."""
    model = tiny_transformer(encoder_memory_layers="2", decoder_memory_layers="1")
    options = {**MEMORY, **_PAIRS, "_name": "pkm_transformer"}
    write_state(path, model, options, task_options("translation", **task))


def write_all(folder):
    """Write a text, pairs of sentences, and a model of each kind; return the folder."""
    saved_models.write_text(folder / "text", TOKENS)
    write_pairs(folder / "pairs")
    write_blocks(folder / "blocks.pt")
    write_blocks(folder / "bos.pt", add_bos_token=True)
    streams = {"mem_len": 5, "memory_layers": "1,3", **MEMORY}
    saved_models.write_checkpoint(folder / "streams.pt", "transformer_xl", **streams)
    saved_models.write_checkpoint(folder / "none.pt", "transformer_xl")
    write_translator(folder / "pairs.pt")
    return folder
