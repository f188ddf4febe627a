"""The fast attention kernel against the plain one, and the plain one by itself."""

import inspect
import textwrap

import pytest
import torch

from fairseq_plugins import modules
from fairseq_plugins.segment_language_model import attention_kernel
from fairseq_plugins.segment_language_model.attention import (
    RelativeAttention,
    plain_attention,
)
from fairseq_plugins.segment_language_model.attention_kernel import (
    EVERY_KEY,
    Clamped,
    Window,
    window_attention,
)
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedRelativePositions,
    SinusoidalRelativePositions,
)
from tests.gradients import assert_same


def draw(*shape):
    """Random numbers in double precision, with a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def of_all_distances(rel_keys, keys):
    """Relative keys of the distances that are clamped, and what they are without the clamp."""
    lacking = max(0, keys + 1 - rel_keys.size(1))
    return torch.cat([rel_keys[:, :1].expand(-1, lacking, -1), rel_keys], dim=1)


# sets of relative keys, and what comes with them
RELATIVE = [
    *((sets, extras) for sets in (1, 2) for extras in ((), ("position",), ("bias",))),
    (2, ("position", "bias")),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "window", "clamp", "sets", "extras"),
    [
        *(
            (*sizes, clamp, *relative)
            for sizes, clamps in [
                ((5, 5, (1, 3)), (None, 9)),
                ((5, 9, (1, 3)), (None, 1)),
                ((5, 9, (0, 20)), (None, -1, 4)),
                ((20, 25, (0, 9)), (None, 5)),  # three blocks
                ((20, 25, (0, 40)), (5,)),
                ((1, 1, (1, 4)), (None, -1)),
                ((4, 4, (6, 9)), (None, 2)),
                ((4, 12, (6, 9)), (2,)),  # no nearer distance is seen
            ]
            for clamp in clamps
            for relative in ((0, ()), *RELATIVE)
            if clamp is None or relative[0] > 0
        ),
        (3, 5, EVERY_KEY, None, 0, ()),
    ],
)
def test_both_kernels_give_the_same(monkeypatch, queries, keys, window, clamp, sets, extras, dtype):
    monkeypatch.setattr(attention_kernel, "QUERY_BLOCK", 6)
    torch.manual_seed(1)
    heads, streams, width = 2, 3, 4
    inputs = [draw(heads, streams, n, width) for n in (queries, keys, keys)]
    rel_keys = draw(sets, keys + 3 if clamp is None else clamp + 2, width) if sets else None
    how = {
        "position_query": draw(heads, streams, queries, width) if "position" in extras else None,
        "distance_bias": draw(heads, 2) if "bias" in extras else None,
    }
    inputs, rel_keys, how = (
        [x.detach().to(dtype).requires_grad_() for x in inputs],
        None if rel_keys is None else rel_keys.detach().to(dtype).requires_grad_(),
        {k: None if x is None else x.detach().to(dtype).requires_grad_() for k, x in how.items()},
    )
    given = whole = rel_keys
    if clamp is not None:
        given, whole = Clamped(rel_keys), of_all_distances(rel_keys, keys)
    expected = plain_attention(*inputs, whole, Window(*window), return_lse=True, **how)
    tolerance = {} if dtype.itemsize > 2 else {"atol": 0.1, "rtol": 0.05}
    wanted = [x for x in (*inputs, rel_keys, *how.values()) if x is not None]
    for attend in (window_attention, plain_attention):
        found = attend(*inputs, given, Window(*window), return_lse=True, **how)
        torch.testing.assert_close(found, expected, **tolerance)
        assert attend(*inputs, given, Window(*window), **how)[1] is None
        if dtype == torch.float64:
            assert_same(found[0], expected[0], wanted)
            seen = expected[1].isfinite()
            assert torch.equal(seen, found[1].isfinite())
            assert_same(found[1][seen], expected[1][seen], wanted)


@pytest.mark.parametrize("attend", [window_attention, plain_attention])
def test_relative_keys_that_do_not_fit_are_refused(attend):
    query, keys = draw(1, 1, 2, 3), draw(1, 1, 4, 3)
    with pytest.raises(ValueError, match=r"^`rel_keys` has 4 distances: 4 keys take one more than"):
        attend(query, keys, keys, draw(1, 4, 3), Window(0, 9))
    with pytest.raises(ValueError, match=r"^`rel_keys` has 0 distances: .* at least one where"):
        attend(query, keys, keys, Clamped(draw(1, 0, 3)), Window(0, 9))
    for rel_keys in (draw(1, 5, 4), draw(2, 5, 3), Clamped(draw(1, 2, 4))):
        with pytest.raises(ValueError, match="heads of width 3 take one set for all, or one each"):
            attend(query, keys, keys, rel_keys, Window(0, 9))
    with pytest.raises(ValueError, match=r"^`distance_bias` without `rel_keys`: give both"):
        attend(query, keys, keys, None, Window(0, 9), distance_bias=draw(1, 2))


def test_a_distance_beyond_the_mask_has_no_weight_in_either_kernel():
    torch.manual_seed(1)
    query, keys, values = (draw(1, 1, n, 3) for n in (3, 6, 6))
    rel_keys, bias = draw(1, 7, 3), torch.tensor([[-torch.inf, -1.0]], dtype=torch.float64)
    for attend in (window_attention, plain_attention):
        options = {"distance_bias": bias, "return_lse": True}
        masked = attend(query, keys, values, rel_keys, Window(1, 3), **options)
        options["distance_bias"] = bias[:, 1:]
        nearer = attend(query, keys, values, rel_keys, Window(1, 2), **options)
        torch.testing.assert_close(masked, nearer)
        gradients = torch.autograd.grad(masked[0].sum(), [query, keys, values, rel_keys])
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("rows", [5, 3])
def test_the_plain_kernel_has_gradients_of_gradients(rows):
    torch.manual_seed(1)
    inputs = [draw(2, 1, n, 2) for n in (3, 4, 4)]
    rest = [draw(2, rows, 2), draw(2, 1, 3, 2), draw(2, 2)]

    def attend(query, keys, values, rel_keys, position_query, bias):
        return plain_attention(
            query, keys, values, Clamped(rel_keys), Window(0, 2), 0.0, position_query, bias
        )[0]

    assert torch.autograd.gradcheck(attend, (*inputs, *rest))
    assert torch.autograd.gradgradcheck(attend, (*inputs, *rest))


def test_the_plain_kernel_drops_weights_and_scales_the_others():
    torch.manual_seed(1)
    query, keys = torch.zeros(1, 1, 2000, 1), torch.zeros(1, 1, 4, 1)
    values = torch.ones(1, 1, 4, 1)
    out, _ = plain_attention(query, keys, values, None, EVERY_KEY, 0.25)
    # each of 4 equal weights is 0, or 1/4 scaled by 4/3
    kept = out.flatten() * 3
    torch.testing.assert_close(kept, kept.round())
    assert abs(kept.mean().item() - 3) < 0.1


@pytest.mark.parametrize("layer", [RelativeAttention, modules.AllAttention])
def test_an_attention_by_itself_is_built_as_its_docstring_says(layer):
    documented = inspect.cleandoc(layer.__doc__).split("By itself::")[1].split("Args:")[0]
    example = textwrap.dedent(
        "\n".join(line for line in documented.splitlines() if line.startswith("    "))
    )
    names = {**vars(modules), "x": torch.randn(2, 6, 512)}
    exec(example, names)
    assert names["y"].shape == (2, 6, 512)
    terms = names["attention"].project_positions(torch.zeros(7, 64 if "span" in names else 512))
    with pytest.raises(ValueError, match=r"^`past` is a Tensor: give HiddenStates, or the keys"):
        names["attention"](names["x"], terms, names["x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 2, Window(3, 2)), "nothing would be left to attend to"),
        ((8, 3, Window(0, 2)), "^`num_heads` is 3: it must divide `embed_dim`, 8$"),
        (
            (8, 2, Window(0, 2), None, None, 0.0, "new"),
            "^`kernel` is 'new': there are fast, plain$",
        ),
    ],
)
def test_an_attention_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativeAttention(*arguments)


@pytest.mark.parametrize("clamp", [None, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_with_dropout_are_those_of_finite_differences(monkeypatch, groups, clamp):
    monkeypatch.setattr(attention_kernel, "QUERY_BLOCK", 2)
    torch.manual_seed(1)
    heads, streams, queries, keys, width = 2, 2, 3, 5, 3

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    inputs = (
        draw(heads, streams, queries, width),
        draw(heads, streams, queries, width),
        draw(heads, streams, keys, width),
        draw(heads, streams, keys, width),
        draw(groups, keys + 1 if clamp is None else clamp + 2, width),
        draw(heads, 2),
    )

    def attend(*tensors):
        torch.manual_seed(3)  # the same weights are dropped each time
        content, position, *keys_values, rel_keys, bias = tensors
        rel_keys = rel_keys if clamp is None else Clamped(rel_keys)
        how = (Window(1, 3), 0.4, position, bias)
        return window_attention(content, *keys_values, rel_keys, *how, return_lse=True)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize(
    ("fused", "block", "size", "dtype"),
    [
        (True, "QUERY_BLOCK", 2, torch.float64),
        (True, "QUERY_BLOCK", 128, torch.float64),
        (True, "QUERY_BLOCK_FUSED_BF16", 2, torch.bfloat16),
        (False, "QUERY_BLOCK", 2, torch.float64),
        (False, "QUERY_BLOCK", 128, torch.float64),
    ],
)
@pytest.mark.parametrize("position_query", [True, False])
@pytest.mark.parametrize(("groups", "clamp"), [(0, None), (1, None), (2, None), (1, 1), (2, 1)])
@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [(5, 5, (1, 3)), (5, 9, (1, 3)), (5, 9, (0, 20)), (1, 1, (1, 4)), (4, 4, (6, 9))],
)
def test_without_gradients_values_and_lse_are_the_same(
    monkeypatch, fused, block, size, dtype, position_query, groups, clamp, queries, keys, window
):
    """PyTorch's fused attention stands in for the blocks where no gradient is wanted."""
    assert attention_kernel._FUSED is not None
    if not fused:
        monkeypatch.setattr(attention_kernel, "_FUSED", None)
    torch.manual_seed(1)
    heads, streams, width = 2, 3, 4

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype)

    inputs = [draw(heads, streams, n, width) for n in (queries, keys, keys)]
    rel_keys = draw(groups, keys + 1, width) if groups else None
    if clamp is not None:
        rel_keys = Clamped(draw(groups, clamp + 2, width))
    how = {
        "position_query": draw(heads, streams, queries, width) if position_query else None,
        "distance_bias": draw(heads, 2) if groups else None,
        "return_lse": True,
    }
    expected = window_attention(*inputs, rel_keys, Window(*window), **how)
    monkeypatch.setattr(attention_kernel, block, size)
    with torch.no_grad():
        found = window_attention(*inputs, rel_keys, Window(*window), **how)
    tolerance = {"atol": 0.1, "rtol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_layout_in_memory_makes_no_difference(mode):
    torch.manual_seed(1)
    heads, streams, queries, keys, width = 2, 3, 4, 6, 4
    sizes = (queries, queries, keys, keys)
    # (B, T, H, d_h) -> (H, B, T, d_h), as projections leave them
    strided = [torch.randn(streams, n, heads, width).permute(2, 0, 1, 3) for n in sizes]
    rel_keys, found = torch.randn(1, keys + 1, width), []
    for inputs in (strided, [tensor.contiguous() for tensor in strided]):
        inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs]
        with mode():
            if torch.is_grad_enabled():
                inputs = [tensor.requires_grad_() for tensor in inputs]
            query, position_query, *rest = inputs
            out, lse = window_attention(
                query, *rest, rel_keys, Window(1, 3), 0.0, position_query, return_lse=True
            )
            found.append([out, lse])
            if torch.is_grad_enabled():
                found[-1] += torch.autograd.grad(out.sum() + lse[..., 1:].sum(), inputs)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("persistent", [False, True])
