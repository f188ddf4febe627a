"""The segment language model as a whole: causality, recurrence, decoding, options, presets."""

import copy
import math

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.reference.all_attention import network
from tests.tiny import (
    VOCABULARY,
    dictionary,
    scores_by_segment,
    tiny_model,
    tiny_transformer_xl,
    tokens,
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent_vectors": 0},
        {"decoder_ffn_embed_dim": 24, "persistent_vectors": 0},
        {"share_decoder_input_output_embed": True, "output_bias": True},
        {"clamp_len": 3},
    ],
)
def test_scores_equal_the_reference(options):
    model = tiny_model(**options).double()
    stream = tokens(1, 11)
    expected = network(model.decoder, stream[0], span=6)
    torch.testing.assert_close(model(stream)[0][0], expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("persistent", [0, 5])
def test_loss_does_not_depend_on_segment_length(mode, persistent):
    model = tiny_model(persistent_vectors=persistent).double()
    stream = tokens(3, 70)
    whole = scores_by_segment(model, stream, 70, mode)
    for length in (1, 7, 64):
        torch.testing.assert_close(scores_by_segment(model, stream, length, mode), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adaptive", [False, True])
def test_mixed_precision_trains_with_recurrence(dtype, adaptive):
    options = {}
    if adaptive:
        options = {"adaptive_input": True, "adaptive_input_cutoff": "8,14"}
    model, stream = tiny_model(**options), tokens(2, 18)
    plain = scores_by_segment(model, stream, 6)
    for mode in (torch.no_grad, torch.enable_grad):
        with torch.autocast("cpu", dtype=dtype):
            mixed = scores_by_segment(model, stream, 6, mode)
        assert mixed.dtype == dtype
        torch.testing.assert_close(mixed.float(), plain, atol=0.1, rtol=0.05)
    mixed.float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_recurrence_that_is_too_short_shows():
    model = tiny_model(mem_len=3).double()
    stream = tokens(2, 30)
    whole, segments = (scores_by_segment(model, stream, length) for length in (30, 5))
    torch.testing.assert_close(segments[:, :5], whole[:, :5])
    assert not torch.allclose(segments[:, 5:], whole[:, 5:])


def test_same_length_shows_every_token_the_same_number_of_others():
    model = tiny_model(mem_len=4, same_length=True, decoder_layers=1).double()
    stream = tokens(1, 12).requires_grad_(False)
    recurrence = Recurrence()
    with torch.no_grad():
        model(stream[:, :6], recurrence=recurrence, start=0)
    base = model(stream[:, 6:], recurrence=recurrence, start=6)[0]
    seen = torch.zeros(6, 12, dtype=torch.bool)
    for changed in range(12):
        other = stream.clone()
        other[0, changed] = (other[0, changed] - 4 + 1) % (VOCABULARY - 4) + 4
        recurrence = Recurrence()
        with torch.no_grad():
            model(other[:, :6], recurrence=recurrence, start=0)
        scores = model(other[:, 6:], recurrence=recurrence, start=6)[0]
        seen[:, changed] = (scores != base).any(dim=-1)[0]
    # the four tokens before its own, and its own through the residual connection
    assert seen.sum(dim=1).tolist() == [5] * 6


def test_causality_and_independence_of_streams():
    model = tiny_model().double()
    stream = tokens(3, 12)
    changed = stream.clone()
    changed[1, 7] = (changed[1, 7] - 4 + 1) % (VOCABULARY - 4) + 4
    before, after = (scores_by_segment(model, s, 5) for s in (stream, changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert (before[1, 7:] != after[1, 7:]).any(dim=-1).all()


def test_incremental_decoding_equals_one_pass():
    model = tiny_model(attention_span=32).double().eval()
    stream = tokens(2, 20)
    state = {}
    with torch.no_grad():
        steps = [model.decoder(stream[:, : i + 1], incremental_state=state)[0] for i in range(20)]
        whole = model(stream)[0]
    assert all(step.size(1) == 1 for step in steps)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)


def test_beam_search_scores_are_those_of_a_full_pass():
    model = tiny_model(attention_span=32).eval()
    generator = SequenceGenerator([model], dictionary(), beam_size=4, max_len_b=12)
    prompt = tokens(2, 3)
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([3, 3])}}
    found = generator.generate([model], sample, prefix_tokens=prompt)
    eos = dictionary().eos()
    for hypothesis in (h for beams in found for h in beams):
        target = hypothesis["tokens"]
        source = torch.cat([torch.tensor([eos]), target[:-1]])
        with torch.no_grad():
            probs = model.get_normalized_probs(model(source.unsqueeze(0)), log_probs=True)[0]
        expected = probs.gather(1, target.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-5, rtol=1e-5)


def test_tied_output_uses_the_embeddings():
    model = tiny_model(share_decoder_input_output_embed=True)
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    # unit variance in, unit variance out: neither side of the tie starts out of scale
    variance = model.decoder.embed_scale**2 * model.decoder.embed_tokens.weight.var().item()
    assert math.isclose(variance, 1, rel_tol=0.5)


@pytest.mark.parametrize(
    ("build", "options", "name"),
    [
        (tiny_transformer_xl, {}, "layers.0.self_attn.position_projection.proj.weight"),
        (
            tiny_transformer_xl,
            {"positions": "shaw"},
            "layers.0.self_attn.position_projection.weight",
        ),
        (tiny_model, {}, "positions.weight"),
        (tiny_model, {"adaptive_span": True, "span_init": 0.2}, "layers.0.self_attn.span.value"),
    ],
)
def test_what_a_walk_keeps_of_distances_follows_its_weights(build, options, name):
    model, stream = build(**options).double().eval(), tokens(2, 16)
    other = copy.deepcopy(model)
    found = []
    for reader in (model, other):
        recurrence = Recurrence()
        with torch.no_grad():
            reader(stream[:, :8], recurrence=recurrence, start=0)
            before = reader.decoder.inference_positions
            dict(reader.decoder.named_parameters())[name].mul_(3)
            if reader is other:
                before.clear()
            found.append(reader(stream[:, 8:], recurrence=recurrence, start=8)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("kernel", ["fast", "plain"])
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (tiny_transformer_xl, {}),
        (tiny_model, {"adaptive_span": True}),
        (tiny_model, {"persistent_variant": "ff-attn"}),
    ],
)
def test_the_kernel_is_the_one_that_the_options_name(build, options, kernel):
    model = build(attention_kernel=kernel, **options)
    kernels = [module.kernel for module in model.modules() if hasattr(module, "kernel")]
    assert len(kernels) >= 3
    assert set(kernels) == {kernel}
