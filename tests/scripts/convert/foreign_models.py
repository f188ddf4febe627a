"""Small models in the layouts of the originals, with random weights, and their files."""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.convert import checkpoint as import_checkpoint
from tests.reference import foreign_models as reference
from tests.scripts.convert.tensor_bundle import write_bundle

WIDTH, HEADS, INNER, LAYERS = 16, 2, 24, 2
HEAD = WIDTH // HEADS
VECTORS = 5
# <eos> and <unk> are not where fairseq has them, and among the first of all cutoffs here
SYMBOLS = ["w0", "w1", "<unk>", "é", "<eos>", *(f"w{number}" for number in range(5, 30))]
CUTOFFS = [9, 16, 22]
TENSORFLOW = "transformer-xl-tensorflow"


class Foreign(NamedTuple):
    """A model of an original: all tensors by its names, tied ones too, its options, its symbols.

    ``in_pytorch`` has the tensors of TensorFlow's by the names of the PyTorch code.
    """

    source: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    symbols: list[str] = SYMBOLS
    in_pytorch: dict[str, Tensor] | None = None

    def log_probabilities(self, numbers: list[int], **settings: Any) -> Tensor:
        """log p of each symbol after each of ``numbers``, (T, V), in float64."""
        config = {**self.config, **settings}
        if self.source == "adaptive-span":
            return reference.adaptive_span(self.tensors, config, numbers)
        if self.source == TENSORFLOW:
            config |= {"pre_lnorm": False, "layer_norm_epsilon": 1e-12, "besides_itself": 1}
        # both begin with a memory of zero vectors, and have clusters first to last
        hugging_face = self.source in (TENSORFLOW, "huggingface-transfo-xl")
        tensors = self.in_pytorch or self.tensors
        return reference.transformer_xl(tensors, config, numbers, hugging_face)

    def write(self, folder: Path, name: str = "model.pt", leave_out: tuple[str, ...] = ()) -> Path:
        """Write checkpoint, config.json and vocab.txt as the original saves them."""
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in self.tensors.items() if key not in leave_out}
        if self.source == TENSORFLOW:
            write_bundle(folder / name, kept)
        elif name.endswith(".safetensors"):
            from safetensors.torch import save_file

            save_file({key: value.clone() for key, value in kept.items()}, folder / name)
        elif self.source == "adaptive-span":
            prefixed = {f"module.{key}": value for key, value in kept.items()}
            torch.save({"iter_no": 3, "model": prefixed}, folder / name)
        else:
            torch.save(kept, folder / name)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        (folder / "vocab.txt").write_text("\n".join(self.symbols) + "\n", encoding="utf-8")
        return folder


def run_importer(
    foreign: Foreign,
    folder: Path,
    output: Path,
    name: str = "model.pt",
    options: tuple[str, ...] = (),
) -> int:
    """Exit status of the importer on the files that ``foreign`` wrote to a folder."""
    return import_checkpoint.main(
        [
            *("--source", foreign.source, "--checkpoint", f"{folder / name}"),
            *("--config", f"{folder}/config.json", "--vocab", f"{folder}/vocab.txt"),
            *("--output", f"{output}", *options),
        ]
    )


