"""Options of the task and of all segment language models, and checks of their combinations."""

import ast
import glob
import os
from dataclasses import dataclass
from typing import Any, Optional

from fairseq import utils
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.fairseq_integration.options import check_range, flag, option
from fairseq_plugins.product_key_memory.options import MemoryLayersOptions
from fairseq_plugins.segment_language_model.attention import KERNELS

# what evaluation may change, without another model
CHANGED_IN_EVALUATION = (
    "attention_kernel",
    "clamp_len",
    "compile_layers",
    "mem_len",
    "same_length",
)
# the options that set layers' parameters
PARAMETERS = {
    "num_layers": "decoder_layers",
    "embed_dim": "decoder_embed_dim",
    "num_heads": "decoder_attention_heads",
    "ffn_dim": "decoder_ffn_embed_dim",
    "kernel": "attention_kernel",
}
# each first option needs the second one
_NEEDS = (
    ("activation_dropout", "decoder_ffn_embed_dim"),
    ("no_decoder_final_norm", "decoder_normalize_before"),
    ("adaptive_input", "adaptive_input_cutoff"),
    ("adaptive_input_cutoff", "adaptive_input"),
    ("adaptive_softmax_dropout", "adaptive_softmax_cutoff"),
    ("tie_adaptive_weights", "adaptive_input"),
    ("tie_adaptive_weights", "adaptive_softmax_cutoff"),
    ("tie_adaptive_proj", "tie_adaptive_weights"),
    ("tie_adaptive_head_proj", "tie_adaptive_proj"),
    ("tie_adaptive_head_proj", "output_bias"),
    ("no_adaptive_head_proj", "tie_adaptive_weights"),
)


@dataclass
class SegmentLanguageModelConfig(MemoryLayersOptions):
    """Options that all segment language models have, with fairseq's names where it has them."""

    decoder_layers: int = option(6, "number of layers")
    decoder_embed_dim: int = option(512, "model width")
    decoder_attention_heads: int = option(
        8, "number of attention heads; must divide the model width"
    )
    decoder_ffn_embed_dim: int = option(
        0, "inner width of the feed-forward sublayers; 0 for layers without them"
    )
    decoder_normalize_before: bool = option(
        False, "normalise each sublayer's input (pre-norm) instead of the sum (post-norm)"
    )
    no_decoder_final_norm: bool = option(
        False, "with pre-norm, do not normalise the last layer's output"
    )
    layer_norm_epsilon: float = option(
        1e-5, "number that layer norms add to the variance; published TensorFlow models have 1e-12"
    )
    dropout: float = option(0.0, "dropout of each sublayer's output")
    embed_dropout: float = option(
        0.0, "dropout of the input embeddings and of sinusoidal position encodings"
    )
    output_dropout: float = option(0.0, "dropout of the last layer's output")
    attention_dropout: float = option(0.0, "dropout of attention weights")
    activation_dropout: float = option(
        0.0, "dropout after the activation of the feed-forward sublayers"
    )
    attention_kernel: ChoiceEnum(list(KERNELS)) = option(
        "fast",
        "implementation of attention: fast (written by hand on a CPU, sdpa elsewhere), sdpa "
        "(PyTorch's fused attention), or plain (separate operations, with higher derivatives)",
    )
    mem_len: Optional[int] = option(
        None,
        "recurrence: number of earlier tokens that the model keeps as its past, 0 for none "
        "(default: see the model); evaluation can change it with --model-overrides",
    )
    clamp_len: Optional[int] = option(
        None,
        "longest distance with its own position vector, which longer ones share (default: no "
        "limit)",
    )
    same_length: bool = option(
        False, "let every token attend to the same number of tokens, --mem-len of them"
    )
    zero_past: bool = option(
        False,
        "let streams start with a past of --mem-len zero vectors, which tokens attend to, as some "
        "published code does in training, instead of an empty one",
    )
    zero_memory: bool = option(False, "former name of --zero-past")
    share_decoder_input_output_embed: bool = option(
        False, "tie the output projection to the input embeddings"
    )
    output_bias: bool = option(
        False,
        "give the output projection a bias, and a tied adaptive softmax also the first projection "
        "of the published models",
    )
    adaptive_input: bool = option(
        False, "split input embeddings into bands, with narrower vectors for rarer symbols"
    )
    adaptive_input_cutoff: Optional[str] = option(
        None, "ends of the bands of the adaptive input, such as 20000,60000"
    )
    adaptive_input_factor: float = option(
        4, "factor by which each band of the adaptive input is narrower than the one before"
    )
    adaptive_softmax_cutoff: Optional[str] = option(
        None,
        "ends of the clusters of the adaptive softmax, such as 20000,60000; needs --criterion "
        "segment_loss --ddp-backend legacy_ddp",
    )
    adaptive_softmax_factor: float = option(
        4, "factor by which each cluster of the adaptive softmax is narrower than the one before"
    )
    adaptive_softmax_dropout: float = option(
        0.0, "dropout before the adaptive softmax, and again after its tails' projections"
    )
    tie_adaptive_weights: bool = option(
        False, "tie the embeddings of adaptive input and adaptive softmax"
    )
    tie_adaptive_proj: bool = option(
        False,
        "also tie the projections of adaptive input and adaptive softmax, except the first",
    )
    tie_adaptive_head_proj: bool = option(
        False,
        "tie the first projection too, as the published all-attention model does; needs "
        "--tie-adaptive-proj, and --output-bias, which adds that projection",
    )
    no_adaptive_head_proj: bool = option(
        False,
        "do not project the first bands of adaptive input and softmax, which are as wide as the "
        "model",
    )
    checkpoint_activations: bool = option(
        False,
        "compute the layers' activations again in the backward pass, for less memory and more time",
    )
    # the options of other tasks, which build_model refuses, may lack these
    compile_layers: bool = option(
        False,
        "run each layer through torch.compile, which takes minutes at the start; the first "
        "segments of a pass, until the recurrence is full, and the last one run without it",
    )
    # with a text, --arch accepts the option of a task that was forgotten, and can name the task
    tokens_per_sample: int = option(
        II("oc.select:task.tokens_per_sample,0"), "segment length, as the task has it"
    )
    extended_context: int = II("oc.select:task.extended_context,0")


