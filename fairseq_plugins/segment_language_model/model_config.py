"""Options that all segment language models have, and which of them go together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from omegaconf import II, OmegaConf

from fairseq_plugins.fairseq_integration.error_messages import flag
from fairseq_plugins.product_key_memory.options import (
    TOO_LARGE,
    MemoryLayersOptions,
    check_placed,
    parse_memory_layers,
)
from fairseq_plugins.segment_language_model.attention import KERNELS


@dataclass
class SegmentLanguageModelConfig(MemoryLayersOptions):
    """Options that all segment language models have, with fairseq's names where it has them."""

    decoder_layers: int = field(default=6, metadata={"help": "number of layers"})
    decoder_embed_dim: int = field(default=512, metadata={"help": "model width"})
    decoder_attention_heads: int = field(
        default=8, metadata={"help": "number of attention heads; must divide the model width"}
    )
    decoder_ffn_embed_dim: int = field(
        default=0,
        metadata={"help": "inner width of the feed-forward sublayers; 0: layers have none"},
    )
    decoder_normalize_before: bool = field(
        default=False,
        metadata={
            "help": "normalise what enters a sublayer (pre-norm) in place of the sum (post-norm)"
        },
    )
    no_decoder_final_norm: bool = field(
        default=False,
        metadata={"help": "with pre-norm, leave the last layer's output as it is"},
    )
    layer_norm_epsilon: float = field(
        default=1e-5,
        metadata={
            "help": "what the layer norms add to the variance; the published TensorFlow models "
            "have 1e-12"
        },
    )
    dropout: float = field(
        default=0.0, metadata={"help": "dropout of what each sublayer adds to its input"}
    )
    embed_dropout: float = field(
        default=0.0,
        metadata={"help": "dropout of the input embeddings and of sinusoidal position encodings"},
    )
    output_dropout: float = field(
        default=0.0, metadata={"help": "dropout of the last layer's output"}
    )
    attention_dropout: float = field(default=0.0, metadata={"help": "dropout of attention weights"})
    activation_dropout: float = field(
        default=0.0, metadata={"help": "dropout after the activation of the feed-forward sublayers"}
    )
    attention_kernel: ChoiceEnum(list(KERNELS)) = field(
        default="fast",
        metadata={
            "help": "what computes attention: fast (blocks, gradient written out), or plain "
            "(automatic differentiation, for torch.compile and higher derivatives)"
        },
    )
    mem_len: Optional[int] = field(
        default=None,
        metadata={
            "help": "recurrence: how many tokens before the segment are remembered, 0 for none "
            "(default: see the model); evaluation may use another number through --model-overrides"
        },
    )
    clamp_len: Optional[int] = field(
        default=None,
        metadata={"help": "distances beyond this one use its position vector (default: no limit)"},
    )
    same_length: bool = field(
        default=False,
        metadata={"help": "let every token attend to the same number of tokens, --mem-len of them"},
    )
    zero_memory: bool = field(
        default=False,
        metadata={
            "help": "let streams start with a recurrence of --mem-len zero vectors, which tokens "
            "attend to, as models of some published code were trained, in place of none"
        },
    )
    share_decoder_input_output_embed: bool = field(
        default=False, metadata={"help": "tie the output projection to the input embeddings"}
    )
    output_bias: bool = field(
        default=False,
        metadata={
            "help": "give the output projection a bias; for the tied adaptive softmax also the "
            "first projection of the published models"
        },
    )
    adaptive_input: bool = field(
        default=False, metadata={"help": "input embeddings in bands, rare symbols narrower"}
    )
    adaptive_input_cutoff: Optional[str] = field(
        default=None,
        metadata={"help": "where the bands of the adaptive input end, such as 20000,60000"},
    )
    adaptive_input_factor: float = field(
        default=4, metadata={"help": "how much narrower each band of the adaptive input is"}
    )
    adaptive_softmax_cutoff: Optional[str] = field(
        default=None,
        metadata={
            "help": "where the clusters of the adaptive softmax end, such as 20000,60000; "
            "goes with --criterion segment_loss --ddp-backend legacy_ddp"
        },
    )
    adaptive_softmax_factor: float = field(
        default=4, metadata={"help": "how much narrower each cluster of the adaptive softmax is"}
    )
    adaptive_softmax_dropout: float = field(
        default=0.0, metadata={"help": "dropout of the adaptive softmax's tail projections"}
    )
    tie_adaptive_weights: bool = field(
        default=False,
        metadata={"help": "tie the embeddings of adaptive input and adaptive softmax"},
    )
    tie_adaptive_proj: bool = field(
        default=False,
        metadata={
            "help": "tie the projections of adaptive input and adaptive softmax as well, but for "
            "the first"
        },
    )
    tie_adaptive_head_proj: bool = field(
        default=False,
        metadata={
            "help": "tie the first projection too, as the published all-attention model does; "
            "needs --tie-adaptive-proj and --output-bias, without which the softmax has none"
        },
    )
    no_adaptive_head_proj: bool = field(
        default=False,
        metadata={
            "help": "leave the first band of the adaptive input, which is as wide as the model, "
            "and of the adaptive softmax without a projection"
        },
    )
    checkpoint_activations: bool = field(
        default=False,
        metadata={
            "help": "compute the layers' activations again in the backward pass: less peak memory, "
            "more time"
        },
    )
    tokens_per_sample: int = II("task.tokens_per_sample")
    # tasks of fairseq have no such option; check_task then says that they are the wrong ones
    extended_context: int = II("oc.select:task.extended_context,0")