class _Weights(dict):
    """Random tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(1)

    def draw(self, name: str, *shape: int, std: float = 0.3, mean: float = 0.0) -> None:
        self[name] = mean + std * torch.randn(*shape, generator=self._generator)

    def norm(self, name: str) -> None:
        self.draw(f"{name}.weight", WIDTH, mean=1.0)
        self.draw(f"{name}.bias", WIDTH)

    def bands(
        self,
        names: tuple[str, str],
        prefix: str,
        size: int,
        cutoffs: list[int],
        factor: int,
        tied: bool,
        tied_projections: list[bool],
    ) -> None:
        """Draw embeddings, and outputs with biases, with projections where bands are narrower."""
        of_input, of_output = names
        bounds = [0, *cutoffs, size] if factor > 1 else [0, size]
        for band, (first, last) in enumerate(itertools.pairwise(bounds)):
            narrow = WIDTH // factor**band
            embedding = f"{prefix}{of_input}.emb_layers.{band}.weight"
            into = f"{prefix}{of_input}.emb_projs.{band}"
            output = f"{of_output}.out_layers.{band}"
            out_of = f"{of_output}.out_projs.{band}"
            self.draw(embedding, last - first, narrow, std=0.6 if band else 0.3)
            if tied:
                self[f"{output}.weight"] = self[embedding]
            else:
                self.draw(f"{output}.weight", last - first, narrow)
            self.draw(f"{output}.bias", last - first, std=1.0)
            if factor > 1:
                self.draw(into, WIDTH, narrow, std=0.5)
                if tied_projections[band]:
                    self[out_of] = self[into]
                else:
                    self.draw(out_of, WIDTH, narrow, std=0.5)


def transformer_xl(
    cutoffs: list[int] | None = None,
    div_val: int = 1,
    tied: bool = True,
    tie_projs: list[bool] | None = None,
    hugging_face: bool = False,
    symbols: list[str] = SYMBOLS,
    **options: Any,
) -> Foreign:
    """A Transformer-XL of 2 layers, d 16, f 24, segments of 7 tokens and a memory of 10."""
    cutoffs = cutoffs or []
    tie_projs = tie_projs or [False, *([True] * len(cutoffs))]
    config = {
        "n_layer": LAYERS,
        "n_head": HEADS,
        "d_model": WIDTH,
        "d_head": HEAD,
        "d_embed": WIDTH,
        "d_inner": INNER,
        "dropout": 0.1,
        "dropatt": 0.05,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "tie_projs": tie_projs,
        "pre_lnorm": False,
        "untie_r": hugging_face,
        "tgt_len": 7,
        "mem_len": 10,
        "ext_len": 0,
        "same_length": False,
        "attn_type": 0,
        "clamp_len": -1,
        "vocab_size" if hugging_face else "n_token": len(symbols),
        "tie_word_embeddings" if hugging_face else "tie_weight": tied,
        **options,
    }
    prefix = "transformer." if hugging_face else ""
    w = _Weights()
    w.bands(("word_emb", "crit"), prefix, len(symbols), cutoffs, div_val, tied, tie_projs)
    if cutoffs:
        w.draw("crit.cluster_weight", len(cutoffs), WIDTH)
        w.draw("crit.cluster_bias", len(cutoffs), std=1.0)
    if not config["untie_r"]:
        w.draw(f"{prefix}r_w_bias", HEADS, HEAD)
        w.draw(f"{prefix}r_r_bias", HEADS, HEAD)
    for number in range(LAYERS):
        layer = f"{prefix}layers.{number}"
        if config["untie_r"]:
            w.draw(f"{layer}.dec_attn.r_w_bias", HEADS, HEAD)
            w.draw(f"{layer}.dec_attn.r_r_bias", HEADS, HEAD)
        w.draw(f"{layer}.dec_attn.qkv_net.weight", 3 * WIDTH, WIDTH)
        w.draw(f"{layer}.dec_attn.o_net.weight", WIDTH, WIDTH)
        w.draw(f"{layer}.dec_attn.r_net.weight", WIDTH, WIDTH)
        w.norm(f"{layer}.dec_attn.layer_norm")
        w.draw(f"{layer}.pos_ff.CoreNet.0.weight", INNER, WIDTH)
        w.draw(f"{layer}.pos_ff.CoreNet.0.bias", INNER)
        w.draw(f"{layer}.pos_ff.CoreNet.3.weight", WIDTH, INNER)
        w.draw(f"{layer}.pos_ff.CoreNet.3.bias", WIDTH)
        w.norm(f"{layer}.pos_ff.layer_norm")
    w[f"{prefix}pos_emb.inv_freq"] = 10_000 ** (-torch.arange(0.0, WIDTH, 2) / WIDTH)
    source = "huggingface-transfo-xl" if hugging_face else "transformer-xl"
    return Foreign(source, dict(w), config, symbols)


def transformer_xl_tensorflow(
    cutoffs: list[int] | None = None,
    div_val: int = 1,
    proj_share_all_but_first: bool = True,
    proj_same_dim: bool = True,
    **options: Any,
) -> Foreign:
    """The model of ``transformer_xl`` as the TensorFlow code has it, with matrices (in, out)."""
    shared = [False, *([proj_share_all_but_first] * len(cutoffs or []))]
    _, w, config, symbols, _ = transformer_xl(cutoffs, div_val, tie_projs=shared, **options)
    if not proj_same_dim:
        del w["word_emb.emb_projs.0"], w["crit.out_projs.0"]
    for name in ("tie_projs", "tie_weight", "n_token", "pre_lnorm", "attn_type", "ext_len"):
        del config[name]
    config["proj_share_all_but_first"] = proj_share_all_but_first
    config["proj_same_dim"] = proj_same_dim
    embed, softmax, found = "transformer/adaptive_embed", "transformer/adaptive_softmax", {}
    if div_val == 1:
        found[f"{embed}/lookup_table"] = w["word_emb.emb_layers.0.weight"]
        biases = w["crit.out_layers.0.bias"].tensor_split(config["cutoffs"])
    else:
        biases = [w[f"crit.out_layers.{band}.bias"] for band in range(len(shared))]
    for band, bias in enumerate(biases):
        found[f"{softmax}/cutoff_{band}/b" if cutoffs else f"{softmax}/bias"] = bias
        if div_val > 1:
            found[f"{embed}/cutoff_{band}/lookup_table"] = w[f"word_emb.emb_layers.{band}.weight"]
            if band > 0 or proj_same_dim:
                found[f"{embed}/cutoff_{band}/proj_W"] = w[f"word_emb.emb_projs.{band}"].T
                if not shared[band]:
                    found[f"{softmax}/cutoff_{band}/proj"] = w[f"crit.out_projs.{band}"].T
    if cutoffs:
        found[f"{softmax}/cutoff_0/cluster_W"] = w["crit.cluster_weight"]
        found[f"{softmax}/cutoff_0/cluster_b"] = w["crit.cluster_bias"]
    for name in ("r_w_bias", "r_r_bias"):
        if config["untie_r"]:
            of_layers = [w[f"layers.{number}.dec_attn.{name}"] for number in range(LAYERS)]
            found[f"transformer/{name}"] = torch.stack(of_layers)
        else:
            found[f"transformer/{name}"] = w[name]
    for number in range(LAYERS):
        theirs, attention = f"transformer/layer_{number}", f"layers.{number}.dec_attn"
        forward = f"layers.{number}.pos_ff"
        for name in ("qkv", "r", "o"):
            found[f"{theirs}/rel_attn/{name}/kernel"] = w[f"{attention}.{name}_net.weight"].T
        for name, place in (("layer_1", 0), ("layer_2", 3)):
            found[f"{theirs}/ff/{name}/kernel"] = w[f"{forward}.CoreNet.{place}.weight"].T
            found[f"{theirs}/ff/{name}/bias"] = w[f"{forward}.CoreNet.{place}.bias"]
        for name, part in (("rel_attn", attention), ("ff", forward)):
            found[f"{theirs}/{name}/LayerNorm/gamma"] = w[f"{part}.layer_norm.weight"]
            found[f"{theirs}/{name}/LayerNorm/beta"] = w[f"{part}.layer_norm.bias"]
    return Foreign(TENSORFLOW, found, config, symbols, w)


def adaptive_span(
    vectors: int = VECTORS,
    adaptive: bool = True,
    cutoffs: list[int] | None = None,
    tied: bool = True,
    span: int = 12,
    spans: tuple[float, ...] = (0.1, 0.7, 0.35, 0.2),
    far: float = 0.0,
    symbols: list[str] = SYMBOLS,
) -> Foreign:
    """A model of the adaptive-span code: 2 layers, d 16, ramp 3, 5 persistent vectors or f 24.

    ``far`` is added, times random numbers, to the position vectors beyond distance 6.
    """
    config = {
        "nb_layers": LAYERS,
        "nb_heads": HEADS,
        "hidden_size": WIDTH,
        "attn_span": span,
        "inner_hidden_size": 1 if vectors else INNER,
        "vocab_size": len(symbols),
        "block_size": 7,
        "dropout": 0.1,
        "emb_dropout": 0.05,
        "adapt_io_params": {
            "adapt_io_enabled": bool(cutoffs),
            "adapt_io_cutoffs": cutoffs or [],
            "adapt_io_divval": 2,
            "adapt_io_tied": tied,
        },
        "adapt_span_params": {"adapt_span_enabled": adaptive, "adapt_span_ramp": 3},
        "pers_mem_params": {"pers_mem_size": vectors},
    }
    w = _Weights()
    if cutoffs:
        tied_projections = [tied] * (len(cutoffs) + 1)
        w.bands(("in_emb", "out_emb"), "", len(symbols), cutoffs, 2, tied, tied_projections)
        w.draw("out_emb.cluster_proj.weight", len(cutoffs), WIDTH)
        w.draw("out_emb.cluster_proj.bias", len(cutoffs), std=1.0)
    else:
        w.draw("in_emb.weight", len(symbols), WIDTH, std=1.0)
        w.draw("out_emb.weight", len(symbols), WIDTH)
        w.draw("out_emb.bias", len(symbols), std=1.0)
    w.draw("key_pe", 1, HEAD, span, std=1.0)
    w.draw("far", 1, HEAD, span - 6, std=far)
    w["key_pe"][:, :, :-6] += w.pop("far")
    for number in range(LAYERS):
        layer = f"layers.{number}"
        for name in ("query", "key", "val", "out"):
            w.draw(f"{layer}.attn.proj_{name}.weight", WIDTH, WIDTH)
        w.norm(f"{layer}.norm1")
        attention = f"{layer}.attn.attn."
        if vectors:
            memory = f"{attention}persistent_memory."
            w.draw(f"{memory}key", HEADS, HEAD, vectors)
            w.draw(f"{memory}val", HEADS, vectors, HEAD)
        else:
            w.draw(f"{layer}.ff.fc1.weight", INNER, WIDTH)
            w.draw(f"{layer}.ff.fc1.bias", INNER)
            w.draw(f"{layer}.ff.fc2.weight", WIDTH, INNER)
            w.draw(f"{layer}.ff.fc2.bias", WIDTH)
            w.norm(f"{layer}.norm2")
        if adaptive:
            of_layer = torch.tensor(spans[number * HEADS :][:HEADS]).view(HEADS, 1, 1)
            for owner in (attention, memory) if vectors else (attention,):
                w[f"{owner}adaptive_span._mask.current_val"] = of_layer
                w[f"{owner}adaptive_span._mask.mask_template"] = torch.arange(1.0 - span, 1)
    return Foreign("adaptive-span", dict(w), config, symbols)
