"""The benchmark of the Weighted Transformer: equal results, right counts, what it reports."""

import json

import pytest
import torch

from fairseq_plugins.weighted_transformer.branched_attention import BranchedFeedForward
from scripts.benchmark import weighted_transformer as benchmark
from scripts.benchmark.weighted_transformer import (
    LOOP,
    MODELS,
    NOWHERE,
    PLAIN,
    READINGS,
    SIZES,
    Size,
    build_matrices,
    build_models,
    draw_batch,
    generation,
    training_step,
)
from tests.scripts.tables import cells

TINY = Size(layers=1, width=16, inner=32, heads=4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes and a vocabulary that take no time."""
    monkeypatch.setitem(SIZES, "small", TINY)
    monkeypatch.setattr(benchmark, "SYMBOLS", 40)


def made(*words):
    words = ["--size", "small", *words]
    kind = benchmark.WeightedTransformerBenchmark
    return kind(kind.parse_options(words))


def test_branch_by_branch_computes_what_merged_branches_do():
    matrices = build_matrices(TINY)
    heads = torch.randn(7, 16)
    expected = matrices[LOOP](heads)
    torch.testing.assert_close(matrices[NOWHERE](heads), expected)
    assert matrices[PLAIN](heads).shape == expected.shape


def test_matrices_are_of_one_size():
    counts = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in build_matrices(TINY).items()
    }
    assert counts[NOWHERE] == counts[LOOP] == counts[PLAIN] + 2 * TINY.heads


def test_whole_models_that_differ_are_not_compared(monkeypatch):
    assert made().largest_difference("small") < 1e-5
    right = benchmark.BranchByBranch.forward
    monkeypatch.setattr(benchmark.BranchByBranch, "forward", lambda *args: 1.01 * right(*args))
    with pytest.raises(ValueError, match=r"^branch by branch's outputs differ by .*attention\.py$"):
        made().largest_difference("small")


def test_the_branch_loop_is_in_every_layer_of_its_model():
    models = build_models(TINY)
    for name, kind in [
        (NOWHERE, BranchedFeedForward),
        (LOOP, benchmark.BranchByBranch),
    ]:
        found = [m for m in models[name].modules() if isinstance(m, BranchedFeedForward)]
        assert [type(module) for module in found] == [kind] * 2
    assert not any(isinstance(m, BranchedFeedForward) for m in models[PLAIN].modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_trains_and_generation_has_the_length_asked_for(name):
    model = build_models(TINY)[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = draw_batch(2, 5)
    training_step(model, batch)()
    changed = [key for key, value in model.state_dict().items() if not value.equal(before[key])]
    assert any("encoder.layers.0" in key for key in changed)
    lengths = []
    generate = benchmark.SequenceGenerator.generate

    class Noted(benchmark.SequenceGenerator):
        def generate(self, *args, **kwargs):
            found = generate(self, *args, **kwargs)
            lengths.extend(len(hypotheses[0]["tokens"]) for hypotheses in found)
            return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(benchmark, "SequenceGenerator", Noted)
        generation(model, batch)()
    # and the end of the sentence
    assert lengths == [6, 6]


def test_multiply_adds_are_those_of_the_matrices():
    given = made("--tokens", "10")

    def count(mode, model):
        return given.multiply_adds(TINY, benchmark.MATRICES, mode, model)

    assert count("inference", PLAIN) == 10 * (16 * 16 + 2 * 16 * 32)
    # four heads of width 4 into inner widths of 8, and 32 into 16
    assert count("inference", NOWHERE) == 10 * (4 * 4 * 8 + 32 * 16)
    # and W^O W_1: four products of (4, 16) and (16, 8)
    assert count("train", NOWHERE) == 3 * (10 * (4 * 4 * 8 + 32 * 16) + 4 * 4 * 16 * 8)
    assert count("train", LOOP) == 0


def test_it_reports_every_part(tmp_path, capsys):
    words = ["--size", "small", "--tokens", "32", "--length", "4", "--steps", "2"]
    output = ["--threads", "1", "--output", str(tmp_path / "out")]
    assert benchmark.main([*words, *output]) == 0
    printed = capsys.readouterr().out
    titles, _, *rows = cells(printed)
    assert titles[:5] == ["size, part", "mode", "setting", "model", "dtype"]
    parts = [
        *(("matrices", mode, (NOWHERE, PLAIN, LOOP)) for mode in ("train", "inference")),
        *(("training", "train", MODELS), ("generation", "generate", MODELS)),
    ]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (f"small, {part}", mode, model) for part, mode, models in parts for model in models
    ]
    assert titles[-2:] == ["times transformer", "times branch by branch"]
    for *_, model, _, _, _, beside_plain, beside_loop in rows:
        assert bool(beside_plain) == (model in READINGS)
        assert bool(beside_loop) == (model == NOWHERE)
    assert "peak memory" not in printed
    assert "small: outputs differ by" in printed
    written = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert len(written["measurements"]) == 18
    assert all(len(row["seconds"]) == 2 for row in written["measurements"])
    assert (tmp_path / "out" / "benchmark.png").exists()
