"""The segment language model as a whole: causality, recurrence, decoding, options, presets."""

import copy
import dataclasses
import math

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingConfig
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


def test_without_recurrence_each_segment_stands_alone():
    model = tiny_model(mem_len=0).double()
    stream = tokens(2, 12)
    alone = torch.cat([model(stream[:, i : i + 4])[0] for i in (0, 4, 8)], dim=1)
    torch.testing.assert_close(scores_by_segment(model, stream, 4), alone)


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


def test_incremental_decoding_takes_a_prompt_at_once():
    model = tiny_model(attention_span=32).double().eval()
    stream = tokens(2, 20)
    state = {}
    with torch.no_grad():
        prompt = model.decoder(stream[:, :15], incremental_state=state)[0]
        rest = model.decoder(stream, incremental_state=state)[0]
        whole = model(stream)[0]
    torch.testing.assert_close(torch.cat([prompt, rest], dim=1), whole)


def test_the_recurrence_moves_with_the_beams():
    model = tiny_model(attention_span=32).double().eval()
    stream, order = tokens(3, 12), torch.tensor([2, 2, 0])
    state = {}
    with torch.no_grad():
        model.decoder(stream[:, :11], incremental_state=state)
        model.decoder.reorder_incremental_state_scripting(state, order)
        reordered = torch.cat([stream[order][:, :11], stream[:, 11:]], dim=1)
        step = model.decoder(reordered, incremental_state=state)[0]
        whole = model(reordered)[0][:, -1:]
    torch.testing.assert_close(step, whole)


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


def test_a_probability_that_is_not_finite_is_an_error():
    model = tiny_model()
    stream = tokens(1, 4)
    scores = model(stream)[0].detach()
    scores[0, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="log-probability of a token is not finite"):
        model.get_normalized_probs((scores, None), log_probs=True, sample={"target": stream})