def check_options(cfg: SegmentLanguageModelConfig, dictionary: Dictionary, mem_len: int) -> None:
    """Refuse options from which no model can be built; ``mem_len`` is the recurrence."""
    sizes = ("decoder_layers", "decoder_embed_dim", "decoder_attention_heads", "clamp_len")
    check_range(cfg, 1, *sizes, "adaptive_input_factor", "adaptive_softmax_factor")
    check_range(cfg, 0, "decoder_ffn_embed_dim", "mem_len", "layer_norm_epsilon")
    options = SegmentLanguageModelConfig.__dataclass_fields__
    check_range(cfg, 0, *(name for name in options if name.endswith("dropout")), below=1)
    if not isinstance(cfg.same_length, bool):
        raise ValueError(f"--same-length is {cfg.same_length!r}: give True or False")
    if cfg.same_length and mem_len == 0:
        raise ValueError(
            "--same-length without recurrence leaves nothing to attend to: give --mem-len "
            "(and no --extended-context), or leave --same-length out"
        )
    for name, needed in _NEEDS:
        if getattr(cfg, name) and not getattr(cfg, needed):
            raise ValueError(f"{flag(name)} needs {flag(needed)}: give both, or neither")
    recomputed = cfg.compile_layers and cfg.checkpoint_activations
    if recomputed and cfg.memory_layers and cfg.memory_query_batch_norm:
        raise ValueError(
            "--compile-layers with --checkpoint-activations and --memory-query-batch-norm, whose "
            "statistics would move twice: leave one of the three out"
        )
    _check_tied(cfg)
    for part in ("adaptive_input", "adaptive_softmax"):
        parse_cutoffs(cfg, part, dictionary)


def _check_tied(cfg: SegmentLanguageModelConfig) -> None:
    adaptive = cfg.adaptive_input or cfg.adaptive_softmax_cutoff is not None
    refusals = (
        (
            cfg.share_decoder_input_output_embed and adaptive,
            "--share-decoder-input-output-embed ties plain embeddings: for adaptive input and "
            "softmax give --tie-adaptive-weights instead",
        ),
        (
            cfg.tie_adaptive_head_proj and cfg.adaptive_softmax_factor == 1,
            "--tie-adaptive-head-proj with --adaptive-softmax-factor 1: bands as wide as the model "
            "have no projections to tie; leave the option out",
        ),
        (
            cfg.no_adaptive_head_proj and cfg.tie_adaptive_head_proj,
            "--no-adaptive-head-proj with --tie-adaptive-head-proj: leave one of them out",
        ),
        *(
            (
                cfg.tie_adaptive_weights
                and getattr(cfg, f"adaptive_input_{what}")
                != getattr(cfg, f"adaptive_softmax_{what}"),
                f"--tie-adaptive-weights needs the same --adaptive-input-{what} and "
                f"--adaptive-softmax-{what}, not {getattr(cfg, f'adaptive_input_{what}')} and "
                f"{getattr(cfg, f'adaptive_softmax_{what}')}",
            )
            for what in ("cutoff", "factor")
        ),
    )
    for refused, message in refusals:
        if refused:
            raise ValueError(message)


