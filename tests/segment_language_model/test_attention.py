"""The kernels against each other, and attention with relative positions against the equations."""

import pytest
import torch

from fairseq_plugins.segment_language_model import attention_blocks
from fairseq_plugins.segment_language_model.attention import (
    KERNELS,
    PositionBiases,
    RelativeAttention,
    choose_kernel,
    plain_attention,
)
from fairseq_plugins.segment_language_model.attention_blocks import (
    EVERY_KEY,
    UNLIMITED,
    Clamped,
    Window,
)
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from fairseq_plugins.segment_language_model.past import HiddenStates
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedRelativeKeys,
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)
from tests.gradients import assert_same
from tests.reference import transformer_xl as reference

HEADS, STREAMS, WIDTH, MODEL_WIDTH = 2, 3, 4, 8


def draw(*shape, dtype=torch.float64):
    """Draw random numbers that require a gradient."""
    return torch.randn(*shape).to(dtype).requires_grad_()


def draw_heads(length, dtype):
    """Draw queries, keys or values (H, B, T, d_h) with the strides that projections give them."""
    projected = torch.randn(STREAMS, length, HEADS, WIDTH).to(dtype)
    return projected.permute(2, 0, 1, 3).requires_grad_()


def expand_clamped(rel_keys, keys):
    """Return relative keys of all distances; those beyond the clamp repeat the farthest one."""
    lacking = max(0, keys + 1 - rel_keys.size(1))
    return torch.cat([rel_keys[:, :1].expand(-1, lacking, -1), rel_keys], dim=1)


# sets of relative keys, and other inputs beside them
RELATIVE = [(1, ()), (2, ("position",)), (1, ("bias",)), (2, ("position", "bias"))]
# queries, keys, window and clamp
SIZES = [
    (5, 5, (1, 3), 9),
    (5, 9, (1, 3), 1),
    (5, 9, (0, 20), -1),
    (20, 25, (0, 9), 5),  # three blocks
    (20, 25, (0, 40), 5),
    (1, 1, (1, 4), -1),
    (4, 4, (6, 9), 2),
    (3, 3, (2, 3), 4),  # more distances with a bias than keys that are seen
    (4, 12, (6, 9), 2),  # sees only distances beyond the clamp
]
CASES = [
    *((*sizes, *relative) for sizes in SIZES for relative in RELATIVE),
    *((*sizes, None, *relative) for *sizes, _ in SIZES for relative in ((0, ()), *RELATIVE)),
    (3, 5, EVERY_KEY, None, 0, ()),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "window", "clamp", "sets", "extras"), CASES)
def test_kernels_are_equal(monkeypatch, queries, keys, window, clamp, sets, extras, dtype):
    for name in ("QUERY_BLOCK", "QUERY_BLOCK_FUSED_BF16"):
        monkeypatch.setattr(attention_blocks, name, 6)
    inputs = [draw_heads(number, dtype) for number in (queries, keys, keys)]
    rel_keys = None
    if sets:
        distances = keys + 3 if clamp is None else clamp + 2
        rel_keys = draw(sets, distances, WIDTH, dtype=dtype)
    options = {
        "position_query": draw_heads(queries, dtype) if "position" in extras else None,
        "distance_bias": draw(HEADS, 2, dtype=dtype) if "bias" in extras else None,
    }
    clamped = whole = rel_keys
    if clamp is not None:
        clamped, whole = Clamped(rel_keys), expand_clamped(rel_keys, keys)
    expected = plain_attention(*inputs, whole, Window(*window), **options)
    tolerance = {} if dtype.itemsize > 2 else {"atol": 0.1, "rtol": 0.05}
    wanted = [x for x in (*inputs, rel_keys, *options.values()) if x is not None]
    for attend in KERNELS.values():
        actual = attend(*inputs, clamped, Window(*window), **options)
        torch.testing.assert_close(actual, expected, **tolerance)
        # on a CPU, this uses PyTorch's fused attention, except in float16
        with torch.no_grad():
            no_grad = attend(*inputs, clamped, Window(*window), **options)
        torch.testing.assert_close(no_grad, expected, **tolerance)
        if dtype == torch.float64:
            assert_same(actual, expected, wanted)


