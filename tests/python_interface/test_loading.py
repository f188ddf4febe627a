"""Checkpoints and dictionaries are found, and misfits are reported."""

import copy
import io
import shutil

import numpy as np
import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.modules import ProductKeyMemory
from tests.end_to_end.commands import ROOT
from tests.product_key_memory.tiny import memories

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


def test_load_takes_the_best_checkpoint_in_a_folder(saved, folder):
    shutil.copy(saved / "forgetful.pt", folder / "checkpoint_best.pt")
    for path, mem_len in ((folder, 0), (str(folder / "checkpoint_last.pt"), 5)):
        assert load(path, saved / "text").model.decoder.network.mem_len == mem_len


def test_load_finds_the_dictionary(saved, folder):
    expected = load(folder).score(TEXT).log_probs
    (folder / "dict.txt").unlink()
    with pytest.raises(ValueError, match=f"dict.txt, not in {folder} or where it .*: give data"):
        load(folder)
    loaded = load(folder, saved / "text")
    np.testing.assert_array_equal(loaded.score(TEXT).log_probs, expected)
    last = folder / "checkpoint_last.pt"
    # of several folders of data, the first counts
    changed(last, lambda state: state["cfg"]["task"].update(data=f"{saved}/text:{saved}/more"))
    np.testing.assert_array_equal(load(folder).score(TEXT).log_probs, expected)
    with pytest.raises(ValueError, match=f"dict.txt, not in {saved}: give data"):
        load(folder, saved)


def test_load_refuses_other_tasks(folder):
    other = {"_name": "masked_lm"}
    changed(folder / "checkpoint_last.pt", lambda state: state["cfg"]["task"].update(other))
    with pytest.raises(ValueError, match="task 'masked_lm': name one of language_modeling"):
        load(folder)


def test_load_takes_the_steps_of_text_from_the_training(folder, tmp_path):
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\na b\n", encoding="utf-8")
    steps = {
        "bpe": {"_name": "subword_nmt", "bpe_codes": str(codes), "bpe_separator": "+"},
        "tokenizer": {"_name": "moses", "source_lang": "de", "moses_no_dash_splits": True},
    }
    changed(folder / "checkpoint_last.pt", lambda state: state["cfg"].update(steps))
    lines = load(folder).text.lines
    assert lines.encode("abc-d") == "ab+ c+ -+ d".split()
    assert lines.words("bzw. A") == "bzw. A"  # an abbreviation in German
    assert load(folder, bpe_separator="@@").text.lines.encode("abc")[0].endswith("@@")


def test_load_takes_steps_and_units_from_beside_the_dictionary(folder, caplog):
    """Preparation writes them there; arguments take precedence, with a warning."""
    (folder / "bpe").mkdir()
    (folder / "bpe" / "codes").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (folder / "units.json").write_text(
        '{"unit": "subwords", "bpe": "subword_nmt", "model": "bpe/codes", "tokenizer": "moses", '
        '"language": "de", "moses_no_dash_splits": true, "later": 1}'
    )
    model = load(folder)
    assert model.text.lines.encode("abc, d") == "ab@@ c , d".split()
    assert model.text.lines.encode("d-d") == "d@@ -@@ d".split()
    assert model.text.lines.words("bzw. A") == "bzw. A"
    assert model.unit == "perplexity"

    def warnings():
        records = [record for record in caplog.records if record.levelname == "WARNING"]
        return [record.getMessage().partition(",")[0] for record in records]

    load(folder, tokenizer="moses", bpe="fastbpe", bpe_codes=str(folder / "bpe" / "codes"))
    assert not warnings()
    with pytest.raises(ValueError, match="unit is 'charcters'"):
        load(folder, unit="charcters")
    load(folder, unit="characters", tokenizer="space")
    assert warnings() == ["unit is 'characters'", "tokenizer is 'space'"]
    assert str(load(folder, unit="characters").score("abc")).endswith(
        "bits per character, 3 tokens"
    )
    (folder / "units.json").unlink()
    assert load(folder).score("a b\n").tokens == ["a", "b", "</s>"]
    with pytest.raises(ValueError, match=r"lacks \('ab'\): .* load\(…, unit=\"characters\"\)"):
        load(folder).score("ab")


