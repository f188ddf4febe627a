"""Every kernel of attention against the plain equations in float64, with gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_plugins.modules import Window
from fairseq_plugins.segment_language_model.attention import choose_kernel, plain_attention
from tests.gpu.test_models import ON_GPU

HEADS, STREAMS, QUERIES, KEYS, WIDTH, VECTORS, RAMP = 4, 3, 96, 200, 32, 24, 16
# largest error of values and gradients, relative to the largest number of each
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.003}


def draw_inputs(paper, dtype):
    """Return a kernel's inputs as a paper has them, exact in the dtype: tensors, window, others."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype).double()

    wide = (HEADS, STREAMS)
    query, position = (draw(*wide, QUERIES, WIDTH) / WIDTH**0.5 for _ in range(2))
    keys, values = draw(*wide, KEYS, WIDTH), draw(*wide, KEYS, WIDTH)
    options = {"position_query": position}
    rel_keys, window = draw(HEADS, KEYS + 1, WIDTH), Window(0, KEYS - QUERIES)
    if paper == "all-attention":
        rel_keys, window = draw(1, KEYS + 1, WIDTH), Window(1, 80)
        mask = torch.linspace(0.01, 1, RAMP).log().expand(HEADS, -1)
        vectors = draw(HEADS, VECTORS, WIDTH), draw(HEADS, VECTORS, WIDTH)
        options = {"distance_bias": mask.to(dtype).double(), "persistent": vectors}
    return [query, keys, values, rel_keys], window, options


def compute(attend, paper, device, kind, dtype):
    """Return values and gradients of all inputs, on the CPU in float64."""
    tensors, window, options = draw_inputs(paper, dtype)
    leaves = []

    def leaf(tensor):
        leaves.append(tensor.to(device, kind).requires_grad_())
        return leaves[-1]

    tensors = [leaf(tensor) for tensor in tensors]
    options = {
        name: tuple(map(leaf, value)) if isinstance(value, tuple) else leaf(value)
        for name, value in options.items()
    }
    attended = attend(*tensors, window, **options)
    weight = torch.linspace(-1, 1, attended.numel()).view(attended.shape).to(attended)
    gradients = torch.autograd.grad((attended * weight).sum(), leaves)
    return [x.detach().cpu().double() for x in (attended, *gradients)]


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kernel", ["fast", "plain"])
@pytest.mark.parametrize("paper", ["Transformer-XL", "all-attention"])
def test_kernels_equal_the_equations_in_float64(paper, kernel, dtype, device):
    expected = compute(plain_attention, paper, "cpu", torch.float64, dtype)
    # without this kernel, PyTorch raises an error here
    fused = device == "cuda" and kernel != "plain"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if fused else nullcontext():
        actual = compute(choose_kernel(kernel, torch.device(device)), paper, device, dtype, dtype)
    for ours, exact in zip(actual, expected, strict=True):
        assert (ours - exact).abs().max() < TOLERANCES[dtype] * exact.abs().max()
