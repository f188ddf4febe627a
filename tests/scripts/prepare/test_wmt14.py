"""WMT14, from small archives like those of the workshop."""

import gzip
import hashlib
import json

import pytest

from tests.scripts.prepare.prepared import tarred, write_files

SENTENCES = ("First & last.", "The  second\u00a0one \tends here.", "A third <hl> & 3 > 2.")


def text(name, language):
    return "".join(f"{name} {language} sentence {number} sat.\n" for number in range(4))


def sgm(kind, language):
    lines = [f'<{kind}set setid="newstest2014" srclang="any">']
    for document, sentences in enumerate((SENTENCES[:2], SENTENCES[2:]), 1):
        lines += [f'<doc sysid="x" docid="d{document}" origlang="en">', "<p>"]
        lines += [f'<seg id="1">{language}: {sentence}</seg>' for sentence in sentences]
        lines += ["</p>", "</doc>"]
    return "\n".join([*lines, f"</{kind}set>\n"])


@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
def test_the_texts_of_a_pair_are_prepared(prepare, corpora, tmp_path, pair):
    out, languages, names = tmp_path / "out", pair.split("-"), []
    for source in corpora["wmt14"]["get"]:
        (member,), archive = source["members"], source["address"].rpartition("/")[2]
        name, files = member.split(".")[0].split("-v")[0], {"README": b"other"}
        for side, language in zip(("src", "ref"), languages, strict=True):
            file, data = member.format(other=languages[1], language=language), text(name, language)
            if "sacrebleu" in source:
                # sacrebleu finds these files by their full names
                file = f"../test-full/newstest2014-{languages[1]}en-{side}.{language}.sgm"
                data = sgm(side, language)
            data = data.encode()
            files[file] = gzip.compress(data) if file.endswith(".gz") else data
        content = tarred(files, "w:gz" if archive.endswith("gz") else "w")
        if "sum" in source:
            source["sum"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if source.get("pair", pair) == pair:
            write_files(tmp_path / "archives", {archive: content})
            names += [name] if "train" in source["members"].values() else []
    words = ("--bpe-size", 30, "--workers", 1, "--pair", pair, "--from", tmp_path / "archives")
    status, _, error = prepare("wmt14", *words)
    assert (status, error) == (0, "")
    assert len(names) == (3 if pair == "en-de" else 5)
    for language in languages:
        expected = "".join(text(name, language) for name in names)
        tokens = (out / "tokens" / f"train.{language}").read_text()
        # the hyphen of a name is a token of its own
        assert tokens.replace(" @-@ ", "-").replace(" .", ".") == expected
        references = out / "references"
        assert (references / f"test1.{language}").read_text() == text("newstest2013", language)
        assert (references / f"test.{language}").read_text() == "".join(
            f"{language}: {' '.join(sentence.split())}\n" for sentence in SENTENCES
        )
    description = json.loads((out / "preparation.json").read_text())
    parts = {part: sizes["pairs"] for part, sizes in description["parts"].items()}
    assert parts == {"train": 4 * len(names), "valid": 4, "test": 3, "test1": 4}
    assert (out / "bin" / f"test1.{pair}.en.idx").exists()
