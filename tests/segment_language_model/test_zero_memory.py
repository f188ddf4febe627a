"""--zero-memory: streams start with a recurrence of zero vectors, which tokens attend to."""

import logging
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_plugins.segment_language_model.recurrence import Recurrence
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from fairseq_plugins.segment_language_model.task_config import SegmentLanguageModelingConfig
from tests.gradients import assert_same
from tests.tiny import dictionary, scores_by_segment, tiny_model, tiny_transformer_xl, tokens

MODES = [torch.no_grad, torch.enable_grad]
# the layers' norms map zero vectors to something else where they come first
BUILD = {
    "all-attention": lambda **o: tiny_model(**o),
    "all-attention-short": lambda **o: tiny_model(mem_len=4, **o),
    "adaptive-span": lambda **o: tiny_model(
        adaptive_span=True, span_ramp=2, span_init=0.3, span_epsilon=0.1, **o
    ),
    "adaptive-span-groups": lambda **o: tiny_model(adaptive_span=True, span_ramp=2, **o),
    "transformer-xl": lambda **o: tiny_transformer_xl(mem_len=5, **o),
    "pre-norm": lambda **o: tiny_transformer_xl(
        mem_len=5, decoder_normalize_before=True, same_length=True, **o
    ),
    "transformer-xl-same-length": lambda **o: tiny_transformer_xl(
        mem_len=5, same_length=True, clamp_len=3, untie_r=True, **o
    ),
    "shaw": lambda **o: tiny_transformer_xl(mem_len=5, positions="shaw", **o),
}
# of the others a token sees as much whatever the segments
DEPENDS_ON_SEGMENTS = {"all-attention-short", "transformer-xl", "shaw"}


def build(name, **options):
    """A model with --zero-memory and the same one without."""
    models = []
    for zero in (True, False):
        model = BUILD[name](zero_memory=zero, **options).double()
        with torch.no_grad():
            # zero vectors have keys and values of their own where a norm has a bias
            for layer in model.decoder.layers:
                layer.self_attn_layer_norm.bias.copy_(torch.linspace(-1, 1, 16))
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    return models


def zeros(model, streams):
    """A recurrence of zero hidden states, as if restored from a checkpoint."""
    length, recurrence = model.decoder.context.mem_len, Recurrence()
    hidden = torch.zeros(streams, length, 16, dtype=torch.float64)
    state = {"layers": [hidden] * len(model.decoder.layers), "end": 0, "mem_len": length}
    recurrence.load_state_dict(state, 0, 1)
    return recurrence


def read(model, stream, length, recurrence, mode=torch.no_grad):
    with mode():
        parts = [
            model(stream[:, start : start + length], recurrence=recurrence, start=start)[0]
            for start in range(0, stream.size(1), length)
        ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUILD)
def test_every_segment_equals_those_after_zero_hidden_states(name, mode):
    with_zeros, without = build(name)
    stream = tokens(2, 20)
    for length in (3, 20):
        expected = read(without, stream, length, zeros(without, 2), mode)
        torch.testing.assert_close(scores_by_segment(with_zeros, stream, length, mode), expected)
    empty = scores_by_segment(without, stream, 3, mode)
    found = scores_by_segment(with_zeros, stream, 3, mode)
    assert (found[:, 0] - empty[:, 0]).abs().max() > 0.01


@pytest.mark.parametrize("name", BUILD)
def test_gradients_equal_those_after_zero_hidden_states(name):
    with_zeros, without = build(name)
    # both with the weights of the first
    weights, stream = dict(with_zeros.named_parameters()), tokens(2, 4)
    outputs = [
        torch.func.functional_call(
            model, weights, (stream,), {"recurrence": recurrence, "start": 0}
        )[0]
        for model, recurrence in ((with_zeros, Recurrence()), (without, zeros(without, 2)))
    ]
    assert_same(*outputs, list(weights.values()))


