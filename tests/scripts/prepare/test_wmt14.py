"""prepare.wmt14 on small archives like those of the workshop."""

import gzip
import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest

from scripts.prepare import wmt14
from tests.scripts.prepare.prepared import contents, refused, serve, tarred, write_files

OTHERS = {"en-de": "de", "en-fr": "fr"}
SENTENCES = ("First & last.", "The  second\u00a0one \tends here.", "A third <hl> & 3 > 2.")


def text(name, language):
    return "".join(f"{name} {language} sentence {number} sat.\n" for number in range(4))


def sgm(kind, language):
    document = '<doc sysid="x" docid="d{}" origlang="en">\n<p>\n'
    parts = [f'<{kind}set setid="newstest2014" srclang="any">\n', document.format(1)]
    for number, sentence in enumerate(SENTENCES, 1):
        parts.append(f'<seg id="{number}">{language}: {sentence}</seg>\n')
        if number == 2:
            parts += ["</p>\n</doc>\n", document.format(2)]
    return "".join([*parts, f"</p>\n</doc>\n</{kind}set>\n"])


def text_name(archive):
    """Return the name of an archive's text without its version number."""
    return re.split(r"-v\d|\.", archive.members[0])[0]


def archives(pair):
    """Return the contents of the archives of a pair by name."""
    made, languages = {}, ("en", OTHERS[pair])
    for archive in (*wmt14.TRAIN[pair], *wmt14.TESTS):
        files = {"README": b"other"}
        for side, language in zip(("src", "ref"), languages, strict=True):
            if archive.name == wmt14.NEWSTEST2014.name:
                # sacrebleu finds these files by their full names
                name = f"../test-full/newstest2014-{languages[1]}en-{side}.{language}.sgm"
                data = sgm(side, language).encode()
            else:
                name = archive.members[0].format(other=languages[1], language=language)
                data = text(text_name(archive), language).encode()
            files[name] = gzip.compress(data) if name.endswith(".gz") else data
        made[archive.name] = tarred(files, "w:gz" if archive.name.endswith("gz") else "w")
    return made


@pytest.fixture
def prepare(call, tmp_path):
    words = ("--output", tmp_path / "out", "--bpe-size", 30, "--workers", 1, "--pair")
    return lambda *options, pair="en-de": call(wmt14.main, *words, pair, *options)


@pytest.fixture
def archive_folder(monkeypatch, tmp_path):
    """Make a folder for --from with the archives of a pair, which the command then expects."""

    def make(pair="en-de"):
        made = archives(pair)

        def small(archive):
            digest = hashlib.sha256(made[archive.name]).hexdigest()
            known = f"sha256:{digest}" if archive.checksum else None
            return replace(archive, checksum=known, address=f"localhost:1/{archive.name}")

        train = tuple(map(small, wmt14.TRAIN[pair]))
        monkeypatch.setattr(wmt14, "TRAIN", {pair: train})
        monkeypatch.setattr(wmt14, "TESTS", tuple(map(small, wmt14.TESTS)))
        write_files(tmp_path / "archives", made)
        return tmp_path / "archives"

    return make


@pytest.mark.parametrize("pair", OTHERS)
def test_texts_of_the_pair_are_prepared(prepare, archive_folder, tmp_path, pair):
    status, _, error = prepare("--from", archive_folder(pair), pair=pair)
    assert (status, error) == (0, "")
    out = tmp_path / "out"
    names = ["europarl", "commoncrawl", "news-commentary"]
    if pair == "en-fr":
        names = ["europarl", "commoncrawl", "undoc", "news-commentary", "giga-fren"]
    for language in pair.split("-"):
        expected = "".join(text(name, language) for name in names)
        words = (out / "tokens" / f"train.{language}").read_text()
        # the hyphen of a name is a token of its own
        assert words.replace(" @-@ ", "-").replace(" .", ".") == expected
        references = out / "references"
        assert (references / f"test1.{language}").read_text() == text("newstest2013", language)
        assert (references / f"test.{language}").read_text() == "".join(
            f"{language}: {' '.join(sentence.split())}\n" for sentence in SENTENCES
        )
    description = json.loads((out / "preparation.json").read_text())
    parts = {part: sizes["pairs"] for part, sizes in description["parts"].items()}
    assert parts == {"train": 4 * len(names), "valid": 4, "test": 3, "test1": 4}
    assert (out / "bin" / f"test1.{pair}.en.idx").exists()


def test_archives_are_downloaded_again_only_where_one_failed_and_then_removed(
    prepare, archive_folder, tmp_path
):
    folder, out = archive_folder(), tmp_path / "out"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    second = "training-parallel-commoncrawl.tgz"
    with serve({**files, second: b""}) as (url, _):
        assert refused(prepare("--mirror", url), f"{second} cannot be downloaded: ")
    assert list(contents(out)) == ["download/training-parallel-europarl-v7.tgz"]
    with serve(files) as (url, asked):
        assert prepare("--mirror", url)[0] == 0
    assert sorted(asked) == sorted(set(files) - {"training-parallel-europarl-v7.tgz"})
    assert not (out / "download").exists()
    words = (out / "tokens" / "train.en").read_text().replace(" @-@ ", "-").replace(" .", ".")
    names = ("europarl", "commoncrawl", "news-commentary")
    assert words == "".join(text(name, "en") for name in names)
    # without any mirror or archive
    shutil.rmtree(folder)
    status, printed, _ = prepare()
    assert (status, printed.count("at work")) == (0, 0)


def test_a_damaged_archive_is_refused(prepare, archive_folder, tmp_path):
    folder = archive_folder("en-fr")
    # this archive has no known checksum
    path = folder / "training-parallel-un.tgz"
    path.write_bytes(path.read_bytes()[:-60])
    result = prepare("--from", folder, pair="en-fr")
    assert refused(result, path, "is a truncated or damaged archive")
    assert not (tmp_path / "out").exists()
