"""The models that the check of a GPU trains, as options of fairseq's commands, and their data."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from scripts._shared.commands import ROOT
from scripts.benchmark._language_models import SPECIAL, make_dictionary

SIZES = TINY, REAL = ("tiny", "real")
PRECISIONS = FP32, BF16, FP16, AMP = ("fp32", "bf16", "fp16", "amp")
SEGMENTS, BLOCKS, TRANSLATION = ("segment_language_modeling", "language_modeling", "translation")
SOURCE, TARGET = ("en", "de")
# Symbols of the text, as many as enwik8 has, and of the sentences of each size.
SYMBOLS = 205
SYMBOLS_OF_SENTENCES = {TINY: 500, REAL: 32_000}
# Tokens of each part of the text, as many in the sentences. A GPU evaluates the last of them in a
# second, a CPU in many.
TOKENS = {"train": 200_000, "valid": 640}
TOKENS_OF_TEST = {"cuda": 65_536, "cpu": 1_280}
SENTENCE = (10, 40)
# Part of the tokens of a text that do not follow from the one before.
SURPRISES = 0.3

USER_DIR = ("--user-dir", str(ROOT / "fairseq_plugins"))
COMMON = (*USER_DIR, "--distributed-world-size", "1", "--num-workers", "0", "--seed", "1")
NO_DROPOUT = ("--dropout", "0", "--attention-dropout", "0")
ADAM = ("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "0.00025")
CLIP = ("--clip-norm", "1")
SMOOTHED = ("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1")


@dataclass(frozen=True)
class Batch:
    """What an update reads.

    Args:
        streams: parallel ones of a text; of sentences as many times as many tokens as a segment.
        segment: tokens of each.
    """

    streams: int
    segment: int


# The small one is read on the CPU, too.
SMALL_BATCH = Batch(2, 64)
BATCHES = {TINY: SMALL_BATCH, REAL: Batch(16, 512)}


@dataclass(frozen=True)
class Model:
    """A model in one or both sizes, as fairseq's commands take it.

    Args:
        name: what tables call it.
        task: fairseq's.
        archs: options that make the model of each size.
        training: options of optimizer and criterion.
        no_dropout: options that turn its dropout off.
        flat: whether its optimizer works with fp16 and flattened gradients.
    """

    name: str
    task: str
    archs: dict[str, tuple[str, ...]]
    training: tuple[str, ...]
    no_dropout: tuple[str, ...] = NO_DROPOUT
    flat: bool = False

    @property
    def translates(self) -> bool:
        """Whether it reads sentences, not a text."""
        return self.task == TRANSLATION

    def data(self, folder: Path, size: str) -> list[str]:
        """Options of the data for any command, its task among them."""
        if self.translates:
            languages = ("--source-lang", SOURCE, "--target-lang", TARGET)
            return [str(folder / f"sentences_{size}"), "--task", TRANSLATION, *languages]
        return [str(folder / "text"), "--task", self.task]

    def batch(self, batch: Batch) -> list[str]:
        """Options of how much is read at once."""
        every = ["--required-batch-size-multiple", "1"]
        if self.translates:
            return [*every, "--max-tokens", str(batch.streams * batch.segment)]
        read = ["--batch-size", str(batch.streams), "--tokens-per-sample", str(batch.segment)]
        return [*every, *read]

    def precision(self, precision: str, device: torch.device) -> list[str]:
        """Options of training in a precision; on a CPU, fairseq lacks --amp."""
        options = {FP32: [], BF16: ["--bf16"], FP16: ["--fp16"], AMP: ["--amp"]}[precision]
        if precision == FP16 and (not self.flat or device.type == "cpu"):
            options = [*options, "--fp16-no-flatten-grads"]
        return [*options, *(["--cpu"] if device.type == "cpu" else [])]


def _plain(layers: int, width: int, inner: int, heads: int) -> tuple[str, ...]:
    """Options of fairseq's transformer_lm with one embedding for input and output."""
    sizes = {"layers": layers, "ffn-embed-dim": inner, "attention-heads": heads}
    sizes |= dict.fromkeys(("embed-dim", "input-dim", "output-dim"), width)
    words = [word for name, n in sizes.items() for word in (f"--decoder-{name}", str(n))]
    return ("--arch", "transformer_lm", *words, "--share-decoder-input-output-embed")


def _translator(arch: str) -> tuple[str, ...]:
    return ("--arch", arch, "--share-all-embeddings")


MEMORY = ("--memory-query-dim", "512", "--memory-query-batch-norm")

