"""Small models with random weights in the layouts of the originals, and their files."""

import itertools
import json
from typing import NamedTuple

import torch

from tests.reference import foreign_models as reference
from tests.scripts.convert.tensor_bundle import write_bundle

WIDTH, HEADS, INNER, LAYERS = 16, 2, 24, 2
HEAD = WIDTH // HEADS
# <eos> and <unk> are not at fairseq's indices, but below every first cutoff here
SYMBOLS = ["w0", "w1", "<unk>", "é", "<eos>", *(f"w{number}" for number in range(5, 30))]
CUTOFFS = [9, 16, 22]
TENSORFLOW = "transformer-xl-tensorflow"


class Foreign(NamedTuple):
    """A model of original code: all tensors by name, also the tied ones, options and symbols.

    ``in_pytorch`` has the tensors of a TensorFlow model under the names of the PyTorch code.
    """

    source: str
    tensors: dict
    config: dict
    symbols: list = SYMBOLS
    in_pytorch: dict | None = None

    def log_probabilities(self, numbers, **settings):
        """Return log p of each symbol after each of ``numbers``, (T, V), in float64."""
        config = {**self.config, **settings}
        if self.source == "adaptive-span":
            return reference.adaptive_span(self.tensors, config, numbers)
        if self.source == TENSORFLOW:
            config |= {"pre_lnorm": False, "layer_norm_epsilon": 1e-12, "besides_itself": 1}
        # both begin with a memory of zero vectors, and order clusters from first to last
        hugging_face = self.source in (TENSORFLOW, "huggingface-transfo-xl")
        tensors = self.in_pytorch or self.tensors
        return reference.transformer_xl(tensors, config, numbers, hugging_face)

    def write(self, folder, name="model.pt", leave_out=()):
        """Write checkpoint, config.json and vocab.txt as the original saves them."""
        folder.mkdir(parents=True, exist_ok=True)
        present = {key: value for key, value in self.tensors.items() if key not in leave_out}
        if self.source == TENSORFLOW:
            write_bundle(folder / name, present)
        elif name.endswith(".safetensors"):
            from safetensors.torch import save_file

            save_file({key: value.clone() for key, value in present.items()}, folder / name)
        elif self.source == "adaptive-span":
            prefixed = {f"module.{key}": value for key, value in present.items()}
            torch.save({"iter_no": 3, "model": prefixed}, folder / name)
        else:
            torch.save(present, folder / name)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        (folder / "vocab.txt").write_text("\n".join(self.symbols) + "\n", encoding="utf-8")
        return folder


def importer_words(source, folder, name="model.pt"):
    """Return the importer's options for the files that ``Foreign.write`` wrote to a folder."""
    words = ["--source", source, "--checkpoint", f"{folder / name}"]
    return [*words, "--config", f"{folder}/config.json", "--vocab", f"{folder}/vocab.txt"]


class _Weights(dict):
    """Random tensors by name."""

    def __init__(self):
        super().__init__()
        self._generator = torch.Generator().manual_seed(1)

    def draw(self, name, *shape, std=0.3, mean=0.0):
        self[name] = mean + std * torch.randn(*shape, generator=self._generator)

    def linear(self, name, outputs, inputs, std=0.3):
        """Draw a weight, and a bias with standard deviation ``std``."""
        self.draw(f"{name}weight", outputs, inputs)
        self.draw(f"{name}bias", outputs, std=std)

    def norm(self, name):
        self.draw(f"{name}.weight", WIDTH, mean=1.0)
        self.draw(f"{name}.bias", WIDTH)

    def bands(self, input_name, output_name, size, cutoffs, factor, tied, tied_projections):
        """Draw embeddings, outputs and biases, and projections if bands get narrower."""
        bounds = [0, *cutoffs, size] if factor > 1 else [0, size]
        for band, (first, last) in enumerate(itertools.pairwise(bounds)):
            narrow = WIDTH // factor**band
            embedding, output = (
                f"{input_name}.emb_layers.{band}.weight",
                f"{output_name}.out_layers.{band}.",
            )
            projections = f"{input_name}.emb_projs.{band}", f"{output_name}.out_projs.{band}"
            self.draw(embedding, last - first, narrow, std=0.6 if band else 0.3)
            self.linear(output, last - first, narrow, std=1.0)
            if tied:
                self[f"{output}weight"] = self[embedding]
            for name in projections if factor > 1 else ():
                self.draw(name, WIDTH, narrow, std=0.5)
            if factor > 1 and tied_projections[band]:
                self[projections[1]] = self[projections[0]]