@pytest.mark.parametrize("name", BUILD)
def test_a_segment_without_a_place_starts_with_zeros_too(name):
    model, _ = build(name)
    stream = tokens(2, 7)
    for mode in MODES:
        with mode():
            alone = model(stream)[0]
        torch.testing.assert_close(alone, scores_by_segment(model, stream, 7, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(BUILD.keys() - DEPENDS_ON_SEGMENTS))
def test_the_segments_length_makes_no_difference(name, mode):
    model, _ = build(name)
    stream = tokens(2, 20)
    whole = scores_by_segment(model, stream, 20, mode)
    for length in (1, 7):
        torch.testing.assert_close(scores_by_segment(model, stream, length, mode), whole)


@pytest.mark.parametrize("name", BUILD)
def test_generation_equals_scoring_and_beams_move(name):
    model, _ = build(name)
    model.eval()
    stream, state = tokens(2, 14), {}
    order = torch.tensor([1, 0])
    with torch.no_grad():
        steps = [model.decoder(stream[:, : i + 1], incremental_state=state)[0] for i in range(6)]
        model.decoder.reorder_incremental_state(state, order)
        after = stream[order]
        steps += [
            model.decoder(after[:, : i + 1], incremental_state=state)[0] for i in range(6, 14)
        ]
    expected = scores_by_segment(model, stream, 1)
    torch.testing.assert_close(torch.cat(steps[:6], dim=1), expected[:, :6])
    torch.testing.assert_close(torch.cat(steps[6:], dim=1), expected[order][:, 6:])


def test_a_prompt_of_several_tokens_starts_with_zeros():
    for name in BUILD.keys() - DEPENDS_ON_SEGMENTS:
        model, _ = build(name)
        stream, state = tokens(2, 9), {}
        with torch.no_grad():
            prompt = model.decoder(stream[:, :6], incremental_state=state)[0]
            rest = [
                model.decoder(stream[:, : i + 1], incremental_state=state)[0] for i in (6, 7, 8)
            ]
            torch.testing.assert_close(torch.cat([prompt, *rest], dim=1), model(stream)[0])


def test_a_first_segment_that_is_run_again_starts_with_zeros_again():
    for name in BUILD:
        model, _ = build(name)
        stream, recurrence = tokens(2, 6), Recurrence()
        for mode in MODES:
            with mode():
                first, again = (model(stream, recurrence=recurrence, start=0)[0] for _ in range(2))
            torch.testing.assert_close(again, first)


def test_training_without_recurrence_is_refused():
    """But not evaluation, which may leave out the recurrence that a model was trained with."""
    task = SegmentLanguageModelingTask(SegmentLanguageModelingConfig(), dictionary())
    sizes = {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_attention_heads": 2}
    cfg = {"_name": "transformer_xl", "tokens_per_sample": 8, "extended_context": 0, **sizes}
    cfg = OmegaConf.create({**cfg, "zero_memory": True, "mem_len": 0})
    with pytest.raises(ValueError, match=r"^--zero-memory with --mem-len 0: .*; give a larger"):
        task.build_model(cfg)
    assert task.build_model(cfg, from_checkpoint=True).decoder.context.mem_len == 0
    cfg.mem_len = 8
    assert task.build_model(cfg).decoder.context.from_zeros


@pytest.mark.parametrize("name", ["all-attention", "transformer-xl"])
def test_without_recurrence_it_does_nothing(name):
    build_model = tiny_model if name == "all-attention" else tiny_transformer_xl
    with_zeros, without = (
        build_model(mem_len=0, zero_memory=zero).double() for zero in (True, False)
    )
    stream = tokens(2, 14)
    for mode in MODES:
        for length in (5, 14):
            found, expected = (
                scores_by_segment(model, stream, length, mode) for model in (with_zeros, without)
            )
            assert torch.equal(found, expected)
    with torch.no_grad():
        steps = [{}, {}]
        for end in range(1, 15):
            found, expected = (
                model.decoder(stream[:, :end], incremental_state=state)[0]
                for model, state in zip((with_zeros, without), steps, strict=True)
            )
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["all-attention", "transformer-xl"])
def test_checkpointed_activations_give_the_same(name):
    model, _ = build(name)
    again, _ = build(name, checkpoint_activations=True)
    stream = tokens(2, 9)
    torch.testing.assert_close(
        scores_by_segment(again, stream, 3, torch.enable_grad),
        scores_by_segment(model, stream, 3, torch.enable_grad),
    )


def test_zeros_have_the_precision_of_the_model():
    for name in BUILD:
        model, _ = build(name)
        stream = tokens(2, 9)
        expected = scores_by_segment(model, stream, 3)
        found = scores_by_segment(model.bfloat16(), stream, 3)
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["all-attention", "transformer-xl"])
def test_the_log_says_so(name, caplog):
    with_zeros, without = build(name)
    overrides = SimpleNamespace(model_overrides="{}")
    cfg = SimpleNamespace(common_eval=overrides, generation=SimpleNamespace())
    with caplog.at_level(logging.INFO):
        with_zeros.prepare_for_inference_(cfg)
    assert "same length no, zero vectors at the start, " in caplog.text
    assert with_zeros.summary in caplog.text
    assert "zero" not in without.summary
