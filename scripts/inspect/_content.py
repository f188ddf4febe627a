"""What the page shows of a model: its facts, a text token by token, and what the layers read.

Shapes: N tokens.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_plugins.python_interface.lines import Bytes, Characters
from fairseq_plugins.python_interface.loading import find_checkpoint, load
from fairseq_plugins.python_interface.scoring import in_unit
from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.python_interface.translation import TranslationModel
from fairseq_plugins.segment_language_model.split import load_tokens
from fairseq_plugins.units import BITS, PERPLEXITY
from scripts._shared.checkpoints import checkpoint_options, read_checkpoint
from scripts._shared.commands import short
from scripts.inspect._reads import (
    TextReads,
    branch_weights,
    learned_spans,
    pack,
    read_pair,
    read_text,
)

# characters a token: encoding all of a large file that is one line would take long
_LONGEST_LINE = 20


def describe_model(
    checkpoint: Path,
    data: Path | None,
    text: Path | None,
    pair: tuple[str | None, str | None],
    split: str,
    most: int,
    start: int = 0,
) -> dict[str, Any]:
    """Return the page's content for a checkpoint, and ``most`` tokens of a text from ``start``."""
    file = find_checkpoint(checkpoint)
    loaded = load(file, data)
    translates = isinstance(loaded, TranslationModel)
    reads = TextReads(translates)
    content: dict[str, Any] = {}
    if translates:
        if text is not None:
            raise ValueError(f"--text {short(text)} with a translation model: give --source")
        source, tokens, origin = _choose_pair(loaded, *pair, split)
        modes = {"with": read_pair(loaded, source, tokens, reads)}
        coder, unit = loaded.target, PERPLEXITY
        content["source"] = [_shown(loaded.source, symbol) for symbol in source.tolist()]
    else:
        if pair != (None, None):
            raise ValueError("--source and --target with a language model: give --text")
        first, start = start, start - start % loaded.segment
        tokens, origin = _choose_text(loaded, text, split, start + most)
        if start:
            origin = f"{origin}, from token {start:,}"
        if len(tokens) <= start:
            raise ValueError(
                f"--start is {first}, of {len(tokens):,} tokens: give a smaller number"
            )
        modes = {"with": read_text(loaded, tokens, reads=reads, start=start)}
        if loaded.has_past and loaded.model.decoder.network.mem_len > 0:
            modes["without"] = read_text(loaded, tokens, with_past=False, start=start)
        tokens = tokens[start:]
        coder, unit = loaded.text, loaded.unit
        content |= {"segment": loaded.segment, "start": start}
    losses = {
        mode: _figure(in_unit(figures.pop("nats"), unit), unit) for mode, figures in modes.items()
    }
    state = read_checkpoint(file, "CHECKPOINT")
    return {
        **content,
        "title": f"Inside {checkpoint_options(state, 'model')['_name']}",
        "lead": f"What the model expects of a {'translation' if translates else 'text'}, and what "
        "its layers read to predict it.",
        "facts": [
            ("parameters", f"{sum(x.numel() for x in loaded.model.parameters()):,}"),
            *_training_facts(state),
            ("text", f"{len(tokens):,} tokens of {origin}"),
            ("loss of this text", losses["with"]),
            *([("without recurrence", losses["without"])] if "without" in losses else []),
        ],
        "unit": unit,
        "losses": losses,
        **_pack_text(coder, tokens, modes),
        "reads": (packed := reads.packed(len(tokens) + len(content.get("source", ())))),
        "charts": {name: memory.pop("chart") for name, memory in packed["memories"].items()},
        "spans": learned_spans(loaded.model),
        "branches": branch_weights(loaded.model),
    }


def _figure(loss: float, unit: str) -> str:
    return f"{loss:.3f} {unit}" if unit == BITS else f"{unit} {loss:,.2f}"


