"""What cannot be measured over a whole split is refused by name, and nothing is left out."""

import re

import pytest
import torch

from scripts.evaluate import _split_loss as score_split
from scripts.evaluate._split_loss import Reading, load_model, load_split
from scripts.evaluate.memory_usage import MemoryReads
from tests.scripts.evaluate import saved_models
from tests.scripts.evaluate.saved_memory_models import (
    SOURCES,
    TARGETS,
    TOKENS,
    measure,
    write_blocks,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("checkpoint", "data", "options", "message"),
    [
        ("missing", "text", (), r"--checkpoint .*missing.pt is no file: name one that fairseq-"),
        (
            "none",
            "text",
            (),
            r"--checkpoint .*none.pt holds a model without product-key memories: name one that was "
            r"trained with --memory-layers\n",
        ),
        ("blocks", "nowhere", (), r"--data .*nowhere is no folder: name the one that fairseq-pre"),
        (
            "blocks",
            "pairs",
            (),
            r"--data .*pairs has no dict.txt, which the model of --checkpoint .*blocks.pt needs: "
            "name the folder that it was trained on",
        ),
        (
            "pairs",
            "text",
            (),
            r"--data .*text has no pairs of sentences, which the model of --checkpoint "
            r".*pairs.pt translates: name the folder that it was trained on",
        ),
        ("blocks", "text", ("--split", "dev"), "--split dev: no data at .*dev.bin: name the fold"),
        ("streams", "text", ("--split", "dev"), "--split dev: no data at .*dev.bin: name the fol"),
        ("pairs", "pairs", ("--split", "dev"), r"--split dev: no data at .*dev.lower-upper.upper"),
        ("blocks", "text", ("--batch-size", 0), "--batch-size is 0: it must be at least 1"),
        (
            "blocks",
            "text",
            ("--tokens-per-sample", 17),
            "--tokens-per-sample is 17: the model was trained with positions for 16 tokens; give",
        ),
        (
            "blocks",
            "text",
            ("--context-window", 10),
            "--context-window is 10: it must be at least 0 and less than --tokens-per-sample, here "
            "10, of which it is a part",
        ),
        ("blocks", "text", ("--context-window", -1), "--context-window is -1: it must be at leas"),
        (
            "streams",
            "text",
            ("--context-window", 2),
            "--context-window is 2: the recurrence is ",
        ),
        (
            "pairs",
            "pairs",
            ("--tokens-per-sample", 5),
            "--tokens-per-sample is 5 for a translation model, which reads sentence by sentence: "
            "leave it out",
        ),
    ],
)
def test_what_cannot_be_is_refused(saved, tmp_path, capsys, checkpoint, data, options, message):
    status, found = measure(saved, checkpoint, data, tmp_path / "out", *options)
    assert status == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)
    assert found is None


def test_other_tasks_are_refused(tmp_path, capsys):
    torch.save({"cfg": {"task": {"_name": "masked_lm"}}, "model": {}}, tmp_path / "other.pt")
    (tmp_path / "text").mkdir()
    for name, content in (("'masked_lm'", None), ("None", {"cfg": None}), ("None", [1])):
        if content is not None:
            torch.save(content, tmp_path / "other.pt")
        assert measure(tmp_path, "other", "text", tmp_path / "out")[0] == 1
        message = f"other.pt holds a model of the task {name}: name one of language_modeling, segm"
        assert message in capsys.readouterr().err


def test_a_checkpoint_cannot_run_anything(tmp_path, capsys):
    torch.save({"model": saved_models.Mischief(tmp_path / "made")}, tmp_path / "bad.pt")
    (tmp_path / "text").mkdir()
    assert measure(tmp_path, "bad", "text", tmp_path / "out")[0] == 1
    assert "bad.pt holds more than weights and options, and is not" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_another_dictionary_is_refused(saved, tmp_path):
    saved_models.write_text(tmp_path / "text")
    with (tmp_path / "text" / "dict.txt").open("a") as dictionary:
        dictionary.write("word 1\n")
    message = r"blocks.pt does not fit --data .*text \(size mismatch for .*use the data that the"
    with pytest.raises(ValueError, match=message):
        load_model(saved / "blocks.pt", tmp_path / "text", CPU)


def test_a_batch_that_is_left_out_is_noticed(saved, tmp_path, monkeypatch, capsys):
    batches = score_split._batches
    monkeypatch.setattr(score_split, "_batches", lambda *args: list(batches(*args))[:-1])
    options = ("--tokens-per-sample", 10, "--batch-size", 4)
    assert measure(saved, "blocks", "text", tmp_path / "out", *options)[0] == 1
    message = r"error: (\d+) tokens were scored of the 97 of --split test, so the figures would be"
    found = re.match(message, capsys.readouterr().err)
    assert 0 < int(found[1]) < TOKENS


def test_sentences_that_are_too_long_are_noticed(saved, monkeypatch, tmp_path, capsys):
    def short_positions(model):
        return 8, 8

    monkeypatch.setattr("fairseq.models.transformer.TransformerModel.max_positions",
                        short_positions)  # fmt: skip
    assert measure(saved, "pairs", "pairs", tmp_path / "out")[0] == 1
    message = f"error: {TARGETS - 3} tokens were scored of the {TARGETS} of --split test"
    assert message in capsys.readouterr().err


def test_reads_that_are_missing_are_noticed(saved, tmp_path, monkeypatch, capsys):
    whole = MemoryReads.record

    def some(reads, slots, weights):
        # the encoder's, all of whose reads count
        kept = slice(None, None, 2 if reads.counted is None else 1)
        whole(reads, slots[kept], weights[kept])

    monkeypatch.setattr(MemoryReads, "record", some)
    assert measure(saved, "pairs", "pairs", tmp_path / "out")[0] == 1
    message = r"encoder_memory2 of --checkpoint .*pairs.pt read for \d+ tokens of the 31 of --split"
    assert re.search(message, capsys.readouterr().err)


def test_a_diverged_model_is_noticed(saved, tmp_path, capsys):
    def diverge(model):
        # finite, but not its square
        model.decoder.layers[2].fc2.bias.data[0] = 3e38

    write_blocks(tmp_path / "blocks.pt", diverge)
    (tmp_path / "text").symlink_to(saved / "text")
    assert measure(tmp_path, "blocks", "text", tmp_path / "out")[0] == 1
    assert "error: the loss of a token is not finite" in capsys.readouterr().err


def test_the_split_is_counted_in_the_file(saved):
    model, task = load_model(saved / "pairs.pt", saved / "pairs", CPU)
    assert load_split(task, model, Reading(saved / "pairs", "test")) == (TARGETS, SOURCES)
