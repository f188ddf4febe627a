"""A stand-in for the published all-attention code, with the names that are read of it.

Independent of that code and of the plugin: each query gathers the tokens of all distances.
"""

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, width, heads, span, spans, vectors):
        super().__init__()
        self.span, self.ramp = span, spans["adapt_span_ramp"]
        self.adaptive_span, self.persistent_memory = nn.Module(), nn.Module()
        self.adaptive_span._mask = nn.Module()
        self.adaptive_span._mask.current_val = nn.Parameter(torch.zeros(heads, 1, 1))
        of_head = width // heads
        self.persistent_memory.key = nn.Parameter(
            torch.randn(heads, of_head, vectors) / of_head**0.5
        )
        self.persistent_memory.val = nn.Parameter(
            torch.randn(heads, vectors, of_head) / vectors**0.5
        )

    def get_cache_size(self):
        return self.span

    def forward(self, q, k, v, positions):
        # q (B, T, H, d_h), k and v (B, span + T, H, d_h), positions (d_h, span)
        distances = torch.arange(1, self.span + 1)
        seen = torch.arange(q.size(1))[:, None] + self.span - distances
        of_head, memory = q.size(-1), self.persistent_memory
        scores = torch.einsum("bthd,btxhd->bhtx", q, k[:, seen])
        scores = scores + torch.einsum("bthd,dx->bhtx", q, positions.flip(1))
        persistent = torch.einsum("bthd,hdn->bhtn", q, memory.key) * of_head**0.5
        weights = (torch.cat([scores, persistent], -1) / of_head**0.5).softmax(-1)
        z = self.adaptive_span._mask.current_val * self.span
        mask = ((self.ramp + z - (distances - 1)) / self.ramp).clamp(0, 1)
        ones = torch.ones_like(persistent)
        weights = weights * torch.cat([mask.expand_as(scores), ones], -1)
        weights = weights / weights.sum(-1, keepdim=True)
        of_context, of_persistent = weights.split([self.span, persistent.size(-1)], dim=-1)
        values = memory.val * memory.val.size(1) ** 0.5
        attended = torch.einsum("bhtx,btxhd->bthd", of_context, v[:, seen])
        return attended + torch.einsum("bhtn,hnd->bthd", of_persistent, values)


class Attention(nn.Module):
    def __init__(self, width, *sizes):
        super().__init__()
        self.heads = sizes[0]
        self.proj_query = nn.Linear(width, width, bias=False)
        self.proj_key = nn.Linear(width, width, bias=False)
        self.proj_val = nn.Linear(width, width, bias=False)
        self.proj_out = nn.Linear(width, width, bias=False)
        self.attn = Heads(width, *sizes)

    def forward(self, x, context, positions):
        q, k, v = (
            project(of).unflatten(-1, (self.heads, -1))
            for project, of in (
                (self.proj_query, x),
                (self.proj_key, context),
                (self.proj_val, context),
            )
        )
        return self.proj_out(self.attn(q, k, v, positions).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, *sizes):
        super().__init__()
        self.attn = Attention(width, *sizes)
        self.norm1 = nn.LayerNorm(width)


class TransformerSeq(nn.Module):
    def __init__(
        self,
        vocab_size,
        hidden_size,
        nb_heads,
        nb_layers,
        attn_span,
        adapt_span_params,
        pers_mem_params,
        **others,
    ):
        super().__init__()
        self.in_emb = nn.Embedding(vocab_size, hidden_size)
        self.out_emb = nn.Linear(hidden_size, vocab_size)
        self.key_pe = nn.Parameter(torch.randn(1, hidden_size // nb_heads, attn_span))
        sizes = nb_heads, attn_span, adapt_span_params, pers_mem_params["pers_mem_size"]
        self.layers = nn.ModuleList([Layer(hidden_size, *sizes) for _ in range(nb_layers)])
        assert adapt_span_params["adapt_span_enabled"]
        assert not others["adapt_io_params"]["adapt_io_enabled"]

    def forward(self, x, h_cache):
        x, new = self.in_emb(x), []
        for layer, cache in zip(self.layers, h_cache, strict=True):
            context = torch.cat([cache, x], dim=1)
            new.append(context[:, -layer.attn.attn.get_cache_size() :].detach())
            x = layer.norm1(x + layer.attn(x, context, self.key_pe[0]))
        return self.out_emb(x).log_softmax(-1), new, None
