"""The originals' language models, from tensors by their own names, in float64.

Dai et al. 2019 (kimiyoung/transformer-xl and Hugging Face transformers), Sukhbaatar et al. 2019
(facebookresearch/adaptive-span). One stream; numbers are the originals' own.
"""

import math

import torch

from tests.reference.all_attention import layer_norm
from tests.reference.transformer_xl import sinusoid

EPSILON = 1e-8


def bands(w, layers, projections, cutoffs):
    """Of each band: rows (W, e), and the projection (d, e), None where the band is d wide."""
    first = w[layers.format(0)]
    if cutoffs and layers.format(1) not in w:
        return [(rows, None) for rows in first.tensor_split(cutoffs)]
    found = range(len(cutoffs) + 1)
    return [(w[layers.format(band)], w.get(projections.format(band))) for band in found]


def embed(w, name, cutoffs, numbers):
    """Rows, projected, times √d."""
    of_bands = bands(w, f"{name}.emb_layers.{{}}.weight", f"{name}.emb_projs.{{}}", cutoffs)
    rows = []
    for number in numbers:
        band = sum(number >= cutoff for cutoff in cutoffs)
        table, projection = of_bands[band]
        row = table[number - [0, *cutoffs][band]]
        rows.append(row if projection is None else projection @ row)
    return torch.stack(rows) * math.sqrt(len(rows[0]))


def log_softmax(w, name, clusters, cutoffs, x, last_first):
    """log p of all symbols, (T, V); ``last_first``: the head scores cluster C first, 1 last."""
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
        of_cluster = head[:, -cluster] if last_first else head[:, first + cluster - 1]
        weight, projection = outputs[cluster]
        within = scores(weight, biases[cluster], projection).log_softmax(1)
        parts.append(of_cluster.unsqueeze(1) + within)
    return torch.cat(parts, dim=1)


def heads(x, count):
    """(T, d) -> (H, T, d_h)."""
    return x.unflatten(1, (count, -1)).transpose(0, 1)


def merged(x):
    """(H, T, d_h) -> (T, d)."""
    return x.transpose(0, 1).flatten(1)


def doubled(tensors, prefix=""):
    return {name.removeprefix(prefix): value.double() for name, value in tensors.items()}


def transformer_xl(tensors, config, numbers, hugging_face):
    """log p (T, V) of what follows each number, read in segments with a memory."""
    w = doubled(tensors, "transformer.")
    memory, cutoffs = config["mem_len"], config["cutoffs"]
    # the original starts with no memory at all
    start = torch.zeros(memory if hugging_face else 0, config["d_model"], dtype=torch.float64)
    memories = [start] * config["n_layer"]
    found = []
    for first in range(0, len(numbers), config["tgt_len"]):
        x = embed(w, "word_emb", cutoffs, numbers[first : first + config["tgt_len"]])
        for number in range(config["n_layer"]):
            context = torch.cat([memories[number], x])
            memories[number] = context[max(0, len(context) - memory) :]
            x = transformer_xl_layer(w, config, f"layers.{number}", x, context)
        clusters = "crit.cluster_weight", "crit.cluster_bias"
        found.append(log_softmax(w, "crit", clusters, cutoffs, x, not hugging_face))
    return torch.cat(found)


def transformer_xl_layer(w, config, name, x, context):
    """A layer for a segment x (T, d), context (M + T, d)."""
    count, before = config["n_head"], config["pre_lnorm"]

    def norm(part, y):
        of_norm = f"{name}.{part}.layer_norm"
        epsilon = config.get("layer_norm_epsilon", 1e-5)
        return layer_norm(y, w[f"{of_norm}.weight"], w[f"{of_norm}.bias"], epsilon)

    read = norm("dec_attn", context) if before else context
    q, k, v = (read @ w[f"{name}.dec_attn.qkv_net.weight"].T).chunk(3, dim=1)
    q, k, v = heads(q[len(context) - len(x) :], count), heads(k, count), heads(v, count)
    of_layer = f"{name}.dec_attn." if config["untie_r"] else ""
    distance = torch.arange(len(x)).unsqueeze(1) + len(context) - len(x)
    distance = distance - torch.arange(len(context))
    clamped = distance.clamp(min=0)
    if config["clamp_len"] > 0:
        clamped = clamped.clamp(max=config["clamp_len"])
    places = torch.stack([sinusoid(place, x.size(1)) for place in range(len(context))])
    # (D, d) -> (H, D, d_h) -> (H, T, M + T, d_h)
    r = heads(places @ w[f"{name}.dec_attn.r_net.weight"].T, count)[:, clamped]
    content = torch.einsum("htd,hsd->hts", q + w[f"{of_layer}r_w_bias"].unsqueeze(1), k)
    position = torch.einsum("htd,htsd->hts", q + w[f"{of_layer}r_r_bias"].unsqueeze(1), r)
    scores = (content + position) / math.sqrt(q.size(2))
    seen = distance >= 0
    if config["same_length"]:
        seen &= distance < config["mem_len"] + config.get("besides_itself", 0)
    attended = merged(scores.masked_fill(~seen, -math.inf).softmax(2) @ v)
    attended = attended @ w[f"{name}.dec_attn.o_net.weight"].T

    def inner(y):
        core = f"{name}.pos_ff.CoreNet"
        hidden = (y @ w[f"{core}.0.weight"].T + w[f"{core}.0.bias"]).clamp(min=0)
        return hidden @ w[f"{core}.3.weight"].T + w[f"{core}.3.bias"]

    if before:
        x = x + attended
        return x + inner(norm("pos_ff", x))
    x = norm("dec_attn", x + attended)
    return norm("pos_ff", x + inner(x))