def test_the_kernel_for_cpus_serves_no_other_device():
    assert choose_kernel("fast", torch.device("cpu")) is KERNELS["fast"]
    assert choose_kernel("fast", torch.device("meta")) is KERNELS["sdpa"]


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_dropout_drops_weights_and_scales_the_others(attend):
    query, keys = torch.zeros(1, 2, 1000, 1), torch.zeros(1, 2, 4, 1)
    out = attend(query, keys, keys + 1, None, EVERY_KEY, 0.25)
    # each of 4 equal weights is 0, or 1/4 scaled by 4/3
    weights = out.flatten() * 3
    torch.testing.assert_close(weights, weights.round())
    assert abs(weights.mean().item() - 3) < 0.1


@pytest.mark.parametrize("clamp", [None, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_with_dropout_equal_finite_differences(monkeypatch, groups, clamp):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", 2)
    rows = 6 if clamp is None else clamp + 2
    inputs = [draw(2, 2, n, 3) for n in (3, 3, 5, 5)]

    def attend(content, position, keys, values, rel_keys, bias):
        torch.manual_seed(3)  # the same weights are dropped each time
        rel_keys = rel_keys if clamp is None else Clamped(rel_keys)
        rest = (Window(1, 3), 0.4, position, bias)
        return window_attention(content, keys, values, rel_keys, *rest)

    assert torch.autograd.gradcheck(attend, (*inputs, draw(groups, rows, 3), draw(2, 2)))


# attention with relative positions


def make_attention(positions, window, clamp_len, kernel="fast"):
    """Return an attention with random weights, and the encoding of its distances."""
    torch.manual_seed(1)
    if positions == "shaw":
        table, encoding = LearnedRelativeKeys(HEADS, 6, MODEL_WIDTH // HEADS), Distances(clamp_len)
        biases = None
    else:
        table = RelativeKeyProjection(MODEL_WIDTH, HEADS)
        encoding = SinusoidalRelativePositions(MODEL_WIDTH, clamp_len)
        biases = PositionBiases(HEADS, MODEL_WIDTH // HEADS)
        torch.nn.init.normal_(biases.u)
        torch.nn.init.normal_(biases.v)
    attention = RelativeAttention(MODEL_WIDTH, HEADS, window, table, biases, kernel=kernel)
    return attention.double(), encoding


@pytest.mark.parametrize(
    ("kernel", "block"), [("fast", 2), ("fast", 128), ("sdpa", None), ("plain", None)]
)
@pytest.mark.parametrize("positions", ["transformer-xl", "shaw"])
@pytest.mark.parametrize("clamp_len", [None, 1])
@pytest.mark.parametrize(
    ("remembered", "length", "farthest"),
    [(0, 1, UNLIMITED), (0, 7, UNLIMITED), (5, 4, UNLIMITED), (6, 5, 5), (9, 5, 3), (3, 5, 0)],
)
def test_relative_attention_equals_the_equations(
    monkeypatch, kernel, block, positions, clamp_len, remembered, length, farthest
):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    attention, encoding = make_attention(positions, Window(0, farthest), clamp_len, kernel)
    x = torch.randn(STREAMS, length, MODEL_WIDTH, dtype=torch.float64, requires_grad=True)
    past = torch.randn(STREAMS, remembered, MODEL_WIDTH, dtype=torch.float64, requires_grad=True)
    terms = attention.project_positions(encoding(remembered + length - 1, x))
    y, _ = attention(x, terms, HiddenStates((past,)) if remembered else None)
    rest = (lambda d: d <= farthest), reference.encoder(attention, clamp_len)
    streams = zip(x, torch.cat([past, x], dim=1), strict=True)
    expected = torch.stack([reference.attention(attention, *stream, *rest) for stream in streams])
    assert_same(y, expected, [x, past, *attention.parameters()])
