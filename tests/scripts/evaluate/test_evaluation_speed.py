import json
import re

import pytest
import torch
from tqdm import tqdm

from scripts.evaluate import evaluation_speed as measure_evaluation_speed
from scripts.evaluate.evaluation_speed import (
    PUBLISHED,
    Setting,
    Sizes,
    build_sliding_window,
    build_state_reuse,
    check_reuse,
    sizes_of_arch,
    sizes_of_checkpoint,
    time_sliding_window,
    time_state_reuse,
)
from tests import tiny
from tests.scripts.evaluate.saved_models import write_checkpoint

CPU = torch.device("cpu")
XL = Sizes("transformer_xl", {"decoder_layers": 2, "decoder_embed_dim": 16, "clamp_len": 9}, 30)
AA = Sizes("all_attention_lm", {"decoder_layers": 2, "decoder_embed_dim": 16}, 30)
SETTING = Setting(4, 3, 2, 5, CPU, torch.float32)


def test_a_preset_has_its_sizes():
    sizes = sizes_of_arch("transformer_xl_tiny", 99)
    assert (sizes.model, sizes.symbols, sizes.options["decoder_embed_dim"]) == (
        "transformer_xl",
        99,
        128,
    )
    assert sizes_of_arch("all_attention_lm", 99) == ("all_attention_lm", {}, 99)


def test_a_preset_that_cannot_be_is_refused():
    message = "--arch transformer_lm is none of this package: give one of adaptive_span_lm_"
    with pytest.raises(ValueError, match=re.escape(message)):
        sizes_of_arch("transformer_lm", 99)
    message = "--symbols is 99: --arch transformer_xl_wt103_base has cutoffs 20000,40000,200000;"
    with pytest.raises(ValueError, match=re.escape(message)):
        sizes_of_arch("transformer_xl_wt103_base", 99)


@pytest.mark.parametrize(
    "options",
    [
        {"decoder_layers": 2},
        {
            "adaptive_input": True,
            "adaptive_input_cutoff": "8,14",
            "adaptive_input_factor": 2,
        },
    ],
)
def test_a_checkpoint_has_its_sizes(tmp_path, options):
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl", **options)
    sizes = sizes_of_checkpoint(tmp_path / "xl.pt")
    assert (sizes.model, sizes.symbols) == ("transformer_xl", tiny.VOCABULARY)
    assert sizes.options.items() >= options.items()


def test_absolute_positions_have_no_states_to_reuse():
    check_reuse(XL)
    check_reuse(AA)
    message = "the model has --positions sinusoidal-absolute, which go without a memory"
    with pytest.raises(ValueError, match=message):
        check_reuse(sizes_of_arch("transformer_xl_ptb", 99))


@pytest.mark.parametrize("sizes", [XL, AA])
def test_states_are_reused_over_the_attention_length(sizes):
    model, task = build_state_reuse(sizes, 10, 4)
    assert model.decoder.context.mem_len == 10
    window = model.decoder.layers[0].self_attn.window
    assert window.farthest - window.nearest + 1 == 10
    assert (task.cfg.tokens_per_sample, task.cfg.extended_context) == (4, 0)
    assert len(task.dictionary) == 30
    assert not model.training


@pytest.mark.parametrize(("sizes", "absolute"), [(XL, True), (AA, False)])
def test_the_sliding_window_is_of_the_same_sizes_without_memory(sizes, absolute):
    model, task = build_sliding_window(sizes, 10)
    assert model.decoder.context.mem_len == 0
    assert (model.decoder.absolute_positions is not None) == absolute
    assert len(model.decoder.layers) == 2
    assert model.decoder.embed_tokens.weight.shape == (30, 16)
    assert model.decoder.layers[0].self_attn.window.farthest >= 10
    assert (task.cfg.tokens_per_sample, task.cfg.extended_context) == (1, 9)


