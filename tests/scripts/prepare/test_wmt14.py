import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import re
import shutil
import signal
import sys
import tarfile
from types import SimpleNamespace

import pytest

from scripts.prepare import _binarize
from scripts.prepare import wmt14 as prepare_wmt14
from scripts.prepare._sources import Checksum
from tests.scripts.prepare.file_server import serve
from tests.scripts.prepare.preprocess_in_process import in_this_process

TRAIN = prepare_wmt14.TRAIN
OTHERS = {"en-de": "de", "en-fr": "fr"}
NAMES = {
    "europarl": "training/europarl-v7.{other}-en.{language}",
    "commoncrawl": "commoncrawl.{other}-en.{language}",
    "news-commentary": "training/news-commentary-v9.{other}-en.{language}",
    "un": "un/undoc.2000.{other}-en.{language}",
    "giga-fren": "giga-fren.release2.fixed.{language}.gz",
    "newstest2013": "dev/newstest2013.{language}",
}
SENTENCES = ("First & last.", "The  second\u00a0one \tends here.", "A third <hl> & 3 > 2.")


def text(name, language, count=4):
    return "".join(f"{name} {language} sentence {number} sat.\n" for number in range(count))


def sgm(kind, language, drop=None):
    document = '<doc sysid="x" docid="d{}" origlang="en">\n<p>\n'
    parts = [f'<{kind}set setid="newstest2014" srclang="any">\n', document.format(1)]
    for number, sentence in enumerate(SENTENCES, 1):
        if number != drop:
            parts.append(f'<seg id="{number}">{language}: {sentence}</seg>\n')
        if number == 2:
            parts += ["</p>\n</doc>\n", document.format(2)]
    return "".join([*parts, f"</p>\n</doc>\n</{kind}set>\n"])


def archive(files, packed):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz" if packed else "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def archives(pair, **changes):
    """Contents of the archives by name; changes replace a corpus's files by language."""
    made = {}
    languages = ("en", OTHERS[pair])
    for corpus in (*TRAIN[pair], prepare_wmt14.VALID, prepare_wmt14.NEWSTEST2014):
        files = {"README": b"other"}
        for side, language in zip(("src", "ref"), languages, strict=True):
            if corpus.name == "newstest2014":
                name = f"test-full/newstest2014-{languages[1]}en-{side}.{language}.sgm"
                data = sgm(side, language).encode()
            else:
                name = NAMES[corpus.name].format(other=languages[1], language=language)
                data = text(corpus.name, language).encode()
            data = changes.get(corpus.name, {}).get(language, data)
            if data is not None:
                files[name] = gzip.compress(data) if name.endswith(".gz") else data
        made[corpus.archive] = archive(files, corpus.archive.endswith("gz"))
    return made


