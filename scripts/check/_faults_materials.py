"""What the cases of a campaign of faults work with: small texts, data, trainings, checkpoints.

Each is made once, when it is first asked for, in a folder of the campaign.
"""

import json
import random
import re
import socket
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from scripts.check._faults_programs import USER_DIR, succeed

WORDS = "the cat sat on a mat dog ran far away and then home again".split()
LINES = {"train": 150, "valid": 25, "test": 31}
# the logged numbers that tell how long something took
_TIMES = ("wps", "ups", "wall", "train_wall", "bsz", "gb_free")
SEGMENTS = ("--task", "segment_language_modeling", "--tokens-per-sample", 8, "--batch-size", 4)
BLOCKS = ("--task", "language_modeling", "--tokens-per-sample", 16, "--batch-size", 8)
NARROW = (
    *("--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-attention-heads", 2),
    *("--decoder-ffn-embed-dim", 32),
)
BRANCHED = (
    *("--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32),
    *("--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32),
)
# A small training of each paper: its data, and what makes its model and optimizer.
TRAININGS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "transformer_xl": (
        "text",
        (
            *(*SEGMENTS, "--arch", "transformer_xl", *NARROW, "--dropout", 0.1, "--mem-len", 12),
            *("--optimizer", "adam", "--lr", 0.005, "--clip-norm", 0.25),
        ),
    ),
    "all_attention": (
        "text",
        (
            *(*SEGMENTS, "--arch", "all_attention_lm", *NARROW[:6], "--persistent-vectors", 4),
            *("--attention-span", 12, "--adaptive-span", "--span-ramp", 4, "--dropout", 0.1),
            *("--criterion", "segment_loss", "--span-loss", 0.01),
            *("--optimizer", "adagrad_with_clip", "--lr", 0.05, "--adagrad-clip", 0.03),
        ),
    ),
    "product_key_memory": (
        "text",
        (
            *(*BLOCKS, "--arch", "pkm_transformer_lm", *NARROW, "--memory-layers", 2),
            *("--memory-slots", 64, "--memory-heads", 2, "--memory-knn", 4),
            *("--memory-query-dim", 8, "--dropout", 0.1),
            *("--optimizer", "adam_with_memory", "--lr", 0.003, "--memory-lr", 0.01),
        ),
    ),
    "weighted_transformer": (
        "pairs",
        (
            *("--arch", "weighted_transformer_tiny", *BRANCHED, "--max-tokens", 200),
            *("--share-decoder-input-output-embed", "--branch-warmup-updates", 5, "--lr", 0.005),
            *("--optimizer", "adam_with_branch_weights", "--adam-betas", "(0.9, 0.98)"),
            *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        ),
    ),
}


class Materials:
    """The materials of a campaign.

    Args:
        folder: where they are made; new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def texts(self) -> Path:
        """Folder of {train,valid,test}.{txt,en,de}; .de has the words of a line last to first."""
        folder = self.folder / "texts"
        folder.mkdir(parents=True)
        draw = random.Random(1)
        for split, count in LINES.items():
            lines = [draw.choices(WORDS, k=draw.randint(1, 9)) for _ in range(count)]
            turned = [line[::-1] for line in lines]
            for suffix, content in (("txt", lines), ("en", lines), ("de", turned)):
                text = "".join(" ".join(line) + "\n" for line in content)
                (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")
        return folder

    @cached_property
    def text(self) -> Path:
        """Folder of the binarized text."""
        splits = [f"--{split}pref={self.texts}/{split}.txt" for split in LINES]
        return self._binarized("text", ("--only-source", *splits))

    @cached_property
    def pairs(self) -> Path:
        """Folder of the binarized pairs, with one dictionary."""
        splits = [f"--{split}pref={self.texts}/{split}" for split in LINES]
        languages = ("--source-lang", "en", "--target-lang", "de", "--joined-dictionary")
        return self._binarized("pairs", (*languages, *splits))

    def _binarized(self, name: str, words: tuple[Any, ...]) -> Path:
        target = self.folder / name
        succeed(("fairseq-preprocess", *words, "--destdir", target), self.folder / f"make {name}")
        return target

    def training(self, paper: str, output: Path, *options: Any) -> tuple[Any, ...]:
        """Words of fairseq-train for the small model of a paper, whose checkpoints go to output."""
        data, model = TRAININGS[paper]
        return (
            *("fairseq-train", getattr(self, data), *USER_DIR, *model),
            *("--required-batch-size-multiple", 1, "--num-workers", 0, "--cpu", "--seed", 1),
            *("--log-format", "json", "--log-interval", 1, "--save-dir", output, *options),
        )

    @cached_property
    def checkpoints(self) -> dict[str, Path]:
        """The last checkpoint of a short training of each paper, one of 4 updates beside it."""
        found = {}
        for paper in TRAININGS:
            output = self.folder / "models" / paper
            words = self.training(paper, output, "--max-update", 8, "--save-interval-updates", 4)
            succeed(words, self.folder / "make models" / paper)
            found[paper] = output / "checkpoint_last.pt"
        return found

    @cached_property
    def news(self) -> Path:
        """Folder of articles: the texts with an empty line after every fifth line."""
        folder = self.folder / "news"
        folder.mkdir()
        for split in LINES:
            lines = (self.texts / f"{split}.txt").read_text().splitlines(keepends=True)
            spaced = [line + "\n" * (n % 5 == 4) for n, line in enumerate(lines)]
            (folder / f"{split}.txt").write_text("".join(spaced))
        return folder

    @cached_property
    def foreign(self) -> Path:
        """Folder of a model that the adaptive-span code would have saved: two layers of width 8."""
        folder = self.folder / "foreign"
        folder.mkdir(parents=True)
        d, heads, vectors, span, symbols = 8, 2, 3, 6, 4
        shapes = {"in_emb.weight": (symbols, d), "out_emb.weight": (symbols, d)}
        shapes |= {"out_emb.bias": (symbols,), "key_pe": (1, d // heads, span)}
        for layer in ("layers.0.", "layers.1."):
            attention = f"{layer}attn."
            shapes |= {
                f"{attention}proj_{x}.weight": (d, d) for x in ("query", "key", "val", "out")
            }
            memory = f"{attention}attn.persistent_memory."
            shapes |= {f"{memory}key": (heads, d // heads, vectors)}
            shapes |= {f"{memory}val": (heads, vectors, d // heads)}
            shapes |= {f"{layer}norm1.{kind}": (d,) for kind in ("weight", "bias")}
        draw = torch.Generator().manual_seed(1)
        weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        torch.save(weights, folder / "model.pt")
        options = {"nb_layers": 2, "hidden_size": d, "nb_heads": heads, "attn_span": span}
        options |= {"pers_mem_size": vectors, "dropout": 0.1, "emb_dropout": 0.0}
        options |= {"vocab_size": symbols, "block_size": 8}
        (folder / "config.json").write_text(json.dumps(options))
        (folder / "vocab.txt").write_text("<eos>\n<unk>\na\nb\n")
        return folder

    def conversion(self, source: Path, output: Path) -> tuple[Any, ...]:
        """Words of the converter for a model in the files of :attr:`foreign`."""
        return (
            *("scripts.convert.checkpoint", "--source", "adaptive-span", "--output", output),
            *("--checkpoint", source / "model.pt", "--config", source / "config.json"),
            *("--vocab", source / "vocab.txt"),
        )

    def together(self, workers: int) -> tuple[Any, ...]:
        """Further words for each of some workers of a training; --distributed-rank is lacking."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        return (
            *("--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo"),
            *("--distributed-no-spawn", "--distributed-world-size", workers),
            *("--distributed-init-method", address),
        )

    @cached_property
    def wide(self) -> Path:
        """A checkpoint of a Transformer-XL of width 256, whose states and matrices count."""
        output = self.folder / "models" / "wide"
        width = ("--decoder-embed-dim", 256, "--decoder-ffn-embed-dim", 256)
        words = self.training("transformer_xl", output, *width, "--max-update", 2)
        succeed(words, self.folder / "make models" / "wide")
        return output / "checkpoint_last.pt"

    @cached_property
    def long(self) -> Path:
        """Folder of a binarized text whose test part has 100,000 tokens."""
        draw = random.Random(2)
        path = self.folder / "long.txt"
        path.write_text("".join(" ".join(draw.choices(WORDS, k=9)) + "\n" for _ in range(10_000)))
        words = ("--only-source", "--srcdict", self.text / "dict.txt", f"--testpref={path}")
        return self._binarized("long", words)

    def evaluation(
        self, checkpoint: Path, *options: Any, data: Path | None = None
    ) -> tuple[Any, ...]:
        """Words of fairseq-eval-lm for a checkpoint of a segment language model."""
        return (
            *(
                "fairseq-eval-lm",
                data or self.text,
                *USER_DIR,
                "--task",
                "segment_language_modeling",
            ),
            *("--path", checkpoint, "--gen-subset", "test", "--cpu", "--no-progress-bar"),
            *("--num-workers", 0, "--tokens-per-sample", 8, *options),
        )

    def translation(self, checkpoint: Path, *options: Any) -> tuple[Any, ...]:
        """Words of fairseq-generate for a checkpoint of a translation model."""
        return (
            *("fairseq-generate", self.pairs, *USER_DIR, "--path", checkpoint, "--cpu"),
            *("--num-workers", 0, "--beam", 2, "--max-len-b", 12, *options),
        )


def translation(source: Path, output: Path) -> tuple[Any, ...]:
    """Words of the preparation of a small translation."""
    splits = [word for part in ("train", "valid", "test") for word in (f"--{part}", source / part)]
    return (
        *("scripts.prepare.translation", "--source-lang", "en", "--target-lang", "de", *splits),
        *("--output", output, "--bpe-size", 40, "--workers", 2),
    )


def logged(printed: str) -> dict[tuple[str, int], dict[str, str]]:
    """Numbers that a training logged, but for times: by their kind and its number of updates."""
    found = {}
    for kind, line in re.findall(r"\| (train_inner|valid) \| ({.*})$", printed, re.MULTILINE):
        values = json.loads(line)
        updates = int(values.get("num_updates") or values["valid_num_updates"])
        found[kind, updates] = {
            name: value
            for name, value in values.items()
            if name.removeprefix("valid_") not in _TIMES
        }
    return found