def check_config(cfg: SegmentLanguageModelConfig, dictionary: Dictionary) -> None:
    """Raise ``ValueError`` for options that no segment language model can be built from."""
    for option, least in [
        ("decoder_layers", 1),
        ("decoder_embed_dim", 1),
        ("decoder_attention_heads", 1),
        ("decoder_ffn_embed_dim", 0),
        ("mem_len", 0),
        ("clamp_len", 1),
        ("adaptive_input_factor", 1),
        ("adaptive_softmax_factor", 1),
    ]:
        value = getattr(cfg, option)
        if value is not None and (isinstance(value, str) or value < least):
            remedy = "; leave it out for no limit" if option == "clamp_len" else ""
            raise ValueError(f"{flag(option)} is {value!r}: it must be at least {least}{remedy}")
    if str(cfg.attention_kernel) not in KERNELS:
        raise ValueError(
            f"--attention-kernel is {cfg.attention_kernel!r}: there are {', '.join(KERNELS)}"
        )
    if not isinstance(cfg.same_length, bool):
        raise ValueError(f"--same-length is {cfg.same_length!r}: give True or False")
    for option in (
        "dropout",
        "embed_dropout",
        "output_dropout",
        "attention_dropout",
        "activation_dropout",
        "adaptive_softmax_dropout",
    ):
        value = getattr(cfg, option)
        if not 0 <= value < 1:
            raise ValueError(f"{flag(option)} is {value}: it must be in [0, 1)")
    if not cfg.layer_norm_epsilon > 0:
        raise ValueError(f"--layer-norm-epsilon is {cfg.layer_norm_epsilon}: it must be above 0")
    if cfg.decoder_embed_dim % cfg.decoder_attention_heads:
        raise ValueError(
            f"--decoder-attention-heads is {cfg.decoder_attention_heads}: it must divide "
            f"--decoder-embed-dim, {cfg.decoder_embed_dim}"
        )
    if cfg.activation_dropout > 0 and cfg.decoder_ffn_embed_dim == 0:
        raise ValueError(
            "--activation-dropout needs --decoder-ffn-embed-dim: there is none to drop"
        )
    if cfg.same_length and cfg.mem_len == 0:
        raise ValueError(
            "--same-length with --mem-len 0 leaves nothing to attend to: give a larger --mem-len, "
            "or leave --same-length out"
        )
    if cfg.no_decoder_final_norm and not cfg.decoder_normalize_before:
        raise ValueError("--no-decoder-final-norm needs --decoder-normalize-before")
    layers = parse_memory_layers(cfg.memory_layers, cfg.decoder_layers, "--memory-layers")
    check_placed(cfg, bool(layers), "--memory-layers")
    _check_embedding_and_output(cfg)
    _check_weights(cfg, len(dictionary))
    for part in ("adaptive_input", "adaptive_softmax"):
        parse_cutoffs(cfg, part, dictionary)


