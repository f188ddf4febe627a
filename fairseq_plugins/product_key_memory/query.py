"""The query network of a memory, which maps each token to a query for each head.

Lample et al. 2019 (arXiv:1907.05242), section 3.1.

Shapes: N tokens, H heads, d model width, d_q query width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fairseq_plugins.precision import Float32Module
from fairseq_plugins.sizes import check_sizes


class SyncBatchNorm1d(Float32Module, nn.BatchNorm1d):
    """Batch norm over the tokens of all workers, which may have different numbers of them.

    torch's ``SyncBatchNorm`` runs on GPUs only and counts batches, which averaged checkpoints
    cannot average. In training, a token's queries depend on later tokens of its text.
    """

    # torch's would add the number of batches to older states
    _load_from_state_dict = nn.Module._load_from_state_dict

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("num_batches_tracked", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Normalise each feature of ``x`` (N, features); ``tokens`` (N,) is false for padding."""
        values = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        if self.training or not self.track_running_stats:
            # (N, 1): 0 for padding
            counted = values.new_ones(len(x), 1) if tokens is None else tokens.unsqueeze(-1)
            mean, variance = self._measure(values, counted.to(values.dtype))
        else:
            mean, variance = self.running_mean, self.running_var
        normalised = (values - mean) * torch.rsqrt(variance + self.eps)
        return (normalised * self.weight + self.bias).to(x.dtype)

    def _measure(self, values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance over all workers; ``counted`` (N, 1) is 0 for padding."""
        # exchange the sum of the tokens and their number at once
        sums = torch.cat([(values * counted).sum(0), counted.sum(0)])
        total, count = _sum_over_workers(sums).split([values.size(1), 1])
        mean = total / count.clamp(min=1)
        # the mean of squares minus the squared mean would cancel if the mean is large
        squares = ((values - mean).square() * counted).sum(0)
        variance = _sum_over_workers(squares) / count.clamp(min=1)
        if self.track_running_stats and not _is_recomputed():
            self._follow(mean.detach(), variance.detach(), count.detach())
        return mean, variance

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        # no branch on the number of tokens: the host would wait for the device
        step = (count > 0).to(self.running_mean)
        batches = self.num_batches_tracked.add_(step)
        # torch.optim.swa_utils.update_bn sets no momentum: it averages over batches
        step *= 1 / batches.clamp(min=1) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean), step)
        self.running_var.lerp_(unbiased.to(self.running_var), step)


class _SumOverWorkers(torch.autograd.Function):
    """Sums a tensor over the workers; the backward pass sums its gradients too.

    torch.distributed.nn.functional.all_reduce does the same, but is deprecated.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return _SumOverWorkers.apply(grad)


def _sum_over_workers(x: Tensor) -> Tensor:
    """Return ``x`` summed over the workers, with gradients."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _SumOverWorkers.apply(x) if several else x


def _is_recomputed() -> bool:
    """Return whether activation checkpointing runs this forward pass a second time."""
    # the second time, a backward pass is running; compilers cannot trace this query
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class QueryNetwork(nn.Module):
    """A linear map, or a multilayer perceptron with ReLU, to one query for each head.

    Args:
        embed_dim: d.
        heads: H.
        query_dim: d_q.
        hidden_dims: widths of the perceptron's hidden layers.
        batch_norm: normalise each dimension over the tokens, so that more keys are used (sections
            3.1 and 4.5).
        dropout: rate of the dropout of the queries.
        input_dropout: rate of the dropout of the tokens.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        query_dim: int,
        hidden_dims: Sequence[int] = (),
        batch_norm: bool = False,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.input_dropout = nn.Dropout(input_dropout)
        check_sizes(1, embed_dim=embed_dim, heads=heads, query_dim=query_dim)
        for width in hidden_dims:
            check_sizes(1, hidden_dims=width)
        widths = [embed_dim, *hidden_dims, heads * query_dim]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.batch_norm = SyncBatchNorm1d(widths[-1]) if batch_norm else None
        self.dropout = nn.Dropout(dropout)
        self.heads = heads
        self.query_dim = query_dim

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Map ``x`` (N, d) to queries (N, H, d_q); ``tokens`` (N,) is false for padding."""
        queries = self.layers(self.input_dropout(x))
        if isinstance(self.batch_norm, SyncBatchNorm1d):
            queries = self.batch_norm(queries, tokens)
        elif self.batch_norm is not None:
            # torch's norm, which SyncBatchNorm.convert_sync_batchnorm puts here, takes no mask
            tokens = torch.ones_like(x[:, 0], dtype=torch.bool) if tokens is None else tokens
            normalised = self.batch_norm(queries[tokens])
            queries = queries.masked_scatter(tokens.unsqueeze(-1), normalised)
        # (N, H·d_q) -> (N, H, d_q)
        return self.dropout(queries.unflatten(-1, (self.heads, -1)))