def _training_facts(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the updates and the data of a training, as far as a checkpoint knows them."""
    facts = []
    history = state.get("optimizer_history") or [{}]
    if updates := history[-1].get("num_updates"):
        facts.append(("updates", f"{updates:,}"))
    if data := checkpoint_options(state, "task").get("data"):
        facts.append(("trained on", "/".join(Path(str(data)).parts[-2:])))
    return facts


def _choose_text(loaded: Any, text: Path | None, split: str, most: int) -> tuple[Tensor, str]:
    """Return the first tokens (N,) of a file or of a split, and where they are from."""
    if text is None:
        folder = Path((loaded.task.cfg or loaded.task.args).data)
        try:
            tokens = load_tokens(str(folder / split), loaded.text.dictionary)[:most]
        except FileNotFoundError as error:
            raise ValueError(f"{error}; or give --text FILE") from error
        return torch.from_numpy(tokens.astype(np.int64)), f"the {split} part"
    if not text.is_file():
        raise ValueError(f"--text {short(text)} is not a file: name one with text in UTF-8")
    loaded.text.allow_unknown = True
    lines, count, name = [torch.empty(0).long()], 0, f"--text {short(text)}"
    with text.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        while count < most and (line := file.readline(_LONGEST_LINE * most)):
            lines.append(loaded.text.encode(line, name, empty=True))
            count += len(lines[-1])
    if not (tokens := torch.cat(lines)[:most]).numel():
        raise ValueError(f"{name} is empty: name a file with text")
    return tokens, text.name


def _choose_pair(
    loaded: Any, source: str | None, target: str | None, split: str
) -> tuple[Tensor, Tensor, str]:
    """Return the tokens of a sentence and of its translation, and where they are from."""
    if source is None:
        loaded.task.load_dataset(split)
        pair = loaded.task.dataset(split)[0]
        return pair["source"], pair["target"], f"the first pair of the {split} part"
    loaded.source.allow_unknown = loaded.target.allow_unknown = True
    origin = "the model's own translation" if target is None else "--target"
    target = loaded.translate(source) if target is None else target
    sides = ((loaded.source, source, "--source"), (loaded.target, target, "--target"))
    tokens = [loaded.encode(*side) for side in sides]
    return tokens[0], tokens[1], origin


def _pack_text(
    coder: TextCoder, tokens: Tensor, modes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the text and its predictions, with the symbols that they name as ``vocabulary``."""
    named = [tokens.numpy(), *(figures["likeliest"].ravel() for figures in modes.values())]
    symbols, places = np.unique(np.concatenate(named), return_inverse=True)
    parts = np.split(places.astype(np.uint32), np.cumsum([len(part) for part in named])[:-1])
    for figures, likeliest in zip(modes.values(), parts[1:], strict=True):
        figures["likeliest"] = likeliest
    return {
        "vocabulary": [_shown(coder, symbol) for symbol in symbols.tolist()],
        "tokens": pack(parts[0]),
        "modes": {
            mode: {name: pack(values) for name, values in figures.items()}
            for mode, figures in modes.items()
        },
    }


def _shown(coder: TextCoder, token: int) -> str:
    """Return a symbol as it stands in a text, with its blanks; ``</s>`` is a newline."""
    symbol = coder.dictionary[token]
    if token == coder.dictionary.eos():
        return "\n"
    if token < coder.dictionary.nspecial:
        return symbol
    if isinstance(coder.lines, Bytes):
        byte = chr(int(symbol)) if symbol.isdecimal() else symbol
        return byte if byte.isprintable() and byte.isascii() else f"\\x{ord(byte[0]):02x}"
    if isinstance(coder.lines, Characters):
        return coder.lines.decode([symbol])
    if hasattr(getattr(coder.lines, "bpe", None), "sp"):  # sentencepiece
        return symbol.replace("\u2581", " ")
    # Moses escapes some characters
    word = html.unescape(symbol)
    return word.removesuffix("@@") if word.endswith("@@") else f"{word} "