@pytest.mark.parametrize("kind", ["spans", "blocks", "pairs"])
def test_a_copied_model_computes_the_same(saved, kind):
    pairs = kind == "pairs"
    model = load(saved / f"{kind}.pt", saved / ("pairs" if pairs else "text"))
    model.score_split()

    def figures(model):
        score = model.score(*(["a b", "c d"] if pairs else [TEXT]))
        made = model.translate("a b", max_len_b=5) if pairs else model.generate("a", 5)
        return score.log_probs.tolist(), made, model.score_split().tolist()

    expected = figures(model)
    other = copy.deepcopy(model)
    assert figures(other) == expected
    assert other.model is not model.model
    assert figures(model) == expected


@pytest.fixture(params=["streams", "blocks", "pairs"])
def loaded(saved, tmp_path, request):
    """Return a loaded model of each kind with memories, saved as adam_with_memory trains it."""
    file = shutil.copy(saved / f"{request.param}.pt", tmp_path)
    trained = {"memory_optimizer": "adam_with_memory"}
    changed(file, lambda state: state["cfg"]["model"].update(trained))
    return load(file, saved / ("pairs" if request.param == "pairs" else "text")).model.train()


def saved_copy(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def learn(memory, sparse):
    """Train a memory as docs/layers.md does; return its weights."""
    values = memory.values.weight
    others = [parameter for parameter in memory.parameters() if parameter is not values]
    optimizers = [torch.optim.Adam([values, *others], 0.01)]
    if sparse:
        memory.values.sparse = True
        optimizers = [torch.optim.Adam(others, 0.01), torch.optim.SparseAdam([values], 0.01)]
    torch.manual_seed(1)
    for _ in range(3):
        memory(torch.randn(7, 16)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(memory.state_dict())


@pytest.mark.parametrize("sparse", [False, True])
def test_a_loaded_memory_learns_as_one_built_by_hand(loaded, sparse):
    (memory, *_), (copied, *_) = (memories(model) for model in (loaded, copy.deepcopy(loaded)))
    by_hand = ProductKeyMemory(16, slots=49, heads=2, knn=3, query_dim=8, sparse=sparse)
    by_hand.load_state_dict(memory.state_dict())
    before = copy.deepcopy(memory.values.weight)
    for each in (saved_copy(memory), copied, memory):
        expected = learn(copy.deepcopy(by_hand), sparse)
        assert not torch.equal(expected["values.weight"], before)
        torch.testing.assert_close(learn(each, sparse), expected, rtol=0, atol=0)


def test_torch_hub_loads_a_model(folder):
    model = torch.hub.load(str(ROOT), "load", str(folder), source="local")
    np.testing.assert_array_equal(model.score(TEXT).log_probs, load(folder).score(TEXT).log_probs)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("missing", {}, "there is no .*missing.pt"),
        ("recurrent", {"decoder_layers": 3}, "decoder_layers is 3: no option of"),
        ("recurrent", {"extended_context": 4}, "extended_context is 4.* mem_len=0"),
        ("absolute", {"mem_len": 5}, ".*absolute.pt with the dictionary in .*--mem-len"),
        ("bos", {}, "the model was trained with --add-bos-token"),
        ("blocks", {"extended_context": 7}, "tokens_per_sample is 10.* extended_context 7"),
        ("pairs", {"tokens_per_sample": 4}, "tokens_per_sample is 4: no option .*: leave it out"),
        ("pairs", {"source_lang": "lower", "target_lang": "other"}, ".*dict.other.txt"),
    ],
)
def test_load_refuses_impossible_options(saved, kind, options, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        load(saved / f"{kind}.pt", saved / ("pairs" if kind == "pairs" else "text"), **options)


def test_load_refuses_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path} has no checkpoint_best.pt, "):
        load(tmp_path)
