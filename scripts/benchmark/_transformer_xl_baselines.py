"""The models that a benchmark of transformer_xl compares, and their arithmetic.

Shapes: B streams, T tokens of a segment, M remembered tokens, V symbols, d model width.
"""

import math
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

from fairseq_plugins.transformer_xl.model import (
    PRESETS,
    RELATIVE,
    TransformerXLConfig,
    TransformerXLLanguageModel,
)
from scripts.benchmark._baselines import (
    Entry,
    MemoryReader,
    Models,
    OriginalReader,
    PlainReader,
    Reader,
    Setting,
    make_dictionary,
)
from scripts.benchmark._original_transformer_xl import OriginalModel, copy_weights

# Symbols of the data sets that the sizes were published for, and of any other size.
SYMBOLS = {"enwik8": 205, "text8": 27, "wt103": 267_735, "lm1b": 793_471}
SYMBOLS_OF_OTHERS = 205
MODELS = Models("transformer_xl", "transformer_lm")


def configuration(size: str, setting: Setting) -> TransformerXLConfig:
    """Options of a preset for a setting, without dropout.

    Raises ValueError when there is no such preset, or it has no memory.
    """
    known = [
        name
        for name, values in PRESETS.items()
        if values.get("positions", RELATIVE[0]) == RELATIVE[0]
    ]
    if size not in known:
        raise ValueError(f"--size is {size!r}: give presets with a memory, {', '.join(known)}")
    values = {name: value for name, value in PRESETS[size].items() if "dropout" not in name}
    return TransformerXLConfig(
        **values,
        tokens_per_sample=setting.segment,
        extended_context=0,
        mem_len=setting.memory,
        clamp_len=setting.clamp,
        same_length=setting.clamp is not None,
    )


def vocabulary(size: str) -> Dictionary:
    """A dictionary as large as that of the data set that a size was published for."""
    data_set = size.removeprefix("transformer_xl_").split("_")[0]
    return make_dictionary(SYMBOLS.get(data_set, SYMBOLS_OF_OTHERS))


def cutoffs(cfg: TransformerXLConfig) -> list[int]:
    """Where the bands of the adaptive embeddings end; [] for plain ones."""
    return [int(number) for number in (cfg.adaptive_input_cutoff or "").split(",") if number]


def multiply_adds(
    cfg: TransformerXLConfig, dictionary: Dictionary, setting: Setting, plain: bool = False
) -> float:
    """Multiply-adds of the matrix products that a segment needs; plain for a transformer_lm.

    With f the inner width, n = B*T tokens and P the pairs of a query and a key that it sees, a
    layer takes 4*n*d^2 (projections) + 2*n*d*f (feed-forward) + 3*B*P*d (scores by content and by
    distance, values). A plain one has no memory and no scores by distance. Training, but not
    evaluation, which has them from before, projects the memory too, 2*B*M*d^2, and the T + M
    distances, (T + M)*d^2.

    The output takes n*d*V. An adaptive one takes n*d*(frequent symbols + clusters) and, for the
    tokens of a cluster, its width for each of its symbols; bands narrower than the model project
    what is read of them, and what they score. The first band's scores are projected for all tokens.

    The gradient takes as much again for each factor of a product that wants one: training is 3
    times the forward pass, but 2 times where one factor is the memory or the sinusoids.
    """
    width, first = cfg.decoder_embed_dim, dictionary.nspecial
    memory = 0 if plain else setting.memory
    tokens = setting.batch * setting.segment
    farthest = memory if cfg.same_length and not plain else math.inf
    pairs = sum(min(memory + place + 1, farthest) for place in range(setting.segment))
    layer = 4 * tokens * width**2 + 2 * tokens * width * cfg.decoder_ffn_embed_dim
    layer += (2 if plain else 3) * setting.batch * pairs * width
    ends = [*cutoffs(cfg), len(dictionary)]
    output = tokens * width * (ends[0] + len(ends) - 1)
    narrower = len(ends) > 1 and cfg.adaptive_input_factor > 1
    for band, (start, end) in enumerate(zip([first, *ends], ends, strict=False)):
        inner = width // cfg.adaptive_input_factor**band if narrower else width
        in_band = tokens * math.log(end / start) / math.log(len(dictionary) / first)
        if band:
            output += in_band * inner * (end - start)
        if narrower:
            output += in_band * inner * width
            if band or not plain:
                output += (in_band if band else tokens) * inner * width
    forward = cfg.decoder_layers * layer + output
    if not setting.training:
        return forward
    distances = 0 if plain else setting.segment + memory
    constant = (2 * setting.batch * memory + distances) * width**2
    return 3 * forward + 2 * cfg.decoder_layers * constant


def build_plain(cfg: TransformerXLConfig, dictionary: Dictionary) -> TransformerLanguageModel:
    """The transformer_lm of fairseq, of the same size, without dropout."""
    shared = {
        name: getattr(cfg, name)
        for name in TransformerLanguageModelConfig.__dataclass_fields__
        if "dropout" not in name and hasattr(cfg, name)
    }
    options = TransformerLanguageModelConfig(
        **shared,
        decoder_input_dim=cfg.decoder_embed_dim,
        decoder_output_dim=cfg.decoder_embed_dim,
        dropout=0.0,
        add_bos_token=False,
        max_target_positions=cfg.tokens_per_sample,
        tpu=False,
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerLanguageModel.build_model(options, task)


def build_readers(
    size: str,
    setting: Setting,
    entries: list[Entry],
    device: torch.device,
    original_class: type[nn.Module] | None = None,
) -> list[Reader]:
    """One reader a entry, the original of that class and ours with the same weights."""
    cfg, dictionary = configuration(size, setting), vocabulary(size)
    torch.manual_seed(1)
    original = None
    if original_class is not None:
        original = OriginalModel(original_class, cfg, cutoffs(cfg), len(dictionary))

    def build(entry: Entry) -> tuple[type[Reader], nn.Module]:
        if entry.model == MODELS.original:
            return OriginalReader, original
        if entry.model == MODELS.plain:
            return PlainReader, build_plain(cfg, dictionary)
        task = SimpleNamespace(source_dictionary=dictionary)
        model = TransformerXLLanguageModel.build_model(cfg, task)
        if original is not None:
            copy_weights(original.model, model.decoder)
        return MemoryReader, model

    # all weights are drawn before the first model moves to its device and dtype
    built = [build(entry) for entry in entries]
    return [
        kind(entry, model, setting, device)
        for entry, (kind, model) in zip(entries, built, strict=True)
    ]
