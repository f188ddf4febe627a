"""Fast attention against the equations, values and gradients, in float64."""

import pytest
import torch

from fairseq_plugins.segment_language_model import attention_blocks as query_blocks_file
from fairseq_plugins.segment_language_model import attention_kernel as window_attention_file
from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import (
    EVERY_KEY,
    Window,
    align_by_distance,
    hidden_by_window,
    spread_by_distance,
)
from fairseq_plugins.segment_language_model.attention_kernel import window_attention
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates, KeyValueCache
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedDistanceTable,
    LearnedRelativePositions,
    SharedDistanceTable,
)
from tests.gradients import assert_same
from tests.reference.all_attention import multi_head

STREAMS, HEADS, WIDTH = 2, 2, 8


def make(span, persistent, nearest=1, clamp_len=None):
    torch.manual_seed(1)
    window = Window(nearest, span)
    shared = SharedDistanceTable()
    attention = RelativeAttention(WIDTH, HEADS, window, shared, num_persistent=persistent)
    positions = LearnedRelativePositions(span, WIDTH // HEADS, clamp_len)
    return attention.double(), positions.double()


def terms(attention, positions, farthest):
    return attention.distance_terms(positions(farthest), None)


def reference(attention, positions, x, memory):
    context = x if memory is None else torch.cat([memory, x], dim=1)
    farthest = positions.farthest

    def u(distance):
        return positions.weight[min(max(distance, 1), farthest) - 1]

    span = attention.window.farthest
    return torch.stack([multi_head(attention, x[b], context[b], u, span) for b in range(x.size(0))])


@pytest.mark.parametrize("block", [2, 3, 128])
@pytest.mark.parametrize("persistent", [0, 5])
@pytest.mark.parametrize(
    ("remembered", "length", "span", "nearest", "clamp_len"),
    [
        (0, 1, 4, 1, None),
        (0, 7, 4, 1, None),
        (0, 7, 20, 1, None),
        (4, 5, 4, 1, None),
        (6, 5, 4, 1, None),
        (3, 5, 6, 1, None),
        (6, 1, 4, 1, None),
        (4, 5, 4, 0, None),
        (0, 5, 4, 0, None),
        (6, 5, 8, 1, 3),
    ],
)
def test_values_and_gradients_equal_the_equations(
    monkeypatch, block, persistent, remembered, length, span, nearest, clamp_len
):
    monkeypatch.setattr(query_blocks_file, "QUERY_BLOCK", block)
    attention, positions = make(span, persistent, nearest, clamp_len)
    x = torch.randn(STREAMS, length, WIDTH, dtype=torch.float64, requires_grad=True)
    memory = None
    if remembered:
        memory = torch.randn(STREAMS, remembered, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *attention.parameters(), positions.weight]
    if memory is not None:
        inputs.append(memory)

    state = None if memory is None else HiddenStates(memory)
    fast, _ = attention(x, terms(attention, positions, remembered + length - 1), state)
    slow = reference(attention, positions, x, memory)
    assert_same(fast, slow, inputs)


def test_cached_projections_give_the_values_of_remembered_hidden_states():
    attention, positions = make(span=4, persistent=3)
    x = torch.randn(STREAMS, 9, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        _, state = attention(x[:, :5], terms(attention, positions, 4))
        assert isinstance(state, KeyValueCache)
        cached, _ = attention(x[:, 5:], terms(attention, positions, 8), state)
    hidden, state = attention(x[:, 5:], terms(attention, positions, 8), HiddenStates(x[:, :5]))
    assert isinstance(state, HiddenStates)
    torch.testing.assert_close(cached, hidden.detach())


def test_projections_learn_from_remembered_hidden_states():
    attention, positions = make(span=4, persistent=0)
    x = torch.randn(STREAMS, 1, WIDTH, dtype=torch.float64)
    memory = HiddenStates(torch.randn(STREAMS, 4, WIDTH, dtype=torch.float64))
    out, _ = attention(x, terms(attention, positions, 4), memory)
    out.sum().backward()
    # the segment's only token sees nothing but memory, so the gradient comes from there
    assert attention.k_proj.weight.grad.abs().max() > 0
    assert attention.v_proj.weight.grad.abs().max() > 0


def test_align_by_distance_moves_each_row_by_one():
    scores = torch.arange(12.0).view(3, 4)
    expected = torch.tensor([[2.0, 3.0, 4.0], [5.0, 6.0, 7.0], [8.0, 9.0, 10.0]])
    assert torch.equal(align_by_distance(scores, 3), expected)


def test_spread_by_distance_is_the_inverse_and_zero_elsewhere():
    scores = torch.randn(2, 3, 3)
    spread = torch.full((2, 3, 4), 7.0)
    spread_by_distance(scores, spread)
    assert torch.equal(align_by_distance(spread, 3), scores)
    assert spread.count_nonzero() == scores.numel()


def test_window_hides_what_is_nearer_and_farther():
    hidden = hidden_by_window(2, 2, 4, Window(1, 2), like=torch.zeros(()))
    # distances of the first query: 2 1 0 -1, of the second: 3 2 1 0
    assert hidden.tolist() == [[False, False, True, True], [True, False, False, True]]


def test_dropout_acts_on_attention_weights_in_training_only():
    attention, positions = make(span=4, persistent=3)
    x = torch.randn(STREAMS, 5, WIDTH, dtype=torch.float64)
    plain, _ = attention(x, terms(attention, positions, 4))
    attention.dropout = 0.5
    assert not torch.allclose(attention(x, terms(attention, positions, 4))[0], plain)
    torch.testing.assert_close(attention.eval()(x, terms(attention, positions, 4))[0], plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_where_a_query_sees_nothing(dtype):
    attention, positions = make(span=4, persistent=0)
    attention, positions = attention.to(dtype), positions.to(dtype)
    x = (100 * torch.randn(STREAMS, 5, WIDTH)).to(dtype)
    out, _ = attention(x, terms(attention, positions, 4))
    assert out.isfinite().all()
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_with_dropout_are_those_of_finite_differences(monkeypatch, groups):
    monkeypatch.setattr(query_blocks_file, "QUERY_BLOCK", 2)
    torch.manual_seed(1)
    heads, streams, queries, keys, width = 2, 2, 3, 5, 3

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    inputs = (
        draw(heads, streams, queries, width),
        draw(heads, streams, queries, width),
        draw(heads, streams, keys, width),
        draw(heads, streams, keys, width),
        draw(groups, keys + 1, width),
        draw(heads, 2),
    )

    def attend(*tensors):
        torch.manual_seed(3)  # the same weights are dropped each time
        content, position, *keys_values_table, log_mask = tensors
        how = (Window(1, 3), 0.4, position, log_mask)
        return window_attention(content, *keys_values_table, *how, with_total=True)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("block", [2, 128])
@pytest.mark.parametrize("position_query", [True, False])
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [(5, 5, (1, 3)), (5, 9, (1, 3)), (5, 9, (0, 20)), (1, 1, (1, 4)), (4, 4, (6, 9))],
)
def test_without_gradients_values_and_totals_are_the_same(
    monkeypatch, fused, block, position_query, groups, queries, keys, window
):
    """PyTorch's fused attention stands in for the blocks where no gradient is wanted."""
    assert window_attention_file._FUSED is not None
    if not fused:
        monkeypatch.setattr(window_attention_file, "_FUSED", None)
    monkeypatch.setattr(query_blocks_file, "QUERY_BLOCK_FUSED", block)
    torch.manual_seed(1)
    heads, streams, width = 2, 3, 4

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    inputs = [draw(heads, streams, n, width) for n in (queries, keys, keys)]
    table = draw(groups, keys + 1, width) if groups else None
    how = {
        "position_query": draw(heads, streams, queries, width) if position_query else None,
        "log_mask": draw(heads, 2) if groups else None,
        "with_total": True,
    }
    expected = window_attention(*inputs, table, Window(*window), **how)
    with torch.no_grad():
        found = window_attention(*inputs, table, Window(*window), **how)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_memory_layout_makes_no_difference(mode):
    torch.manual_seed(1)
    heads, streams, queries, keys, width = 2, 3, 4, 6, 4
    sizes = (queries, queries, keys, keys)
    # (B, T, H, d_h) -> (H, B, T, d_h), as projections leave them
    strided = [torch.randn(streams, n, heads, width).permute(2, 0, 1, 3) for n in sizes]
    table, found = torch.randn(1, keys + 1, width), []
    for inputs in (strided, [tensor.contiguous() for tensor in strided]):
        inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs]
        with mode():
            if torch.is_grad_enabled():
                inputs = [tensor.requires_grad_() for tensor in inputs]
            query, position_query, *rest = inputs
            out, total = window_attention(
                query, *rest, table, Window(1, 3), 0.0, position_query, with_total=True
            )
            found.append([out, total])
            if torch.is_grad_enabled():
                found[-1] += torch.autograd.grad(out.sum() + total[..., 1:].sum(), inputs)
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


def test_dropout_acts_on_the_context_alone_too():
    attention, positions = make(span=4, persistent=0)
    x = torch.randn(STREAMS, 5, WIDTH, dtype=torch.float64)
    attention.dropout = 0.5
    one, other = (attention(x, terms(attention, positions, 4))[0] for _ in range(2))
    assert not torch.allclose(one, other)


def test_half_of_the_heads_take_their_part_of_biases_and_tables():
    """Where half of the heads see the context, theirs are the first of u, v and p."""
    torch.manual_seed(1)
    heads, head_dim = 4, 2
    window, biases = Window(1, 9), PositionBiases(heads, head_dim)
    for vector in (biases.u, biases.v):
        torch.nn.init.normal_(vector)
    table = LearnedDistanceTable(heads, 9, head_dim)
    split, whole = (
        RelativeAttention(
            WIDTH, heads, window, table, biases, num_persistent=number, variant=variant
        ).double()
        for number, variant in ((3, "head-split"), (0, "all"))
    )
    whole.load_state_dict(split.state_dict(), strict=False)
    for attention in (split, whole):
        attention.out_proj.weight.data = torch.eye(WIDTH, dtype=torch.float64)
    x = torch.randn(STREAMS, 6, WIDTH, dtype=torch.float64)
    of_both = [a(x, a.distance_terms(Distances()(5), None))[0] for a in (split, whole)]
    seen = heads // 2 * head_dim
    torch.testing.assert_close(of_both[0][..., :seen], of_both[1][..., :seen])