def adaptive_span(tensors, config, numbers, epsilon=EPSILON):
    """log p (T, V) of what follows each number; however it is read, a stream starts with zeros."""
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
        x = adaptive_span_layer(w, options, f"layers.{number}", x, epsilon)
    if not cutoffs:
        return (x @ w["out_emb.weight"].T + w["out_emb.bias"]).log_softmax(1)
    clusters = "out_emb.cluster_proj.weight", "out_emb.cluster_proj.bias"
    return log_softmax(w, "out_emb", clusters, cutoffs, x, True)


def adaptive_span_layer(w, options, name, x, epsilon):
    """A layer for a whole stream x (T, d)."""
    count, span = options["nb_heads"], options["attn_span"]
    context = torch.cat([x.new_zeros(span, x.size(1)), x])
    q, k, v = (
        heads(y @ w[f"{name}.attn.proj_{part}.weight"].T, count)
        for part, y in (("query", x), ("key", context), ("val", context))
    )
    # of query t the keys t to t + L - 1 of the context: the last one is the token before its own
    windows = torch.arange(len(x)).unsqueeze(1) + torch.arange(span)
    scores = torch.einsum("htd,htld->htl", q, k[:, windows]) + q @ w["key_pe"][0]
    mask = torch.ones(count, 1, span, dtype=torch.float64)
    if options["adapt_span_enabled"]:
        z = w[f"{name}.attn.attn.adaptive_span._mask.current_val"] * span
        x_of_key = torch.arange(span - 1, -1, -1)
        mask = ((options["adapt_span_ramp"] + z - x_of_key) / options["adapt_span_ramp"]).clamp(
            0, 1
        )
        widest = min(span, math.ceil(z.max()) + options["adapt_span_ramp"])
        # keys that the code does not compute, so many at a time
        scores[:, :, : (span - widest) // 64 * 64] = -math.inf
    read = v[:, windows]
    if options["pers_mem_size"]:
        memory = f"{name}.attn.attn.persistent_memory"
        keys = w[f"{memory}.key"] * math.sqrt(q.size(2))
        scores = torch.cat([scores, q @ keys], dim=2)
        mask = torch.cat([mask, mask.new_ones(count, 1, keys.size(2))], dim=2)
        values = w[f"{memory}.val"] * math.sqrt(keys.size(2))
        read = torch.cat([read, values.unsqueeze(1).expand(-1, len(x), -1, -1)], dim=2)
    weights = (scores / math.sqrt(q.size(2))).softmax(2)
    if options["adapt_span_enabled"]:
        weights = weights * mask
        weights = weights / (weights.sum(2, keepdim=True) + epsilon)
    attended = merged(torch.einsum("htl,htld->htd", weights, read))
    attended = attended @ w[f"{name}.attn.proj_out.weight"].T
    x = layer_norm(x + attended, w[f"{name}.norm1.weight"], w[f"{name}.norm1.bias"])
    if f"{name}.ff.fc1.weight" not in w:
        return x
    hidden = (x @ w[f"{name}.ff.fc1.weight"].T + w[f"{name}.ff.fc1.bias"]).clamp(min=0)
    inner = hidden @ w[f"{name}.ff.fc2.weight"].T + w[f"{name}.ff.fc2.bias"]
    return layer_norm(x + inner, w[f"{name}.norm2.weight"], w[f"{name}.norm2.bias"])