def compiled_length(cfg: SegmentLanguageModelConfig) -> int:
    """Return the length of the segments that compiled layers read; 0 without --compile-layers."""
    return cfg.compile_layers * (cfg.tokens_per_sample + cfg.extended_context)


def parse_cutoffs(cfg: SegmentLanguageModelConfig, part: str, dictionary: Dictionary) -> list[int]:
    """Return the cutoffs of ``part``, "adaptive_input" or "adaptive_softmax"; [] if not set."""
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


# Options of the task.


@dataclass
class SegmentLanguageModelingConfig(FairseqDataclass):
    """Options of ``segment_language_modeling``."""

    data: Optional[str] = option(
        None,
        "folder that fairseq-preprocess wrote; or several, separated by colons, one for each epoch "
        "in turn",
    )
    tokens_per_sample: int = option(512, "segment length: number of tokens computed at once")
    extended_context: int = option(
        0,
        "number of tokens before each segment that are read again and not scored: the context of "
        "models without recurrence (--mem-len 0)",
    )
    batch_split: int = option(
        1,
        "number of parts into which the streams of a batch are split; training computes them one "
        "after another, for the same update with less memory; not with --memory-query-batch-norm",
    )
    continue_past_eos: bool = option(
        False,
        "let generation go on past </s>, up to --max-len-b tokens, and print </s>: for models of "
        "running text, where </s> ends a line",
    )
    shuffle_sentences: bool = option(
        False,
        "read the training part's sentences, each up to its </s>, in a new random order every "
        "epoch, as the published Transformer-XL does on One Billion Word",
    )
    no_save_past: bool = option(
        False,
        "leave the streams' past (layers x streams x --mem-len x width numbers) out of "
        "checkpoints in mid-epoch; runs resumed from them start cold",
    )
    no_save_memory: bool = option(False, "former name of --no-save-past")
    batch_size: Optional[int] = II("dataset.batch_size")
    train_subset: str = II("dataset.train_subset")
    post_process: Optional[str] = II("common_eval.post_process")
    path: Optional[str] = II("common_eval.path")
    model_overrides: Optional[str] = II("common_eval.model_overrides")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II("dataset.dataset_impl")


def find_dictionary(cfg: SegmentLanguageModelingConfig) -> str:
    """Check the task's own options, and return the path of the dictionary."""
    if not cfg.data:
        raise ValueError("DATA is missing: name the folder that fairseq-preprocess wrote")
    check_range(cfg, 1, "tokens_per_sample", "batch_split")
    check_range(cfg, 0, "extended_context")
    if cfg.path and os.path.isdir(cfg.path):
        raise ValueError(
            f"--path is {cfg.path}, a folder: name a checkpoint in it, such as "
            f"{os.path.join(cfg.path, 'checkpoint_best.pt')}"
        )
    check_overrides(cfg.model_overrides)
    path = os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")
    folder = os.path.dirname(path)
    if not os.path.isfile(path):
        if languages := glob.glob(os.path.join(glob.escape(folder), "dict.*.txt")):
            raise ValueError(
                f"DATA is {cfg.data}: it holds sentences and their translations "
                f"({', '.join(sorted(map(os.path.basename, languages)))}), not running text; give "
                "--task translation, and evaluate with fairseq-generate"
            )
        inside = os.path.join(folder, "bin")
        hint = f": {inside}" if os.path.isfile(os.path.join(inside, "dict.txt")) else ""
        raise ValueError(
            f"DATA is {cfg.data}: there is no {path}; name the folder that fairseq-preprocess "
            f"wrote{hint}"
        )
    return path


def check_overrides(text: str | None) -> None:
    """Refuse ``--model-overrides`` that fairseq would ignore, or that make another model."""
    # without a root configuration, the value is the name of the option that has it
    if not text or text.startswith("$"):
        return
    try:
        overrides = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        overrides = None
    if not isinstance(overrides, dict):
        raise ValueError(
            f"--model-overrides is {text}: give a dictionary, such as \"{{'mem_len': 512}}\""
        )
    for name in overrides:
        if name not in CHANGED_IN_EVALUATION:
            raise ValueError(
                f"--model-overrides names {name!r}, which evaluation cannot change: there are "
                f"{', '.join(CHANGED_IN_EVALUATION)}"
            )
