"""The published language models in float64, computed from tensors under their published names.

Dai et al. 2019 (kimiyoung/transformer-xl and Hugging Face transformers), Sukhbaatar et al. 2019
(facebookresearch/adaptive-span). Each reads one stream; tokens have the numbers of the original.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.reference.all_attention import multi_head
from tests.reference.transformer_xl import attention, sinusoid


def layer_norm(w, name, x, epsilon=1e-5):
    """Normalise vectors x (T, d)."""
    return F.layer_norm(x, x.shape[1:], w[f"{name}.weight"], w[f"{name}.bias"], epsilon)


def bands(w, layers, projections, cutoffs):
    """Return each band's rows (W, e) and projection (d, e), None if the band is d wide."""
    first = w[layers.format(0)]
    if cutoffs and layers.format(1) not in w:
        return [(rows, None) for rows in first.tensor_split(cutoffs)]
    numbers = range(len(cutoffs) + 1)
    return [(w[layers.format(band)], w.get(projections.format(band))) for band in numbers]


def embed(w, name, cutoffs, numbers):
    """Return the projected rows of the numbers, times √d."""
    tables = bands(w, f"{name}.emb_layers.{{}}.weight", f"{name}.emb_projs.{{}}", cutoffs)
    rows = []
    for number in numbers:
        band = sum(number >= cutoff for cutoff in cutoffs)
        table, projection = tables[band]
        row = table[number - [0, *cutoffs][band]]
        rows.append(row if projection is None else projection @ row)
    return torch.stack(rows) * math.sqrt(len(rows[0]))


def log_softmax(w, name, clusters, cutoffs, x, last_first):
    """Return log p (T, V); with ``last_first``, the head scores cluster C first, 1 last."""
    outputs = bands(w, f"{name}.out_layers.{{}}.weight", f"{name}.out_projs.{{}}", cutoffs)
    biases = [b for b, _ in bands(w, f"{name}.out_layers.{{}}.bias", "none", cutoffs)]

    def scores(weight, bias, projection):
        hidden = x if projection is None else x @ projection
        return hidden @ weight.T + bias

    weight, projection = outputs[0]
    first = len(weight)
    if not cutoffs:
        return scores(weight, biases[0], projection).log_softmax(1)
    weight = torch.cat([weight, w[clusters[0]]])
    head = scores(weight, torch.cat([biases[0], w[clusters[1]]]), projection).log_softmax(1)
    parts = [head[:, :first]]
    for cluster in range(1, len(cutoffs) + 1):
        cluster_score = head[:, -cluster] if last_first else head[:, first + cluster - 1]
        weight, projection = outputs[cluster]
        within = scores(weight, biases[cluster], projection).log_softmax(1)
        parts.append(cluster_score.unsqueeze(1) + within)
    return torch.cat(parts, dim=1)