def transformer_xl(
    cutoffs=(), div_val=1, tied=True, tie_projs=None, hugging_face=False, symbols=SYMBOLS, **options
):
    """Build a Transformer-XL of 2 layers, d 16, f 24, segments of 7 tokens and a memory of 10."""
    tie_projs = tie_projs or [False, *([True] * len(cutoffs))]
    config = {
        **{"n_layer": LAYERS, "n_head": HEADS, "d_model": WIDTH, "d_head": HEAD, "d_embed": WIDTH},
        **{"d_inner": INNER, "dropout": 0.1, "dropatt": 0.05, "pre_lnorm": False},
        **{"cutoffs": list(cutoffs), "div_val": div_val, "tie_projs": tie_projs},
        **{"tgt_len": 7, "mem_len": 10, "ext_len": 0, "same_length": False, "clamp_len": -1},
        **{"attn_type": 0, "untie_r": hugging_face},
        "vocab_size" if hugging_face else "n_token": len(symbols),
        "tie_word_embeddings" if hugging_face else "tie_weight": tied,
        **options,
    }
    prefix = "transformer." if hugging_face else ""
    w = _Weights()
    w.bands(f"{prefix}word_emb", "crit", len(symbols), cutoffs, div_val, tied, tie_projs)
    if cutoffs:
        w.linear("crit.cluster_", len(cutoffs), WIDTH, std=1.0)
    layers = [f"{prefix}layers.{number}" for number in range(LAYERS)]
    for owner in [f"{layer}.dec_attn." for layer in layers] if config["untie_r"] else [prefix]:
        w.draw(f"{owner}r_w_bias", HEADS, HEAD)
        w.draw(f"{owner}r_r_bias", HEADS, HEAD)
    for layer in layers:
        w.draw(f"{layer}.dec_attn.qkv_net.weight", 3 * WIDTH, WIDTH)
        w.draw(f"{layer}.dec_attn.o_net.weight", WIDTH, WIDTH)
        w.draw(f"{layer}.dec_attn.r_net.weight", WIDTH, WIDTH)
        w.norm(f"{layer}.dec_attn.layer_norm")
        w.linear(f"{layer}.pos_ff.CoreNet.0.", INNER, WIDTH)
        w.linear(f"{layer}.pos_ff.CoreNet.3.", WIDTH, INNER)
        w.norm(f"{layer}.pos_ff.layer_norm")
    w[f"{prefix}pos_emb.inv_freq"] = 10_000 ** (-torch.arange(0.0, WIDTH, 2) / WIDTH)
    source = "huggingface-transfo-xl" if hugging_face else "transformer-xl"
    return Foreign(source, dict(w), config, symbols)


def transformer_xl_tensorflow(
    cutoffs=(), div_val=1, proj_share_all_but_first=True, proj_same_dim=True, **options
):
    """Build the model of ``transformer_xl`` in TensorFlow's layout, with matrices (in, out)."""
    shared = [False, *([proj_share_all_but_first] * len(cutoffs))]
    _, w, config, symbols, _ = transformer_xl(cutoffs, div_val, tie_projs=shared, **options)
    if not proj_same_dim:
        del w["word_emb.emb_projs.0"], w["crit.out_projs.0"]
    for name in ("tie_projs", "tie_weight", "n_token", "pre_lnorm", "attn_type", "ext_len"):
        del config[name]
    config["proj_share_all_but_first"] = proj_share_all_but_first
    config["proj_same_dim"] = proj_same_dim
    embed, softmax, tensors = "transformer/adaptive_embed", "transformer/adaptive_softmax", {}
    if div_val == 1:
        tensors[f"{embed}/lookup_table"] = w["word_emb.emb_layers.0.weight"]
        biases = w["crit.out_layers.0.bias"].tensor_split(config["cutoffs"])
    else:
        biases = [w[f"crit.out_layers.{band}.bias"] for band in range(len(shared))]
    for band, bias in enumerate(biases):
        tensors[f"{softmax}/cutoff_{band}/b" if cutoffs else f"{softmax}/bias"] = bias
        if div_val > 1:
            tensors[f"{embed}/cutoff_{band}/lookup_table"] = w[f"word_emb.emb_layers.{band}.weight"]
            if band > 0 or proj_same_dim:
                tensors[f"{embed}/cutoff_{band}/proj_W"] = w[f"word_emb.emb_projs.{band}"].T
                if not shared[band]:
                    tensors[f"{softmax}/cutoff_{band}/proj"] = w[f"crit.out_projs.{band}"].T
    if cutoffs:
        tensors[f"{softmax}/cutoff_0/cluster_W"] = w["crit.cluster_weight"]
        tensors[f"{softmax}/cutoff_0/cluster_b"] = w["crit.cluster_bias"]
    for name in ("r_w_bias", "r_r_bias"):
        biases = [w.get(f"layers.{number}.dec_attn.{name}") for number in range(LAYERS)]
        tensors[f"transformer/{name}"] = torch.stack(biases) if config["untie_r"] else w[name]
    for number in range(LAYERS):
        theirs, attention = f"transformer/layer_{number}", f"layers.{number}.dec_attn"
        forward = f"layers.{number}.pos_ff"
        for name in ("qkv", "r", "o"):
            tensors[f"{theirs}/rel_attn/{name}/kernel"] = w[f"{attention}.{name}_net.weight"].T
        for name, position in (("layer_1", 0), ("layer_2", 3)):
            tensors[f"{theirs}/ff/{name}/kernel"] = w[f"{forward}.CoreNet.{position}.weight"].T
            tensors[f"{theirs}/ff/{name}/bias"] = w[f"{forward}.CoreNet.{position}.bias"]
        for name, part in (("rel_attn", attention), ("ff", forward)):
            tensors[f"{theirs}/{name}/LayerNorm/gamma"] = w[f"{part}.layer_norm.weight"]
            tensors[f"{theirs}/{name}/LayerNorm/beta"] = w[f"{part}.layer_norm.bias"]
    return Foreign(TENSORFLOW, tensors, config, symbols, w)