def use(monkeypatch, made):
    """Let the script expect these archives, and nothing in the network."""

    def small(corpus):
        digest = hashlib.sha256(made[corpus.archive]).hexdigest()
        known = Checksum("sha256", digest) if corpus.checksum else None
        return dataclasses.replace(corpus, checksum=known, hosts=())

    train = {
        pair: tuple(small(corpus) for corpus in corpora if corpus.archive in made)
        for pair, corpora in TRAIN.items()
    }
    monkeypatch.setattr(prepare_wmt14, "TRAIN", train)
    monkeypatch.setattr(prepare_wmt14, "DISK_BYTES", dict.fromkeys(TRAIN, 1000))
    monkeypatch.setattr(prepare_wmt14, "VALID", small(prepare_wmt14.NEWSTEST2013))
    tests = tuple(map(small, (prepare_wmt14.NEWSTEST2014, prepare_wmt14.NEWSTEST2013)))
    monkeypatch.setattr(prepare_wmt14, "TESTS", tests)


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.setattr(_binarize, "child_process", in_this_process)

    def run(*options, pair="en-de", output="out"):
        words = ["prepare_wmt14.py", "--pair", pair, "--output", tmp_path / output]
        words += ["--bpe-size", "30", "--workers", "1", *options]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        streams = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            status = prepare_wmt14.main()
        return status, *(stream.getvalue() for stream in streams)

    return run


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Folder for --from with the archives of a pair."""

    def make(pair="en-de", **changes):
        made = archives(pair, **changes)
        use(monkeypatch, made)
        folder = tmp_path / "given"
        folder.mkdir(exist_ok=True)
        for name, content in made.items():
            (folder / name).write_bytes(content)
        return folder

    return make


def refused(result, message):
    status, _, error = result
    return status == 1 and re.match(f"error: {message}", error) and error.count("\n") == 1


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("steps.json", "preprocess.log")
    }


@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
def test_texts_of_the_pair_are_prepared(call, given, tmp_path, pair):
    status, _, error = call("--from", given(pair), pair=pair)
    assert (status, error) == (0, "")
    out = tmp_path / "out"
    names = ["europarl", "commoncrawl", "un", "news-commentary", "giga-fren"]
    if pair == "en-de":
        names = [name for name in names if name not in ("un", "giga-fren")]
    for language in pair.split("-"):
        expected = "".join(text(name, language) for name in names)
        found = (out / "tokens" / f"train.{language}").read_text()
        # the hyphen of a name is a token of its own
        assert found.replace(" @-@ ", "-").replace(" .", ".") == expected
        references = out / "references"
        assert (references / f"test1.{language}").read_text() == text("newstest2013", language)
        assert (references / f"test.{language}").read_text() == "".join(
            f"{language}: {' '.join(sentence.split())}\n" for sentence in SENTENCES
        )
    description = json.loads((out / "preparation.json").read_text())
    parts = {part: sizes["pairs"] for part, sizes in description["parts"].items()}
    assert parts == {"train": 4 * len(names), "valid": 4, "test": 3, "test1": 4}
    assert (description["max-length"], description["max-ratio"]) == (250, 1.5)
    assert description["aggressive-hyphens"] is True
    assert (out / "bin" / f"test1.{pair}.en.idx").exists()
    assert not (out / "archives").exists()


def test_archives_are_downloaded_and_then_removed(call, given, tmp_path):
    folder = given()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert call("--from", folder)[0] == 0
    with serve({}) as empty, serve(files) as server:
        status, _, error = call("--mirror", empty.url, "--mirror", server.url, output="fetched")
    assert (status, error) == (0, "")
    assert [path for path, _ in server.requests] == [path for path, _ in empty.requests]
    assert len(server.requests) == len(files)
    assert contents(tmp_path / "fetched") == contents(tmp_path / "out")
    # without any mirror or archive
    shutil.rmtree(folder)
    status, printed, _ = call(output="fetched")
    assert (status, printed.count("at work")) == (0, 0)


def test_broken_download_is_kept_and_gone_on_with(call, given, tmp_path):
    files = {path.name: path.read_bytes() for path in given().iterdir()}
    first, second = "training-parallel-europarl-v7.tgz", "training-parallel-commoncrawl.tgz"
    with serve({**files, second: b""}) as server:
        result = call("--mirror", server.url)
    assert refused(result, f"{second} cannot be downloaded: ")
    out = tmp_path / "out"
    assert sorted(contents(out)) == [f"archives/{first}"] + [
        f"raw/europarl/europarl.{language}" for language in ("de", "en")
    ]
    (out / "archives" / f"{second}.partial").write_bytes(files[second][:50])
    with serve(files) as server:
        assert call("--mirror", server.url)[0] == 0
    assert server.requests[0] == (f"/{second}", "bytes=50-")


@pytest.mark.parametrize("name", ["raw/europarl", "raw/newstest2014", "inputs.json", "bin"])
def test_interrupted_run_goes_on_to_the_same_bytes(call, given, tmp_path, monkeypatch, name):
    folder = given()
    run_step = prepare_wmt14.Steps.run

    def run_and_stop(steps, step, options, sources, work):
        def work_and_stop(target):
            work(target)
            signal.raise_signal(signal.SIGINT)

        return run_step(steps, step, options, sources, work_and_stop if step == name else work)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_wmt14.Steps, "run", run_and_stop)
        status, _, error = call("--from", folder)
    message = "complete steps and what was downloaded are kept, run the same command again"
    assert (status, error) == (130, f"\ninterrupted; {message}\n")
    assert not (tmp_path / "out" / name).exists()
    assert not list(tmp_path.rglob("*.partial*"))
    assert (tmp_path / "out").exists() == (name != "raw/europarl")
    assert call("--from", folder)[0] == 0
    assert call("--from", folder, output="whole")[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"commoncrawl": {"de": None}},
            "--from {from_}/training-parallel-commoncrawl.tgz lacks commoncrawl.de-en.de: give it",
        ),
        (
            {"newstest2014": {"de": sgm("ref", "de", drop=2).encode()}},
            r"--test {out}/raw/newstest2014/newstest2014: newstest2014.en has 3 lines, "
            r"newstest2014.de has 2: give files",
        ),
        (
            {"newstest2014": {"en": b"plain\n"}},
            "--test: {out}/raw/newstest2014/newstest2014.en has no text: give one that has",
        ),
        (
            {"europarl": {"de": b"one\n"}},
            r"--train {out}/raw/europarl/europarl: europarl.en has 4 lines, europarl.de has 1: ",
        ),
        (
            {"newstest2013": {"en": b"a\n\xff\n"}},
            r"{out}/raw/newstest2013/newstest2013.en, line 2: byte 1 of the line is no UTF-8",
        ),
    ],
)
def test_archive_with_something_else_is_refused(call, given, tmp_path, changes, message):
    folder = given(**changes)
    result = call("--from", folder)
    assert refused(result, message.format(from_=folder, out=tmp_path / "out")), result
    assert not list(tmp_path.rglob("*.partial*"))
    assert not (tmp_path / "out" / "inputs.json").exists()


def test_damaged_archive_is_refused(call, given, tmp_path):
    folder = given()
    path = folder / "dev.tgz"
    path.write_bytes(path.read_bytes()[:-9])
    message = f"--from {path} has sha256 [0-9a-f]+, the published one is [0-9a-f]+: it is truncated"
    assert refused(call("--from", folder), message)
    # no checksum of it is known
    folder = given("en-fr")
    path = folder / "training-parallel-un.tgz"
    path.write_bytes(path.read_bytes()[:-60])
    message = rf"--from {path} is a truncated or damaged archive \(.*\): get it anew"
    assert refused(call("--from", folder, pair="en-fr", output="other"), message)
    assert not (tmp_path / "other" / "raw" / "un").exists()


def test_missing_archives_are_named(call, given, tmp_path):
    folder = given()
    (folder / "dev.tgz").unlink()
    (folder / "test-full.tgz").unlink()
    message = f"--from {folder} lacks dev.tgz, test-full.tgz: give a folder that has them, or leave"
    assert refused(call("--from", folder), message)
    assert not (tmp_path / "out").exists()


def test_impossible_option_is_refused(call, given, tmp_path, monkeypatch):
    folder = given()
    assert refused(
        call("--from", folder, pair="de-en"), "--pair de-en is unknown: give en-de or en-fr"
    )
    assert refused(call("--from", folder, "--bpe-size", "0"), "--bpe-size is 0: it must be")
    with pytest.raises(SystemExit):
        call("--from", folder, "--mirror", "http://host")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=999))
    message = f"--output {tmp_path}/out: WMT14 en-de takes up to 0.00 GB while it is prepared, 0.00"
    assert refused(call("--from", folder), message)
    assert not (tmp_path / "out").exists()


def test_pairs_are_not_mixed(call, given, tmp_path):
    folder = given()
    assert call("--from", folder)[0] == 0
    message = f"--output {tmp_path}/out exists and does not hold prepared WMT14 en-fr: remove it or"
    assert refused(call("--from", given("en-fr"), pair="en-fr"), message)


def test_published_facts_have_their_shape():
    for train in TRAIN.values():
        for corpus in (*train, prepare_wmt14.VALID, *prepare_wmt14.TESTS):
            for host in corpus.hosts:
                assert re.fullmatch(r"https?://(www|data)\.statmt\.org", host)
            if known := corpus.checksum:
                assert len(known.digest) == 2 * hashlib.new(known.algorithm).digest_size