def projections(count, width, **weights):
    """Return an attention with these matrices (d, d), in the form that other references take."""
    named = {f"{name}_proj": SimpleNamespace(weight=weight) for name, weight in weights.items()}
    return SimpleNamespace(head_dim=width // count, **named)


def doubled(tensors, prefix=""):
    return {name.removeprefix(prefix): value.double() for name, value in tensors.items()}


def transformer_xl(tensors, config, numbers, hugging_face):
    """Return log p (T, V) of the successor of each number, read in segments with a memory."""
    w = doubled(tensors, "transformer.")
    memory, cutoffs = config["mem_len"], config["cutoffs"]
    # Hugging Face starts with a memory of zeros, the original without a memory
    start = torch.zeros(memory if hugging_face else 0, config["d_model"], dtype=torch.float64)
    memories = [start] * config["n_layer"]
    outputs = []
    for first in range(0, len(numbers), config["tgt_len"]):
        x = embed(w, "word_emb", cutoffs, numbers[first : first + config["tgt_len"]])
        for number in range(config["n_layer"]):
            context = torch.cat([memories[number], x])
            memories[number] = context[max(0, len(context) - memory) :]
            x = transformer_xl_layer(w, config, f"layers.{number}", x, context)
        clusters = "crit.cluster_weight", "crit.cluster_bias"
        outputs.append(log_softmax(w, "crit", clusters, cutoffs, x, not hugging_face))
    return torch.cat(outputs)


def transformer_xl_layer(w, config, name, x, context):
    """Compute a layer for a segment x (T, d), the end of context (M + T, d)."""
    count, before = config["n_head"], config["pre_lnorm"]

    def norm(part, y):
        prefix = f"{name}.{part}.layer_norm"
        epsilon = config.get("layer_norm_epsilon", 1e-5)
        return layer_norm(w, prefix, y, epsilon)

    inputs = norm("dec_attn", context) if before else context
    q, k, v = w[f"{name}.dec_attn.qkv_net.weight"].chunk(3)
    out, width = w[f"{name}.dec_attn.o_net.weight"], x.size(1)
    layer = projections(count, width, q=q, k=k, v=v, out=out)
    biases_prefix = f"{name}.dec_attn." if config.get("untie_r") else ""
    layer.biases = SimpleNamespace(u=w[f"{biases_prefix}r_w_bias"], v=w[f"{biases_prefix}r_r_bias"])
    sinusoids = torch.stack([sinusoid(distance, width) for distance in range(len(context))])
    # (D, d) -> (D, H, d_h)
    positions = (sinusoids @ w[f"{name}.dec_attn.r_net.weight"].T).unflatten(1, (count, -1))
    clamp, reach = config["clamp_len"], config["mem_len"] + config.get("besides_itself", 0)

    def seen(distance):
        return distance < reach or not config["same_length"]

    def encode(head, distance):
        return positions[min(distance, clamp) if clamp > 0 else distance, head]

    attended = attention(layer, inputs[len(context) - len(x) :], inputs, seen, encode)

    def inner(y):
        core = f"{name}.pos_ff.CoreNet"
        hidden = (y @ w[f"{core}.0.weight"].T + w[f"{core}.0.bias"]).clamp(min=0)
        return hidden @ w[f"{core}.3.weight"].T + w[f"{core}.3.bias"]

    if before:
        x = x + attended
        return x + inner(norm("pos_ff", x))
    x = norm("dec_attn", x + attended)
    return norm("pos_ff", x + inner(x))


def adaptive_span(tensors, config, numbers):
    """Return log p (T, V) of the successor of each number; the memory starts with zeros."""
    w = doubled(tensors)
    options = {
        **config,
        **{k: v for g in config.values() if isinstance(g, dict) for k, v in g.items()},
    }
    cutoffs = options["adapt_io_cutoffs"] if options["adapt_io_enabled"] else []
    if cutoffs:
        x = embed(w, "in_emb", cutoffs, numbers)
    else:
        x = torch.stack([w["in_emb.weight"][number] for number in numbers])
    for number in range(options["nb_layers"]):
        x = adaptive_span_layer(w, options, f"layers.{number}", x)
    if not cutoffs:
        return (x @ w["out_emb.weight"].T + w["out_emb.bias"]).log_softmax(1)
    clusters = "out_emb.cluster_proj.weight", "out_emb.cluster_proj.bias"
    return log_softmax(w, "out_emb", clusters, cutoffs, x, True)


def adaptive_span_layer(w, options, name, x):
    """Compute a layer for a whole stream x (T, d)."""
    count, span, attn = options["nb_heads"], options["attn_span"], f"{name}.attn.attn"
    q, k, v, out = (w[f"{name}.attn.proj_{part}.weight"] for part in ("query", "key", "val", "out"))
    layer = projections(count, x.size(1), q=q, k=k, v=v, out=out)
    layer.variant, layer.window = "all", SimpleNamespace(nearest=1)
    layer.span = layer.persistent = None
    farthest = span
    if options["adapt_span_enabled"]:
        # the original adds 1e-8 to the sum of masked weights
        values = w[f"{attn}.adaptive_span._mask.current_val"].flatten()
        layer.span = SimpleNamespace(value=values, max_span=span, epsilon=1e-8)
        layer.span.ramp = options["adapt_span_ramp"]
        # it leaves out the farthest keys, 64 at a time, that no head sees
        unseen = span - math.ceil(float(values.max()) * span) - layer.span.ramp
        farthest = span - max(0, unseen) // 64 * 64
    if options["pers_mem_size"]:
        keys = w[f"{attn}.persistent_memory.key"].transpose(1, 2)
        layer.persistent = SimpleNamespace(keys=keys, values=w[f"{attn}.persistent_memory.val"])
    context = torch.cat([x.new_zeros(span, x.size(1)), x])
    # the farthest distance comes first
    positions = w["key_pe"][0].T
    attended = multi_head(layer, x, context, lambda distance: positions[-distance], farthest)
    x = layer_norm(w, f"{name}.norm1", x + attended)
    if f"{name}.ff.fc1.weight" not in w:
        return x
    hidden = (x @ w[f"{name}.ff.fc1.weight"].T + w[f"{name}.ff.fc1.bias"]).clamp(min=0)
    inner = hidden @ w[f"{name}.ff.fc2.weight"].T + w[f"{name}.ff.fc2.bias"]
    return layer_norm(w, f"{name}.norm2", x + inner)