def adaptive_span(
    vectors=5,
    adaptive=True,
    cutoffs=(),
    tied=True,
    span=12,
    spans=(0.1, 0.7, 0.35, 0.2),
    far=0.0,
    symbols=SYMBOLS,
):
    """Build an adaptive-span model: 2 layers, d 16, ramp 3, 5 persistent vectors or f 24.

    ``far`` is the deviation of random numbers added to the position vectors beyond distance 6.
    """
    config = {
        **{"nb_layers": LAYERS, "nb_heads": HEADS, "hidden_size": WIDTH, "attn_span": span},
        **{"inner_hidden_size": 1 if vectors else INNER, "vocab_size": len(symbols)},
        **{"block_size": 7, "dropout": 0.1, "emb_dropout": 0.05},
        "adapt_io_params": {
            "adapt_io_enabled": bool(cutoffs),
            "adapt_io_cutoffs": list(cutoffs),
            "adapt_io_divval": 2,
            "adapt_io_tied": tied,
        },
        "adapt_span_params": {"adapt_span_enabled": adaptive, "adapt_span_ramp": 3},
        "pers_mem_params": {"pers_mem_size": vectors},
    }
    w = _Weights()
    if cutoffs:
        every = [tied] * (len(cutoffs) + 1)
        w.bands("in_emb", "out_emb", len(symbols), cutoffs, 2, tied, every)
        w.linear("out_emb.cluster_proj.", len(cutoffs), WIDTH, std=1.0)
    else:
        w.draw("in_emb.weight", len(symbols), WIDTH, std=1.0)
        w.linear("out_emb.", len(symbols), WIDTH, std=1.0)
    w.draw("key_pe", 1, HEAD, span, std=1.0)
    w.draw("far", 1, HEAD, span - 6, std=far)
    w["key_pe"][:, :, :-6] += w.pop("far")
    for number in range(LAYERS):
        layer = f"layers.{number}"
        for name in ("query", "key", "val", "out"):
            w.draw(f"{layer}.attn.proj_{name}.weight", WIDTH, WIDTH)
        w.norm(f"{layer}.norm1")
        owners = [f"{layer}.attn.attn."]
        if vectors:
            owners.append(f"{owners[0]}persistent_memory.")
            w.draw(f"{owners[1]}key", HEADS, HEAD, vectors)
            w.draw(f"{owners[1]}val", HEADS, vectors, HEAD)
        else:
            w.linear(f"{layer}.ff.fc1.", INNER, WIDTH)
            w.linear(f"{layer}.ff.fc2.", WIDTH, INNER)
            w.norm(f"{layer}.norm2")
        for owner in owners if adaptive else ():
            heads = torch.tensor(spans[number * HEADS :][:HEADS]).view(HEADS, 1, 1)
            w[f"{owner}adaptive_span._mask.current_val"] = heads
            w[f"{owner}adaptive_span._mask.mask_template"] = torch.arange(1.0 - span, 1)
    return Foreign("adaptive-span", dict(w), config, symbols)
