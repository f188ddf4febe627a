"""What is kept of a text's reads: the same losses as in evaluation, the largest weights."""

import base64
import zlib

import numpy as np
import pytest
import torch

from fairseq_plugins import load
from scripts._shared.layer_reads import Layer, Reads
from scripts.inspect._reads import TextReads, WeightTable, read_pair, read_text
from tests.scripts.evaluate.saved_models import read_split
from tests.scripts.inspect.pages import MODELS, TOKENS, write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def unpack(packed):
    content = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(content, packed["type"])


def shown_tokens(loaded):
    return torch.from_numpy(read_split(loaded)[:TOKENS].astype(np.int64))


@pytest.mark.parametrize("name", [name for name, data in MODELS.items() if data == "text"])
def test_losses_are_those_of_an_evaluation(folder, name):
    loaded = load(folder / f"{name}.pt", folder / "text")
    tokens = shown_tokens(loaded)
    figures = read_text(loaded, tokens, reads=TextReads())
    losses = loaded.score_split("test")[:TOKENS]
    np.testing.assert_allclose(-figures["log_probs"], losses, atol=1e-5)
    # the likeliest symbols are in order, and a token of rank 1 is the first
    assert (np.diff(figures["likely"]) <= 0).all()
    first = figures["rank"] == 1
    np.testing.assert_array_equal(figures["likeliest"][first, 0], tokens.numpy()[first])


def test_losses_without_recurrence_are_those_of_separate_texts(folder):
    loaded = load(folder / "recurrent.pt", folder / "text")
    tokens = shown_tokens(loaded)
    alone = read_text(loaded, tokens, with_past=False)["log_probs"]
    scores = loaded.model(tokens[None, 7:15])[0].log_softmax(-1)[0]
    expected = scores.gather(1, tokens[8:16, None])[:, 0].detach()
    np.testing.assert_allclose(alone[8:16], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["recurrent", "blocks"])
def test_a_window_shows_what_the_whole_text_shows_there(folder, name):
    loaded = load(folder / f"{name}.pt", folder / "text")
    tokens, start = shown_tokens(loaded), 2 * loaded.segment
    whole, window = TextReads(), TextReads()
    expected = read_text(loaded, tokens, reads=whole)["log_probs"][start:]
    figures = read_text(loaded, tokens, reads=window, start=start)
    np.testing.assert_allclose(figures["log_probs"], expected, atol=1e-6)
    assert window.tables.keys() == whole.tables.keys() != set()
    for kind, table in window.tables.items():
        weights = np.concatenate(table.weights)
        shown = np.concatenate(whole.tables[kind].weights)[-len(weights) :]
        np.testing.assert_allclose(weights, shown, atol=1e-6)
        assert sum(map(len, table.counts)) == table.heads * len(expected)


def test_losses_of_a_translation_are_those_of_its_score(folder):
    loaded = load(folder / "pairs.pt", folder / "pairs")
    source, target = torch.tensor([5, 6, 7, 2]), torch.tensor([8, 9, 2])
    figures = read_pair(loaded, source, target, TextReads(True))
    score = loaded.score(loaded.source.decode(source[:-1]), loaded.target.decode(target[:-1]))
    np.testing.assert_allclose(figures["log_probs"], score.log_probs, atol=1e-5)


def test_a_table_keeps_the_largest_weights_and_the_largest_of_each_row():
    table = WeightTable(heads=2)
    weights = torch.tensor(
        [[[0.5, 0.3, 0.2], [0.0, 0.0, 0.0]], [[0.001, 0.0, 0.0], [0.9, 0.1, 0.0]]]
    )
    table.add(torch.tensor([7, 8, 9]), weights)
    unpacked = {name: unpack(table.packed(0.25)[name]) for name in ("counts", "index", "weight")}
    assert unpacked["counts"].tolist() == [2, 0, 1, 1]
    assert unpacked["index"].tolist() == [7, 8, 7, 7]
    np.testing.assert_allclose(unpacked["weight"] / 255, [0.5, 0.3, 1 / 255, 0.9], atol=0.5 / 255)


def test_the_mean_weight_by_distance_is_over_the_queries_that_reach_it():
    reads = TextReads()
    # tokens 2 and 3 of a text of three, of which the first is the past
    weights = torch.tensor([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]])
    reads(Layer("decoder", 1, "self_attn", None), Reads(keys=weights[None, None]))
    distances = reads.packed(2)["distances"]["1"]
    mean = unpack(distances["weight"])
    np.testing.assert_allclose(mean, [(0.75 + 0.5) / 2, (0.25 + 0.3) / 2, 0.2], atol=1e-6)
    assert distances["mean"] == pytest.approx([(0.25 + 0.3 + 2 * 0.2) / 2])