def test_dropped_weights_are_those_drawn_and_the_others_are_scaled(persistent):
    torch.manual_seed(1)
    heads, streams, queries, keys, width, dropout = 2, 3, 4, 6, 4, 0.3
    window = EVERY_KEY if persistent else Window(0, 9)
    query, key, value = (
        torch.randn(heads, streams, number, width, dtype=torch.float64, requires_grad=True)
        for number in (queries, keys, keys)
    )
    torch.manual_seed(7)
    out, _ = window_attention(query, key, value, None, window, dropout)
    scores = query @ key.transpose(2, 3)
    if not persistent:
        hidden = torch.arange(keys) > torch.arange(keys - queries, keys).unsqueeze(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    torch.manual_seed(7)
    keep = torch.rand(heads * streams, queries, keys).view(scores.shape) >= dropout
    expected = (scores.softmax(-1) * keep / (1 - dropout)) @ value
    assert_same(out, expected, [query, key, value])


@pytest.mark.parametrize(
    "build",
    [
        lambda clamp: SinusoidalRelativePositions(8, clamp),
        Distances,
        lambda clamp: LearnedRelativePositions(9, 8, clamp),
    ],
)
def test_a_clamp_below_1_is_refused(build):
    # the published code has -1 for no clamp
    for clamp in (0, -1):
        message = f"`clamp_len` is {clamp}: give at least 1, or None for no limit"
        with pytest.raises(ValueError, match=message):
            build(clamp)
    build(1)
