"""The models that a benchmark of transformer_xl compares, how they read, and their arithmetic.

Shapes: B streams, T tokens of a segment, M remembered tokens, V symbols, d model width.
"""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

import plugin_path  # noqa: F401 (makes fairseq_plugins importable)
from fairseq_plugins.models.transformer_xl import (
    RELATIVE,
    TransformerXLConfig,
    TransformerXLLanguageModel,
)
from fairseq_plugins.models.transformer_xl_presets import PRESETS
from fairseq_plugins.modules.segment_memory import SegmentMemory
from original_transformer_xl import OriginalModel, copy_weights

# Symbols of the data sets that the sizes were published for, and of any other size.
SYMBOLS = {"enwik8": 205, "text8": 27, "wt103": 267_735, "lm1b": 793_471}
SYMBOLS_OF_OTHERS = 205
DTYPES = FP32, BF16, AUTOCAST = ("fp32", "bf16", "bf16-autocast")
OURS, PLAIN, ORIGINAL = MODELS = ("transformer_xl", "transformer_lm", "original")


@dataclass(frozen=True)
class Setting:
    """What is read how: T tokens a segment, a memory of M, B streams; see ``--evaluate``."""

    mode: str
    segment: int
    memory: int
    batch: int
    clamp: int | None = None

    @property
    def text(self) -> str:
        """The setting as it is given on the command line."""
        numbers = [self.segment, self.memory, self.batch, *([self.clamp] if self.clamp else [])]
        return "/".join(map(str, numbers))

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return self.mode == "train"

    @property
    def segments(self) -> int:
        """Segments that renew the memory once: a repeat, which so has its share of every cost."""
        return max(1, math.ceil(self.memory / self.segment))


class Contender(NamedTuple):
    """One of MODELS in one of DTYPES."""

    model: str
    dtype: str


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


@functools.lru_cache(maxsize=1)
def vocabulary(size: str) -> Dictionary:
    """A dictionary as large as that of the data set that a size was published for."""
    data_set = size.removeprefix("transformer_xl_").split("_")[0]
    dictionary = Dictionary()
    for number in range(SYMBOLS.get(data_set, SYMBOLS_OF_OTHERS) - dictionary.nspecial):
        dictionary.add_symbol(str(number))
    return dictionary


def cutoffs(cfg: TransformerXLConfig) -> list[int]:
    """Where the bands of the adaptive embeddings end; [] for plain ones."""
    return [int(number) for number in (cfg.adaptive_input_cutoff or "").split(",") if number]


def draw_tokens(dictionary: Dictionary, setting: Setting, generator: torch.Generator) -> Tensor:
    """A segment and the token after it, (B, T + 1), as frequent as Zipf's law has them."""
    first, symbols = dictionary.nspecial, len(dictionary)
    uniform = torch.rand(setting.batch, setting.segment + 1, generator=generator)
    return (first * (symbols / first) ** uniform).long().clamp_(max=symbols - 1)


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


def token_losses(decoder: nn.Module, scores: Tensor, targets: Tensor) -> Tensor:
    """Loss of each of the targets (B, T), as fairseq's criteria compute it."""
    flat = targets.flatten()
    softmax = decoder.adaptive_softmax
    if softmax is None:
        losses = F.cross_entropy(scores.flatten(0, 1).float(), flat, reduction="none")
        return losses.view_as(targets)
    (scores, *in_clusters), (first, *targets_in_clusters) = softmax(scores, flat)
    losses = F.cross_entropy(scores.float(), first, reduction="none")
    for cluster, (scores, chosen) in enumerate(zip(in_clusters, targets_in_clusters, strict=True)):
        if chosen is not None:
            where = first == softmax.cutoff[0] + cluster
            in_cluster = F.cross_entropy(scores.float(), chosen, reduction="none")
            losses = losses.masked_scatter(where, losses[where] + in_cluster)
    return losses.view_as(targets)


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


class Reader:
    """A contender that reads streams segment by segment, with a memory of its own.

    Args:
        contender: which model, in which dtype.
        model: the model, in fp32.
        setting: how it reads.
        device: where it computes.
    """

    def __init__(
        self, contender: Contender, model: nn.Module, setting: Setting, device: torch.device
    ) -> None:
        self.contender, self.setting, self.device = contender, setting, device
        self.model = model.to(device).train(setting.training)
        if contender.dtype == BF16:
            self.model.bfloat16()
        self.memory = SegmentMemory()
        self.original_memory: list[Tensor] = []
        self.start = 0

    def read(self, tokens: Tensor) -> Tensor:
        """Read tokens (B, T + 1) and return the losses (B, T) of all but the first."""
        autocast = self.contender.dtype == AUTOCAST
        with (
            torch.set_grad_enabled(self.setting.training),
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast),
        ):
            losses = self._losses(tokens)
            loss = losses.mean()
        if self.setting.training:
            loss.backward()
            self.model.zero_grad(set_to_none=True)
        return losses.detach()

    def _losses(self, tokens: Tensor) -> Tensor:
        if self.contender.model == ORIGINAL:
            losses, self.original_memory = self.model.losses(tokens, self.original_memory)
            return losses
        read, targets = tokens[:, :-1], tokens[:, 1:]
        if self.contender.model == PLAIN:
            scores, _ = self.model(read)
        else:
            scores, _ = self.model(read, memory=self.memory.at(self.start))
            self.start += self.setting.segment
        return token_losses(self.model.decoder, scores, targets)


def build_readers(
    size: str,
    setting: Setting,
    contenders: list[Contender],
    device: torch.device,
    original_class: type[nn.Module] | None = None,
) -> list[Reader]:
    """One reader a contender, those of ORIGINAL's class and of OURS with the same weights."""
    cfg, dictionary = configuration(size, setting), vocabulary(size)
    torch.manual_seed(1)
    original = None
    if original_class is not None:
        original = OriginalModel(original_class, cfg, cutoffs(cfg), len(dictionary))

    def build(name: str) -> nn.Module:
        if name == ORIGINAL:
            return original
        if name == PLAIN:
            return build_plain(cfg, dictionary)
        task = SimpleNamespace(source_dictionary=dictionary)
        model = TransformerXLLanguageModel.build_model(cfg, task)
        if original is not None:
            copy_weights(original.model, model.decoder)
        return model

    models = [build(contender.model) for contender in contenders]
    return [
        Reader(contender, model, setting, device)
        for contender, model in zip(contenders, models, strict=True)
    ]
