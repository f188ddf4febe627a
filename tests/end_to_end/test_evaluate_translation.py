"""A small model is trained to name numbers, translates with fairseq-generate, and is scored."""

import json
import re

import pytest
import sacrebleu

from scripts.evaluate import translation as evaluate_translation
from scripts.prepare import number_names
from tests.end_to_end.commands import ALL, USER_DIR, run

TESTED = 29
SMALL = (
    *("--arch", "transformer", "--encoder-layers", 1, "--decoder-layers", 1, "--dropout", 0),
    *("--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64, "--encoder-attention-heads", 2),
    *("--decoder-attention-heads", 2, "--share-all-embeddings"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Prepared texts in the folder out, and a checkpoint of fairseq's transformer."""
    folder = tmp_path_factory.mktemp("numbers")
    parts = {
        "one": ("train", 200),
        "two": ("train", 30),
        "dev": ("valid", 20),
        "new": ("test", TESTED),
    }
    for name, (part, count) in parts.items():
        pairs = list(number_names.sentences(part, count, seed=1))
        for side, language in enumerate(number_names.LANGUAGES):
            text = "".join(f"{pair[side]}.\n" for pair in pairs)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    run(
        "scripts.prepare.translation",
        *("--source-lang", "en", "--target-lang", "de", "--output", folder / "out"),
        *("--train", folder / "one", folder / "two", "--valid", folder / "dev"),
        *("--test", folder / "new", folder / "dev", "--bpe-size", 300, "--max-length", 250),
        *("--workers", 1),
    )
    run(
        "fairseq-train",
        folder / "out" / "bin",
        *(*USER_DIR, *SMALL, "--optimizer", "adam", "--lr", 0.005, "--max-tokens", 1000, *ALL),
        *("--max-update", 100, "--disable-validation", "--no-epoch-checkpoints"),
        *("--save-dir", folder, "--log-format", "simple"),
    )
    return folder


def evaluate(place, *words):
    given = [place / "out" / "bin", "--path", place / "checkpoint_last.pt", "--source-lang", "en"]
    given += ["--target-lang", "de", "--output", place / "scores", *words]
    return evaluate_translation.main(list(map(str, given)))


def test_a_whole_part_is_translated_and_scored(place, capfd):
    assert evaluate(place, "--examples", 1, "--", "--num-workers", 0) == 0
    printed = capfd.readouterr().out
    lines = (place / "scores" / "translation.txt").read_text(encoding="utf-8").split("\n")[:-1]
    references = (place / "new.de").read_text(encoding="utf-8").split("\n")[:-1]
    found = json.loads((place / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert len(lines) == found["sentences"] == TESTED
    bleu = sacrebleu.corpus_bleu(lines, [references]).score
    assert found["detokenized"]["score"] == pytest.approx(bleu)
    # another order would be seen
    assert len(set(lines)) > 2
    assert not any("@@" in line or " ." in line for line in lines)
    assert f"translation: {lines[0]}\nreference:   {references[0]}\n" in printed
    # what fairseq-generate itself says of each place
    told = run("fairseq-generate", *found["command"].split()[1:])
    of_place = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", told, re.MULTILINE))
    assert lines == evaluate_translation.detokenize([of_place[str(n)] for n in range(TESTED)], "de")
