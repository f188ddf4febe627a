"""Checkpoints and dictionaries are found, nothing in them runs, and misfits are reported."""

import copy
import pickle
import shutil

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_plugins import load
from tests.end_to_end.commands import ROOT
from tests.scripts.evaluate.saved_models import UnsafePickle

TEXT = "abcab\nponm"


@pytest.fixture
def folder(saved, tmp_path):
    """Return a folder with a training's checkpoint and its dictionary."""
    shutil.copy(saved / "recurrent.pt", tmp_path / "checkpoint_last.pt")
    for name in ("dict.txt", "units.json"):
        shutil.copy(saved / "text" / name, tmp_path)
    return tmp_path


def changed(path, change):
    """Change the contents of a checkpoint."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def test_a_folder_stands_for_its_best_checkpoint(saved, folder):
    shutil.copy(saved / "forgetful.pt", folder / "checkpoint_best.pt")
    for path, mem_len in ((folder, 0), (str(folder / "checkpoint_last.pt"), 5)):
        assert load(path, saved / "text").model.decoder.network.mem_len == mem_len


def test_nothing_in_a_file_is_executed(folder):
    torch.save({"model": UnsafePickle(folder / "made")}, folder / "checkpoint_best.pt")
    with pytest.raises(ValueError, match=r"checkpoint_best.pt .*Weights only load failed"):
        load(folder)
    assert not (folder / "made").exists()


def test_the_dictionary_is_beside_the_file_or_where_the_model_was_trained_or_given(saved, folder):
    expected = load(folder).score(TEXT).log_probs
    (folder / "dict.txt").unlink()
    with pytest.raises(ValueError, match=f"dict.txt, not in {folder} or where it .*: give data"):
        load(folder)
    given = load(folder, saved / "text")
    np.testing.assert_array_equal(given.score(TEXT).log_probs, expected)
    last = folder / "checkpoint_last.pt"
    # of several folders of data, the first counts
    changed(last, lambda state: state["cfg"]["task"].update(data=f"{saved}/text:{saved}/more"))
    np.testing.assert_array_equal(load(folder).score(TEXT).log_probs, expected)
    with pytest.raises(ValueError, match=f"dict.txt, not in {saved}: give data"):
        load(folder, saved)


@pytest.mark.parametrize(
    ("kind", "side", "name"),
    [
        ("recurrent", "source", "dict"),
        ("blocks", "source", "dict"),
        ("pairs", "source", "dict.lower"),
        ("pairs", "target", "dict.upper"),
    ],
)
def test_another_dictionary_of_the_same_size_is_refused(saved, tmp_path, kind, side, name):
    """Models of fairseq's tasks fit it, but would give meaningless results."""
    data = tmp_path / "data"
    shutil.copytree(saved / ("pairs" if kind == "pairs" else "text"), data)
    shutil.copy(saved / f"{kind}.pt", tmp_path / "checkpoint_last.pt")
    load(tmp_path, data)
    symbols = (data / f"{name}.txt").read_text().splitlines()
    (data / f"{name}.txt").write_text("\n".join(symbols[::-1]) + "\n")
    with pytest.raises(ValueError, match=f"trained with another dictionary than the {side}"):
        load(tmp_path, data)


def test_a_dictionary_of_another_size_and_other_tasks_are_refused(saved, folder):
    shutil.copy(saved / "blocks.pt", folder / "checkpoint_last.pt")
    smaller = Dictionary()
    smaller.add_symbol("a")
    smaller.save(str(folder / "dict.txt"))
    with pytest.raises(ValueError, match=r"last.pt with .* trained with another dictionary"):
        load(folder)
    other = {"_name": "masked_lm"}
    changed(folder / "checkpoint_last.pt", lambda state: state["cfg"]["task"].update(other))
    with pytest.raises(ValueError, match="task 'masked_lm': name one of language_modeling"):
        load(folder)


def test_the_steps_of_a_text_are_those_of_the_training(folder, tmp_path):
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\na b\n", encoding="utf-8")
    steps = {
        "bpe": {"_name": "subword_nmt", "bpe_codes": str(codes), "bpe_separator": "+"},
        "tokenizer": {"_name": "moses", "source_lang": "de", "moses_no_dash_splits": True},
    }
    changed(folder / "checkpoint_last.pt", lambda state: state["cfg"].update(steps))
    lines = load(folder).text.lines
    assert lines.encode("abc-d") == "ab+ c+ -+ d".split()
    assert lines.tokenizer.cfg.source_lang == "de"
    assert load(folder, bpe_separator="@@").text.lines.encode("abc")[0].endswith("@@")


def test_steps_and_units_are_those_beside_the_dictionary(folder):
    """Preparation writes them there; arguments take precedence."""
    (folder / "bpe").mkdir()
    (folder / "bpe" / "codes").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (folder / "units.json").write_text(
        '{"unit": "subwords", "bpe": "subword_nmt", "model": "bpe/codes", "tokenizer": "moses", '
        '"language": "de", "moses_no_dash_splits": true}'
    )
    model = load(folder)
    assert model.text.lines.encode("abc, d") == "ab@@ c , d".split()
    assert model.text.lines.encode("d-d") == "d@@ -@@ d".split()
    assert model.text.lines.tokenizer.cfg.source_lang == "de"
    assert model.unit == "perplexity"
    model = load(folder, unit="characters")
    assert str(model.score("abc")).endswith("bits per character, 3 tokens")
    (folder / "units.json").unlink()
    assert load(folder).score("a b\n").tokens == ["a", "b", "</s>"]
    with pytest.raises(ValueError, match=r"lacks \('ab'\): .* load\(…, unit=\"characters\"\)"):
        load(folder).score("ab")


@pytest.mark.parametrize("kind", ["recurrent", "spans", "streams", "absolute", "blocks", "pairs"])
def test_models_and_streams_can_be_copied_and_pickled(saved, tmp_path, kind):
    pairs = kind == "pairs"
    model = load(saved / f"{kind}.pt", saved / ("pairs" if pairs else "text"))
    model.score_split()

    def figures(model):
        score = model.score(*(["a b", "c d"] if pairs else [TEXT]))
        made = model.translate("a b", max_len_b=5) if pairs else model.generate("a", 5)
        return score.log_probs.tolist(), made, model.score_split().tolist()

    expected = figures(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert figures(other) == expected
        assert other.model is not model.model
    assert figures(model) == expected
    if not pairs:
        stream = model.stream()
        stream.score(TEXT)
        others = copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))
        expected = stream.score(TEXT).log_probs.tolist()
        for other in others:
            assert other.score(TEXT).log_probs.tolist() == expected
            assert len(other) == len(stream)


def test_torch_hub_loads_it(folder):
    model = torch.hub.load(str(ROOT), "load", str(folder), source="local")
    np.testing.assert_array_equal(model.score(TEXT).log_probs, load(folder).score(TEXT).log_probs)


def test_the_hub_offers_no_other_models_as_ours():
    """Two of our models would inherit entries."""
    ours = {
        model
        for model in ARCH_MODEL_REGISTRY.values()
        if model.__module__.startswith("fairseq_plugins")
    }
    assert [model.hub_models() for model in ours] == 5 * [{}]