MODELS = [
    Model(
        "transformer_xl",
        SEGMENTS,
        {
            TINY: ("--arch", "transformer_xl_tiny"),
            REAL: ("--arch", "transformer_xl_enwik8_base"),
        },
        (*ADAM, "--clip-norm", "0.25"),
        (*NO_DROPOUT, *"--activation-dropout 0 --embed-dropout 0 --output-dropout 0".split()),
        flat=True,
    ),
    Model(
        "all_attention_lm",
        SEGMENTS,
        {
            TINY: ("--arch", "all_attention_lm_tiny", "--adaptive-span", "--span-ramp", "32"),
            REAL: ("--arch", "all_attention_lm_enwik8_small"),
        },
        tuple(
            "--criterion segment_loss --span-loss 1e-7 --optimizer adagrad_with_clip "
            "--adagrad-clip 0.03 --lr 0.07 --lr-scheduler fixed --warmup-updates 200".split()
        ),
    ),
    Model(
        "pkm_transformer_lm",
        BLOCKS,
        {
            TINY: ("--arch", "pkm_transformer_lm_tiny", "--memory-query-batch-norm"),
            # 512² slots
            REAL: ("--arch", "pkm_transformer_lm_ablation", *MEMORY),
        },
        ("--optimizer", "adam_with_memory", "--memory-lr", "0.001", *ADAM[2:], *CLIP),
    ),
    Model(
        "weighted_transformer",
        TRANSLATION,
        {
            TINY: _translator("weighted_transformer_tiny"),
            REAL: _translator("weighted_transformer_wmt_base"),
        },
        ("--optimizer", "adam_with_branch_weights", *ADAM[2:], *CLIP, *SMOOTHED),
    ),
]
# fairseq's own of the same real size, for the speed alone
PLAIN = {
    "transformer_xl": Model(
        "transformer_lm",
        BLOCKS,
        {REAL: _plain(12, 512, 2048, 8)},
        (*ADAM, *CLIP),
        flat=True,
    ),
    "all_attention_lm": Model(
        "transformer_lm",
        BLOCKS,
        {REAL: _plain(18, 512, 1024, 8)},
        (*ADAM, *CLIP),
        flat=True,
    ),
    "pkm_transformer_lm": Model(
        "transformer_lm",
        BLOCKS,
        {REAL: _plain(6, 1024, 4096, 8)},
        (*ADAM, *CLIP),
        flat=True,
    ),
    "weighted_transformer": Model(
        "transformer",
        TRANSLATION,
        {REAL: _translator("transformer_wmt_en_de")},
        (*ADAM, *CLIP, *SMOOTHED),
        flat=True,
    ),
}


def draw_text(tokens: int, symbols: int, generator: np.random.Generator) -> np.ndarray:
    """Tokens of which most follow from the one before, so that there is something to learn."""
    drawn = generator.integers(SPECIAL, symbols, tokens)
    surprise = generator.random(tokens) < SURPRISES
    surprise[0] = True
    places = np.arange(tokens)
    # the last surprise, and how far it is back
    last = np.maximum.accumulate(np.where(surprise, places, 0))
    return SPECIAL + (drawn[last] - SPECIAL + places - last) % (symbols - SPECIAL)


def write_data(folder: Path, device: torch.device) -> None:
    """Write the text and the sentences of both sizes, as fairseq-preprocess would."""
    splits = {**TOKENS, "test": TOKENS_OF_TEST[device.type]}
    generator = np.random.default_rng(1)
    text = folder / "text"
    text.mkdir(parents=True)
    dictionary = make_dictionary(SYMBOLS)
    dictionary.save(str(text / "dict.txt"))
    for split, tokens in splits.items():
        drawn = draw_text(tokens, SYMBOLS, generator)
        # no line ends within the first tokens of a block, where fairseq would generate nothing
        _write(text / split, np.split(drawn, range(200, tokens, 200)), dictionary)
    for size, symbols in SYMBOLS_OF_SENTENCES.items():
        _write_sentences(folder / f"sentences_{size}", make_dictionary(symbols), splits, generator)


def _write_sentences(
    folder: Path, dictionary: Dictionary, splits: dict[str, int], generator: np.random.Generator
) -> None:
    folder.mkdir()
    for language in (SOURCE, TARGET):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    for split, tokens in splits.items():
        lengths = generator.integers(*SENTENCE, 2 * tokens // sum(SENTENCE))
        sources = [draw_text(length, len(dictionary), generator) for length in lengths]
        path = folder / f"{split}.{SOURCE}-{TARGET}"
        _write(path.with_name(f"{path.name}.{SOURCE}"), sources, dictionary)
        # backwards
        targets = [source[::-1].copy() for source in sources]
        _write(path.with_name(f"{path.name}.{TARGET}"), targets, dictionary)


def _write(path: Path, lines: list[np.ndarray], dictionary: Dictionary) -> None:
    """Write lines, each ended by </s>."""
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for line in lines:
        builder.add_item(torch.from_numpy(np.append(line, dictionary.eos())))
    builder.finalize(f"{path}.idx")
