"""A stand-in for the published Transformer-XL code, with the names that are read of it.

Independent of that code and of the plugin: attention is written with all distances at once.
"""

import math

import torch
import torch.version
from torch import nn

# the published code reads it, and PyTorch for CPUs has none
CUDA = int(torch.version.cuda.split(".")[0])


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv_net = nn.Linear(width, 3 * width, bias=False)
        self.o_net = nn.Linear(width, width, bias=False)
        self.r_net = nn.Linear(width, width, bias=False)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x, context, biases, farthest, clamp):
        def cut(t):
            return t.unflatten(-1, (self.heads, -1))

        q, k, v = map(cut, self.qkv_net(context).chunk(3, dim=-1))
        q, width = q[-len(x) :], x.size(-1)
        rows = torch.arange(len(context) - len(x), len(context))
        distance = rows[:, None] - torch.arange(len(context))
        places = distance.clamp(0, clamp if clamp > 0 else None)[..., None].double()
        angles = places / 10_000 ** (torch.arange(0, width, 2) / width)
        r = cut(self.r_net(torch.cat([angles.sin(), angles.cos()], -1).float()))
        scores = torch.einsum("ibhd,jbhd->ijbh", q + biases[0], k)
        scores = scores + torch.einsum("ibhd,ijhd->ijbh", q + biases[1], r)
        seen = ((distance >= 0) & (distance < farthest)).byte()
        assert seen.dtype == torch.bool
        scores = scores.masked_fill(~seen[..., None, None], -math.inf) / q.size(-1) ** 0.5
        attended = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)
        return self.layer_norm(x + self.o_net(attended.flatten(2)))


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.dec_attn = Attention(width, heads)
        self.pos_ff = nn.Module()
        self.pos_ff.CoreNet = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(), nn.Identity(), nn.Linear(inner, width)
        )
        self.pos_ff.layer_norm = nn.LayerNorm(width)


class MemTransformerLM(nn.Module):
    def __init__(self, symbols, layers, heads, width, head, inner, **options):
        super().__init__()
        self.options = options
        self.word_emb, self.crit = nn.Module(), nn.Module()
        self.word_emb.emb_layers = nn.ModuleList([nn.Embedding(symbols, width)])
        self.crit.out_layers = nn.ModuleList([nn.Linear(width, symbols)])
        self.crit.out_layers[0].weight = self.word_emb.emb_layers[0].weight
        self.layers = nn.ModuleList([Layer(width, heads, inner) for _ in range(layers)])
        self.r_w_bias = nn.Parameter(torch.empty(heads, head))
        self.r_r_bias = nn.Parameter(torch.empty(heads, head))

    def forward(self, data, target, *memory):
        kept, length, new = self.options, self.options["mem_len"], []
        x = self.word_emb.emb_layers[0](data)
        x = x * x.size(-1) ** 0.5
        for index, layer in enumerate(self.layers):
            context = torch.cat([memory[index], x]) if memory else x
            new.append(context[-length:].detach())
            farthest = length if kept["same_length"] else math.inf
            biases = self.r_w_bias, self.r_r_bias
            x = layer.dec_attn(x, context, biases, farthest, kept["clamp_len"])
            x = layer.pos_ff.layer_norm(x + layer.pos_ff.CoreNet(x))
        losses = nn.functional.cross_entropy(
            self.crit.out_layers[0](x).flatten(0, 1), target.flatten(), reduction="none"
        )
        return [losses.view_as(target), *new]
