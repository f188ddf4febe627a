"""A stand-in for the published product-key memory, with the names that are read of it.

Independent of that code and of the plugin: every slot is scored.
"""

import sys

import torch
from torch import nn

print("faiss is not there", file=sys.stderr)


class HashingMemory(nn.Module):
    EVAL_MEMORY = True

    def __init__(self, width, params):
        super().__init__()
        self.heads, self.knn = params.mem_heads, params.mem_knn
        half, n = params.mem_k_dim // 2, params.mem_n_keys
        self.keys = nn.Parameter(torch.randn(self.heads, 2, n, half))
        self.query_proj = Queries(width, self.heads, params.mem_k_dim)
        self.values = nn.EmbeddingBag(n * n, width, mode="sum", sparse=params.mem_sparse)

    @staticmethod
    def register_args(parser):
        parser.add_argument("--mem_sparse", type=lambda text: text == "True")
        for name in ("mem_heads", "mem_knn", "mem_n_keys", "mem_k_dim"):
            parser.add_argument(f"--{name}", type=int)

    @staticmethod
    def check_params(params):
        params.checked = True

    @staticmethod
    def build(input_dim, output_dim, params):
        assert params.checked
        assert input_dim == output_dim
        return HashingMemory(input_dim, params)

    def get_indices(self, query, knn):
        # query (N·H, d_q) -> scores and slots (N·H, k)
        first, second = query.unflatten(0, (-1, self.heads)).chunk(2, dim=-1)
        one = torch.einsum("bhd,hnd->bhn", first, self.keys[:, 0])
        other = torch.einsum("bhd,hnd->bhn", second, self.keys[:, 1])
        scores = one.unsqueeze(-1) + other.unsqueeze(-2)
        return scores.flatten(2).flatten(0, 1).topk(knn)

    def forward(self, x):
        assert self.training or not HashingMemory.EVAL_MEMORY
        scores, slots = self.get_indices(self.query_proj(x), self.knn)
        weights = scores.float().softmax(-1).to(self.values.weight.dtype)
        return self.values(slots.view(len(x), -1), per_sample_weights=weights.view(len(x), -1))


class Queries(nn.Module):
    def __init__(self, width, heads, query_width):
        super().__init__()
        self.query_width = query_width
        self.query_mlps = nn.ModuleList([nn.Linear(width, heads * query_width)])

    def forward(self, x):
        return self.query_mlps[0](x).view(-1, self.query_width)
