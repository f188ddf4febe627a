"""Attention heads and branched linear maps alone: masks, initial values, dropout, precision."""

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq_plugins.weighted_transformer.as_written_attention import branch_linear
from torch import nn

from fairseq_plugins.modules import AttentionHeads, BranchedFeedForward, BranchWeights
from fairseq_plugins.weighted_transformer.layers import FusedAttention
from tests.gradients import assert_same
from tests.weighted_transformer.tiny import tiny_as_written

WIDTH, INNER, SENTENCES, KEYS = 12, 24, 3, 5


def padding():
    mask = torch.zeros(SENTENCES, KEYS, dtype=torch.bool)
    mask[0, :2] = mask[2, 4:] = True
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("width", [WIDTH, 10])
def test_heads_alone_are_those_in_fairseqs_layers(width, padded, masked):
    of_keys = {"kdim": width, "vdim": width}
    plain = AttentionHeads(WIDTH, 4, dropout=0.5, **of_keys)
    fairseqs = FusedAttention(WIDTH, 4, dropout=0.5, **of_keys)
    fairseqs.out_proj = nn.Identity()
    plain.load_state_dict(fairseqs.state_dict())
    inputs = torch.randn(KEYS, SENTENCES, WIDTH), *torch.randn(2, KEYS, SENTENCES, width)
    masks = {
        "key_padding_mask": padding() if padded else None,
        "attn_mask": torch.randn(KEYS, KEYS) if masked else None,
    }
    outputs = []
    for heads in (plain, fairseqs):
        torch.manual_seed(1)
        outputs.append(heads(*inputs, need_weights=False, **masks)[0])
    assert torch.equal(*outputs)
    found, expected = (heads.eval()(*inputs, **masks) for heads in (plain, fairseqs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"kdim": 48, "vdim": 48}, {"kdim": 24, "vdim": 24}])
def test_projections_start_as_fairseqs_do(options):
    plain, fairseqs = AttentionHeads(48, 4, **options), MultiheadAttention(48, 4, **options)
    plain.out_proj = BranchedFeedForward(48, 64, BranchWeights(4)).out_proj
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found, expected = (getattr(heads, name).weight.abs().max() for heads in (plain, fairseqs))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
    assert not plain.out_proj.bias.any()


@pytest.mark.parametrize("padded", [None, torch.bool, torch.uint8, torch.int64])
def test_masks_may_be_bool_or_numbers(padded):
    heads, x = AttentionHeads(WIDTH, 4), torch.randn(KEYS, SENTENCES, WIDTH)
    hidden = torch.zeros(KEYS, KEYS, dtype=torch.bool)
    hidden[:3, 2] = True
    scores = torch.zeros(KEYS, KEYS).masked_fill(hidden, float("-inf"))
    numbers, of_keys = (None, None) if padded is None else (padding().to(padded), padding())
    found = heads(x, x, x, attn_mask=hidden, key_padding_mask=numbers)
    expected = heads(x, x, x, attn_mask=scores, key_padding_mask=of_keys)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[0], heads(x, x, x, key_padding_mask=of_keys)[0])


def test_dropout_that_is_to_be_retained_acts_outside_of_training():
    model = tiny_as_written(attention_dropout=0.5, activation_dropout=0.5).eval()
    module, x = model.encoder.layers[0].self_attn, torch.randn(KEYS, SENTENCES, 16)
    for part, compute in [
        (module.heads.dropout_module, lambda: module.heads(x, x, x, need_weights=False)[0]),
        (module.feed_forward.activation_dropout, lambda: module.feed_forward(x)),
    ]:
        assert torch.equal(compute(), compute())
        # as fairseq does for --retain-dropout
        part.make_generation_fast_("", retain_dropout=True)
        assert not torch.equal(compute(), compute())


def draw(dtype=torch.double):
    """Draw the heads of 3 branches, (N, M·h), and the first layers of their networks."""
    torch.manual_seed(1)
    shapes = (5, 6), (3, 2, 4), (3, 4)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def one_by_one(x, weight, bias):
    return torch.cat([x[:, 2 * i : 2 * i + 2] @ weight[i] + bias[i] for i in range(3)], dim=1)


def test_first_layers_are_each_branchs_own_whatever_the_strides():
    x, weight, bias = draw()
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in (x, weight)]
    # a sum's gradient has strides of 0, a transposed tensor's is not contiguous
    for end in (torch.clone, torch.Tensor.sum, lambda out: out.T.contiguous().cos().sum()):
        for inputs in ([x, weight, bias], [*strided, bias]):
            assert_same(end(branch_linear(*inputs)), end(one_by_one(*inputs)), inputs)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float, True)]
)
def test_half_precision_is_that_of_the_inputs_or_of_autocast(dtype, autocast):
    inputs = draw(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = branch_linear(*inputs)
        expected = one_by_one(*inputs)
    assert out.dtype == (torch.bfloat16 if autocast else dtype)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=0.02, atol=0.02)
    out.float().sum().backward()
    assert {x.grad.dtype for x in inputs} == {dtype}


def test_gradients_of_gradients_are_refused():
    inputs = draw()
    out = branch_linear(*inputs).square().sum()
    for grad in torch.autograd.grad(out, inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward(retain_graph=True)