@contextmanager
def sizes_in_memory(cfg: Any) -> Iterator[None]:
    """Name the sizes of a model that is built within where the machine lacks memory for it."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in TOO_LARGE):
            raise
        options = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else vars(cfg)
        numbers = {name: value for name, value in options.items() if type(value) is int and value}
        largest = sorted(numbers.values(), reverse=True)[:4]
        sizes = ", ".join(f"{flag(o)} {size}" for o, size in numbers.items() if size in largest)
        raise ValueError(
            f"the model takes more memory than this machine has ({sizes}): give smaller sizes"
        ) from error


def _check_weights(cfg: SegmentLanguageModelConfig, symbols: int) -> None:
    """Raise ``ValueError`` for sizes whose weights are far beyond what this machine can hold."""
    if not hasattr(os, "sysconf") or torch.empty(0).device.type == "meta":
        return
    width, inner, layers = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, cfg.decoder_layers
    # projections of attention, feed-forward layers; in single precision, as they are built
    size = 4 * layers * width * (4 * width + 2 * inner)
    if not cfg.adaptive_input:
        size += 4 * symbols * width
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # there may be swap
    if size > 4 * memory:
        raise ValueError(
            f"--decoder-layers is {layers}, --decoder-embed-dim {width} and "
            f"--decoder-ffn-embed-dim {inner}: the weights take {size / 2**30:,.0f} GiB, and this "
            f"machine has {memory / 2**30:,.0f}; give smaller sizes"
        )


def _check_embedding_and_output(cfg: SegmentLanguageModelConfig) -> None:
    adaptive_softmax = cfg.adaptive_softmax_cutoff is not None
    if cfg.adaptive_input and cfg.adaptive_input_cutoff is None:
        raise ValueError("--adaptive-input needs --adaptive-input-cutoff, such as 20000,60000")
    if cfg.adaptive_input_cutoff is not None and not cfg.adaptive_input:
        raise ValueError("--adaptive-input-cutoff needs --adaptive-input")
    if cfg.adaptive_softmax_dropout > 0 and not adaptive_softmax:
        raise ValueError("--adaptive-softmax-dropout needs --adaptive-softmax-cutoff")
    if cfg.share_decoder_input_output_embed and (cfg.adaptive_input or adaptive_softmax):
        raise ValueError(
            "--share-decoder-input-output-embed ties plain embeddings: with adaptive input and "
            "softmax use --tie-adaptive-weights"
        )
    if cfg.tie_adaptive_proj and not cfg.tie_adaptive_weights:
        raise ValueError("--tie-adaptive-proj needs --tie-adaptive-weights")
    if cfg.tie_adaptive_head_proj and not (cfg.tie_adaptive_proj and cfg.output_bias):
        raise ValueError("--tie-adaptive-head-proj needs --tie-adaptive-proj and --output-bias")
    if cfg.tie_adaptive_head_proj and cfg.adaptive_softmax_factor == 1:
        raise ValueError(
            "--tie-adaptive-head-proj with --adaptive-softmax-factor 1: bands as wide as the model "
            "have no projections; leave it out"
        )
    if cfg.no_adaptive_head_proj and not cfg.tie_adaptive_weights:
        raise ValueError("--no-adaptive-head-proj needs --tie-adaptive-weights")
    if cfg.no_adaptive_head_proj and cfg.tie_adaptive_head_proj:
        raise ValueError(
            "--no-adaptive-head-proj with --tie-adaptive-head-proj: leave one of them out"
        )
    if cfg.tie_adaptive_weights:
        if not (cfg.adaptive_input and adaptive_softmax):
            raise ValueError(
                "--tie-adaptive-weights needs --adaptive-input and --adaptive-softmax-cutoff"
            )
        for option in ("cutoff", "factor"):
            of_input = getattr(cfg, f"adaptive_input_{option}")
            of_softmax = getattr(cfg, f"adaptive_softmax_{option}")
            if of_input != of_softmax:
                raise ValueError(
                    f"--tie-adaptive-weights needs the same --adaptive-input-{option} and "
                    f"--adaptive-softmax-{option}, not {of_input} and {of_softmax}"
                )


def parse_cutoffs(cfg: SegmentLanguageModelConfig, part: str, dictionary: Dictionary) -> list[int]:
    """Return the cutoffs of ``part``, "adaptive_input" or "adaptive_softmax": [] if it has none."""
    text = getattr(cfg, f"{part}_cutoff")
    if text is None:
        return []
    name = flag(f"{part}_cutoff")
    try:
        cutoffs = [int(number) for number in str(text).strip("[]()").split(",")]
    except ValueError:
        cutoffs = []
    if not cutoffs or sorted(set(cutoffs)) != cutoffs:
        raise ValueError(f"{name} is {text!r}: it must be rising numbers, such as 20000,60000")
    if cutoffs[0] < dictionary.nspecial:
        raise ValueError(
            f"{name} is {text!r}: its first number must be at least {dictionary.nspecial}, so that "
            "padding and </s> are among the frequent symbols"
        )
    if cutoffs[-1] >= len(dictionary):
        raise ValueError(
            f"{name} is {text!r}: its last number must be below the {len(dictionary)} symbols of "
            "the dictionary"
        )
    factor = getattr(cfg, f"{part}_factor")
    if cfg.decoder_embed_dim / factor ** len(cutoffs) < 1:
        raise ValueError(
            f"{flag(f'{part}_factor')} is {factor}: {len(cutoffs)} cutoffs leave the last band "
            f"less than one of the --decoder-embed-dim {cfg.decoder_embed_dim} dimensions"
        )
    return cutoffs


def size_preset(layers: int, width: int, heads: int, inner: int = 0) -> dict[str, int]:
    """Return the options of a model's size."""
    sizes = {"decoder_layers": layers, "decoder_embed_dim": width, "decoder_attention_heads": heads}
    return {**sizes, "decoder_ffn_embed_dim": inner} if inner else sizes


def adaptive_preset(cutoffs: str, factor: int, tied_projections: bool = True) -> dict[str, Any]:
    """Return the options of adaptive input and softmax, with tied embeddings."""
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_input_factor": factor,
        "adaptive_softmax_cutoff": cutoffs,
        "adaptive_softmax_factor": factor,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": tied_projections,
        "output_bias": True,
    }
