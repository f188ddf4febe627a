"""Models with memories that start from checkpoints without memories: outputs and logs."""

import pytest
import torch
from fairseq_plugins.fairseq_integration.checkpoint_files import MisfitError

from tests.product_key_memory.tiny import BUILDERS, MEMORY, build, padded, score

NORM, GATE = {"memory_output_norm": True}, {"memory_output_gate": True}
NORMS = ("decoder_normalize_before", "encoder_normalize_before")
ADDED = [{"memory_interleave": True}, {"memory_parallel": True}]
PLACES = pytest.mark.parametrize("place", ADDED, ids=["after", "parallel"])


def trained(kind, pre_norm=False, **options):
    """Return a model without memories, all of its weights random, even norms, and its options."""
    part = NORMS if kind == "translation" else NORMS[:1]
    options = {"decoder_ffn_embed_dim": 24, **dict.fromkeys(part, pre_norm), **options}
    model = BUILDERS[kind](**MEMORY, **options).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, options


def logged(caplog):
    """Return level and text of the log messages about memories."""
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    start = "the checkpoint has no memory "
    return [f"{level} {text.removeprefix(start)}" for level, text in found if start in text]


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize(
    ("kind", "place", "width"),
    [
        *((kind, place, 24) for kind in BUILDERS for place in ADDED),
        # layers without a feed-forward sublayer
        ("all_attention", {}, 0),
        ("all_attention", {"memory_interleave": True}, 0),
    ],
)
def test_an_added_memory_that_starts_with_zero_changes_nothing(
    kind, place, width, pre_norm, caplog
):
    caplog.set_level("INFO")
    plain, options = trained(kind, pre_norm, decoder_ffn_embed_dim=width)
    options |= {"memory_query_batch_norm": True, **place}
    model = build(kind, memory_zero_init=True, **options).eval()
    model.load_state_dict(plain.state_dict())
    batch = padded(7, 4, 5)
    torch.testing.assert_close(score(model, batch), score(plain, batch), rtol=1e-4, atol=1e-4)
    layers = ["2 of the decoder"]
    if kind == "translation":
        layers = ["2 of the encoder", "1 of the decoder"]
    for text, layer in zip(logged(caplog), layers, strict=True):
        assert text.startswith(f"INFO in layer {layer}: a new one is added, its output zero,")


@PLACES
@pytest.mark.parametrize("last", [{}, {"memory_value_dim": 8}, NORM, GATE, NORM | GATE])
@pytest.mark.parametrize("zero_init", [True, False])
def test_what_a_new_memory_adds_to_the_loss_is_logged(place, last, zero_init, caplog):
    caplog.set_level("INFO")
    plain, options = trained("language model")
    options |= {**place, **last, "memory_zero_init": zero_init}
    build("language model", **options).load_state_dict(plain.state_dict())
    (text,) = logged(caplog)
    level, output = ("INFO", "zero") if zero_init else ("WARNING", "not zero")
    assert text.startswith(
        f"{level} in layer 2 of the decoder: a new one is added, its output {output},"
    )
    assert ("--memory-zero-init" in text) != zero_init


@PLACES
def test_a_shared_table_and_a_further_memory_are_added(place, caplog):
    """Memories that the checkpoint has are loaded."""
    plain, options = trained("language model")
    choices = {"memory_zero_init": True, "memory_share_values": True, **place, **options}
    one = build("language model", memory_layers="1", **choices)
    one.load_state_dict(plain.state_dict())
    with torch.no_grad():
        one.decoder.layers[0].memory_sublayer.memory.values.normal_()
    caplog.clear()
    two = build("language model", memory_layers="1,3", **choices)
    two.load_state_dict(one.state_dict())
    state = two.state_dict()
    for name, value in one.state_dict().items():
        assert name.startswith("decoder.layers.2.") or torch.equal(state[name], value)
    (text,) = logged(caplog)
    assert text.startswith("WARNING in layer 3 of the decoder: a new one is added, its output not")
    assert "shares are trained already" in text


@pytest.mark.parametrize(
    ("layers", "parallel", "share", "message"),
    [
        # a shared table does not move to another layer
        ("2,3", True, True, r"layers\.0\.memory_sublayer\.memory\.values"),
        # a memory beside a sublayer does not load into one that replaces it
        ("1,2", False, False, r"Missing key\(s\).*layers\.0\.fc1\.memory"),
    ],
)
def test_a_memory_in_another_place_is_refused(layers, parallel, share, message, caplog):
    options = {"memory_share_values": share, "decoder_ffn_embed_dim": 24}
    saved = build("language model", memory_layers="1,2", memory_parallel=True, **options)
    model = build("language model", memory_layers=layers, memory_parallel=parallel, **options)
    with pytest.raises(MisfitError, match=message):
        model.load_state_dict(saved.state_dict())
    assert not caplog.messages


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_replaced_sublayer_is_logged(kind, caplog):
    plain, options = trained(kind)
    model = build(kind, memory_zero_init=True, **options)
    model.load_state_dict(plain.state_dict())
    texts = logged(caplog)
    assert len(texts) == 1 + (kind == "translation")
    for text in texts:
        assert text.startswith("WARNING")
        assert "takes the place of a trained feed-forward sublayer" in text
        assert "--memory-parallel or --memory-interleave, with --memory-zero-init" in text