BAD_OPTIONS = [
    ({"decoder_layers": 0}, "--decoder-layers is 0: it must be at least 1"),
    ({"mem_len": -1}, "--mem-len is -1: it must be at least 0"),
    ({"clamp_len": 0}, "--clamp-len is 0: it must be at least 1"),
    ({"attention_dropout": 1.0}, r"--attention-dropout is 1.0: it must be in \[0, 1\)"),
    (
        {"decoder_attention_heads": 3},
        "--decoder-attention-heads is 3: it must divide --decoder-embed-dim, 16",
    ),
    ({"persistent_vectors": -1}, "--persistent-vectors is -1: it must be at least 0"),
    ({"span_ramp": 0}, "--span-ramp is 0: it must be at least 1"),
    ({"span_init": 0.5}, r"--span-init is 0.5: it needs --adaptive-span"),
    ({"span_init": 1.5}, r"--span-init is 1.5: it is a part of --attention-span, from 0 to 1"),
    (
        {"persistent_variant": "attn-split", "persistent_vectors": 0},
        "--persistent-variant is attn-split with --persistent-vectors 0: there are none to place",
    ),
    (
        {
            "persistent_variant": "head-split",
            "decoder_attention_heads": 1,
        },
        "--persistent-variant head-split with --decoder-attention-heads 1: .* give an even number",
    ),
    (
        {"persistent_variant": "ff-attn", "decoder_ffn_embed_dim": 8},
        "--decoder-ffn-embed-dim is 8 with --persistent-variant ff-attn, .*: leave it out",
    ),
    (
        {"tie_adaptive_head_proj": True},
        "--tie-adaptive-head-proj needs --tie-adaptive-proj and --output-bias",
    ),
    (
        {
            "adaptive_input": True,
            "adaptive_input_cutoff": "8",
            "adaptive_input_factor": 1,
            "adaptive_softmax_cutoff": "8",
            "adaptive_softmax_factor": 1,
            "tie_adaptive_weights": True,
            "tie_adaptive_proj": True,
            "tie_adaptive_head_proj": True,
            "output_bias": True,
        },
        "--tie-adaptive-head-proj with --adaptive-softmax-factor 1: bands as wide as the model",
    ),
    ({"attention_span": 0}, "--attention-span is 0: it must be at least 1"),
    ({"same_length": True, "mem_len": 0}, "--same-length with --mem-len 0 leaves nothing"),
    ({"adaptive_input": True}, "--adaptive-input needs --adaptive-input-cutoff"),
    (
        {"adaptive_softmax_cutoff": "8,100"},
        "--adaptive-softmax-cutoff is '8,100': its last number must be below the 20 symbols",
    ),
    (
        {"adaptive_softmax_cutoff": "1,8"},
        "--adaptive-softmax-cutoff is '1,8': its first number must be at least 4, so that padding",
    ),
    (
        {"adaptive_softmax_cutoff": "8,10,12"},
        "--adaptive-softmax-factor is 4: 3 cutoffs leave the last band less than one of the "
        "--decoder-embed-dim 16 dimensions",
    ),
    ({"adaptive_input_cutoff": "8"}, "--adaptive-input-cutoff needs --adaptive-input"),
    (
        {"adaptive_softmax_dropout": 0.1},
        "--adaptive-softmax-dropout needs --adaptive-softmax-cutoff",
    ),
    (
        {"adaptive_softmax_dropout": 2.0, "adaptive_softmax_cutoff": "8"},
        r"--adaptive-softmax-dropout is 2.0: it must be in \[0, 1\)",
    ),
    ({"activation_dropout": 0.1}, "--activation-dropout needs --decoder-ffn-embed-dim"),
    (
        {"mem_len": 7},
        "--mem-len is 7: attention reaches no farther back than --attention-span, 6 tokens",
    ),
    (
        {"adaptive_softmax_cutoff": "9,8"},
        "--adaptive-softmax-cutoff is '9,8': it must be rising numbers",
    ),
    (
        {"adaptive_softmax_cutoff": "some"},
        "--adaptive-softmax-cutoff is 'some': it must be rising numbers",
    ),
    ({"no_decoder_final_norm": True}, "--no-decoder-final-norm needs --decoder-normalize-before"),
    ({"output_dropout": -0.1}, r"--output-dropout is -0.1: it must be in \[0, 1\)"),
    (
        {"adaptive_softmax_cutoff": "8", "share_decoder_input_output_embed": True},
        "--share-decoder-input-output-embed ties plain embeddings",
    ),
    ({"tie_adaptive_weights": True}, "--tie-adaptive-weights needs --adaptive-input"),
    ({"tie_adaptive_proj": True}, "--tie-adaptive-proj needs --tie-adaptive-weights"),
    (
        {
            "tie_adaptive_weights": True,
            "adaptive_input": True,
            "adaptive_input_cutoff": "8",
            "adaptive_softmax_cutoff": "9",
        },
        "--tie-adaptive-weights needs the same --adaptive-input-cutoff and "
        "--adaptive-softmax-cutoff, not 8 and 9",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_that_make_no_model_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(**options)


def test_weights_of_another_dictionary_are_refused():
    state = tiny_model().state_dict()
    state["decoder.embed_tokens.weight"] = torch.zeros(31, 16)
    with pytest.raises(ValueError, match=r"embeddings of 31 symbols and the dictionary .* has 20"):
        tiny_model().load_state_dict(state)


@pytest.mark.parametrize("config", [AllAttentionConfig, SegmentLanguageModelingConfig])
def test_every_option_has_a_help_text(config):
    for option in dataclasses.fields(config):
        of_fairseq = str(option.default).startswith("${")
        if option.name != "_name" and not of_fairseq:
            assert option.metadata.get("help"), option.name


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
            before = reader.decoder._inference_positions
            dict(reader.decoder.named_parameters())[name].mul_(3)
            if reader is other:
                before.clear()
            found.append(reader(stream[:, 8:], recurrence=recurrence, start=8)[0])
    assert torch.equal(*found)


def test_another_walk_takes_distances_anew():
    model, stream = tiny_transformer_xl(mem_len=12).double().eval(), tokens(2, 16)
    scores_by_segment(model, stream, 4)
    model.decoder.positions.clamp_len = 2
    clamped = scores_by_segment(model, stream, 4)
    torch.testing.assert_close(clamped, scores_by_segment(model, stream, 4, torch.enable_grad))


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


def test_a_kernel_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"^--attention-kernel is 'new': there are fast, plain$"):
        tiny_model(attention_kernel="new")