def observed(monkeypatch, timing):
    """What was scored: (input shape, tokens, place in the stream) of each batch."""
    seen = []
    score = measure_evaluation_speed.score_batch

    def noted(model, batch):
        losses = score(model, batch)
        cursor = batch["net_input"].get("recurrence")
        shape = tuple(batch["net_input"]["src_tokens"].shape)
        seen.append((shape, len(losses), None if cursor is None else cursor.start))
        assert batch["net_input"]["src_tokens"].ne(1).all()
        return losses

    monkeypatch.setattr(measure_evaluation_speed, "score_batch", noted)
    with tqdm(disable=True) as progress:
        assert timing(XL, 10, SETTING, progress) > 0
    return seen


def test_segments_are_timed_with_a_full_memory(monkeypatch):
    seen = observed(monkeypatch, time_state_reuse)
    # three segments of 4 fill a memory of 10, one more to warm up, two are timed
    assert seen == [((3, 4), 12, start) for start in range(0, 24, 4)]


def test_each_window_is_full_and_predicts_one_token(monkeypatch):
    seen = observed(monkeypatch, time_sliding_window)
    assert seen == [((3, 10), 3, None)] * 6


def test_the_published_ratios_are_those_of_table_9():
    assert PUBLISHED == {3800: 1874, 2800: 1409, 1800: 773, 800: 363}


def words(output, *others):
    return ["--output", str(output), "--cpu", "--segments", "1", "--windows", "1", *others]


def test_the_script_times_a_preset(tmp_path, capsys):
    lengths = ("--attention-lengths", "16,32", "--tokens-per-sample", "16")
    arguments = words(tmp_path, "--arch", "all_attention_lm_tiny", *lengths)
    assert measure_evaluation_speed.main(arguments) == 0
    printed = capsys.readouterr().out
    for said in (
        "model: all_attention_lm_tiny",
        "symbols: 208",
        f"PyTorch {torch.__version__}",
        "dtype: fp32",
        "segment: 16",
        "streams: 1",
        "the sliding window's time for a text is extrapolated",
        "| attention length   |   state reuse, ms/token |   sliding window, ms/token |",
    ):
        assert said in printed
    result = json.loads((tmp_path / "evaluation_speed.json").read_text())
    assert [row["attention_length"] for row in result["rows"]] == [16, 32]
    for row in result["rows"]:
        reuse, window = row["state_reuse_ms_per_token"], row["sliding_window_ms_per_token"]
        assert row["ratio"] == pytest.approx(window / reuse)
        assert row["published_ratio"] is None
    assert (tmp_path / "evaluation_speed.png").stat().st_size > 5000


def test_the_script_times_a_checkpoint_beside_the_published_ratio(tmp_path, capsys):
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl")
    options = ("--checkpoint", str(tmp_path / "xl.pt"), "--dtype", "bf16")
    lengths = ("--attention-lengths", "800", "--tokens-per-sample", "400")
    assert measure_evaluation_speed.main(words(tmp_path / "out", *options, *lengths)) == 0
    printed = capsys.readouterr().out
    assert "dtype: bf16" in printed
    assert re.search(r"\| 800 .*x \| +363x \|", printed)
    assert (tmp_path / "out" / "evaluation_speed.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention-lengths", "0"], "--attention-lengths is '0': give numbers at least 1"),
        (["--tokens-per-sample", "0"], "--tokens-per-sample is 0: it must be at least 1"),
        (["--batch-size", "0"], "--batch-size is 0: it must be at least 1"),
        (["--segments", "0"], "--segments is 0: it must be at least 1"),
        (["--windows", "0"], "--windows is 0: it must be at least 1"),
        (["--symbols", "4"], "--symbols is 4: it must be at least 5"),
        (["--arch", "transformer_xl_ptb"], "the model has --positions sinusoidal-absolute"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(refused, options, message):
    arguments = ["--cpu", "--arch", "transformer_xl_tiny", *options]
    refused(measure_evaluation_speed.main, arguments, message)


def test_ctrl_c_keeps_the_times_so_far(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_evaluation_speed, "measure", interrupted)
    assert measure_evaluation_speed.main(words(tmp_path, "--arch", "transformer_xl_tiny")) == 130
    assert "evaluation_speed.json keeps the times so far" in capsys.readouterr().err
