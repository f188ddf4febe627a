"""Commands that write files, each on little data: preparations, quickstarts, set-up."""

import dataclasses
import functools
import hashlib
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from scripts._shared.commands import ROOT
from scripts.check._faults_children import changed, fork_commands
from scripts.check._faults_materials import LINES, WORDS, Materials, translation
from scripts.check._faults_programs import digests, trained_tensors
from scripts.prepare import (
    _published,
    enwik8,
    lm1b,
    ptb,
    text8,
    wikitext103,
    wmt14,
)
from scripts.prepare._binarize import WordDataSet
from scripts.prepare._published import DataSet
from scripts.prepare._sources import Checksum
from scripts.quickstart import language_model as quickstart
from scripts.quickstart import translation as quickstart_translation

# how often a small text is repeated in a small data set
REPEATED = 20
# of a quickstart's training, and when it saves
UPDATES = {"max_update": 12, "save_interval_updates": 3}
# Stands in for Python and uv: what takes minutes there writes some files, one after the other.
STAND_IN = f"""#!/usr/bin/env bash
case "$*" in
    *"import os"*) "{sys.executable}" "$@" | sed "2s#.*#$0#" ;;
    "cache dir") echo cache ;;
    *install* | "-m venv .venv")
        mkdir -p .venv/bin .venv/lib
        cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv
        for number in {{1..10}}; do echo "$*" > ".venv/lib/$# $number" && sleep 0.02; done ;;
esac
"""


class Preparation(NamedTuple):
    """A command that writes files, and how often it is killed.

    Attributes:
        words: gives the command's words for an output.
        inject: is called in its process first.
        kills: how many there are in a campaign.
        quick_kills: how many there are in a quick one.
        writes: how many files that are being written can be seen.
        content: gives what must be the same in the end, of the folder that has the output.
    """

    words: Callable[[Path], tuple[Any, ...]]
    inject: Callable[[], None] | None = None
    kills: int = 10
    quick_kills: int = 1
    writes: int = 2
    content: Callable[[Path], dict[str, str]] = digests


def with_values(options: list[str], **values: Any) -> list[str]:
    """Options with other values."""
    words = list(options)
    for name, value in values.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return words


def small_library(folder: Path) -> Callable[[], None]:
    """Let the preparation of Python's source take a small library."""

    def inject() -> None:
        folder.mkdir(exist_ok=True)
        for number in range(120):
            source = f"def f{number}(x):\n    x += {number}\n    return x\n"
            (folder / f"m{number:03}.py").write_text(source * 4)
        sysconfig.get_path = lambda *arguments: str(folder)

    return inject


# Published data sets.


def checksum(known: Checksum, path: Path) -> Checksum:
    """Checksum of a file, of the kind of another one."""
    return Checksum(known.algorithm, hashlib.new(known.algorithm, path.read_bytes()).hexdigest())


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a folder to an archive: zip where its name says so, else a packed tar."""
    kind = "zip" if archive.suffix == ".zip" else "gztar"
    made = shutil.make_archive(str(archive.with_name(f"packed {archive.stem}")), kind, folder)
    Path(made).rename(archive)


def small_data_set(data_set: DataSet, materials: Materials) -> tuple[Path, DataSet]:
    """What --from names, made of small texts, and the data set that has these."""
    texts = {split: (materials.texts / f"{split}.txt").read_bytes() * REPEATED for split in LINES}
    facts: dict[str, Any] = {"mirrors": (), "disk_bytes": 0}
    if isinstance(data_set, WordDataSet):
        # of many files that train, the last one
        facts["splits"] = dict(list(data_set.splits.items())[-len(texts) :])
        facts["vocabulary"] = len(set(WORDS)) + data_set.unlisted
        contents = {name: texts[split] for name, split in facts["splits"].items()}
    else:
        if data_set.eos_recipe is None:
            texts = {split: text.replace(b"\n", b" ") for split, text in texts.items()}
        contents = {data_set.member: b"".join(texts.values())}
        facts["sizes"] = {split: len(text) for split, text in texts.items()}
        facts["vocabulary"] = len(set(contents[data_set.member]))
    folder = materials.folder / "published" / data_set.name
    source = inside = folder / "files"
    inside.mkdir(parents=True)
    for name, content in contents.items():
        (inside / name).write_bytes(content)
    if data_set.files != data_set.members:
        source = folder / data_set.files[0]
        pack(inside, source)
    files = {name: inside / name if name in contents else source for name in data_set.checksums}
    facts["checksums"] = {
        name: checksum(data_set.checksums[name], path) for name, path in files.items()
    }
    return source, dataclasses.replace(data_set, **facts)


def published(module: Any, data_set: DataSet, materials: Materials, *options: Any) -> Preparation:
    """Preparation of a small data set in place of a published one."""
    made = functools.cache(lambda: small_data_set(data_set, materials))

    def words(output: Path) -> tuple[Any, ...]:
        return (module.__name__, "--output", output, "--from", made()[0], *options)

    def inject() -> None:
        fork_commands()
        sys.exit(_published.run(made()[1], module.__doc__))

    return Preparation(words, inject, writes=3)


def newstest(side: str, text: str) -> str:
    """A test set of the workshop as its archive has it: src or ref, and its sentences."""
    lines = enumerate(text.splitlines(), 1)
    sentences = "".join(f'<seg id="{number}">{line}</seg>\n' for number, line in lines)
    document = f'<doc sysid="x" docid="1" origlang="en">\n<p>\n{sentences}</p>\n</doc>\n'
    return f'<{side}set setid="newstest2014" srclang="any">\n{document}</{side}set>\n'


def workshop(materials: Materials) -> Preparation:
    """Preparation of WMT14 English-German from small texts."""
    corpora = {x.name: x for x in (*wmt14.TRAIN["en-de"], wmt14.NEWSTEST2013, wmt14.NEWSTEST2014)}

    @functools.cache
    def made() -> tuple[Path, dict[str, wmt14.Corpus]]:
        folder = materials.folder / "published" / "wmt14"
        small = {}
        for name, corpus in corpora.items():
            inside = folder / "files" / name
            (inside / "test-full").mkdir(parents=True)
            split = "train" if corpus in wmt14.TRAIN["en-de"] else "test"
            for side, language in (("src", "en"), ("ref", "de")):
                text = (materials.texts / f"{split}.{language}").read_text(encoding="utf-8")
                file = f"test-full/newstest2014-deen-{side}.{language}.sgm"
                if corpus.member:
                    file = corpus.member.format(other="de", language=language)
                (inside / file).write_text(text if corpus.member else newstest(side, text))
            pack(inside, folder / corpus.archive)
            known = checksum(corpus.checksum, folder / corpus.archive)
            small[name] = dataclasses.replace(corpus, checksum=known, hosts=())
        return folder, small

    def words(output: Path) -> tuple[Any, ...]:
        own = ("scripts.prepare.wmt14", "--pair", "en-de", "--from", made()[0])
        return (*own, "--output", output, "--bpe-size", 40, "--workers", 2)

    def inject() -> None:
        small = made()[1]
        train = {"en-de": tuple(small[x.name] for x in wmt14.TRAIN["en-de"])}
        tests = tuple(small[x.name] for x in wmt14.TESTS)
        valid = small[wmt14.VALID.name]
        sizes = {"en-de": 0}
        changed(wmt14, TRAIN=train, VALID=valid, TESTS=tests, DISK_BYTES=sizes)()

    return Preparation(words, inject, writes=18)


# Quickstarts and set-up.


# of a quickstart's folder: its plot of times, and what names the times of the corpus's files
OTHERS = (".png", "/data/steps.json", "/data/preparation.json")


def of_quickstart(folder: Path) -> dict[str, str]:
    """Digests of a quickstart's files but for OTHERS, and of the tensors of its checkpoints."""
    found = digests(folder)
    for name in list(found):
        if name.endswith(OTHERS):
            del found[name]
        elif name.endswith(".pt"):
            tensors = trained_tensors(folder / name)
            content = b"".join(f"{key}{x.tolist()}".encode() for key, x in tensors.items())
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def of_set_up(folder: Path) -> dict[str, str]:
    """Digests of a checkout's files but for those that its name or times change."""
    # RECORD has digests of the scripts in .venv/bin, whose first lines name it
    others = (".pyc", "/RECORD")
    return {name: x for name, x in digests(folder).items() if not name.endswith(others)}


def language_model_quickstart(materials: Materials) -> Preparation:
    """The quickstart of a language model, on a small library and with a few updates."""
    small = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "tokens_per_sample": 32}
    shown = {"min_len": 20, "max_len_b": 20}
    be_quickstart = changed(
        quickstart,
        # for bf16 fairseq's checkpoints keep rounded weights: resumed, a training differs a little
        bf16_units=lambda: False,
        DATA_OPTIONS=with_values(quickstart.DATA_OPTIONS, subwords=60),
        TRAINING_OPTIONS=with_values(quickstart.TRAINING_OPTIONS, **small),
        FP32_OPTIONS=with_values(quickstart.FP32_OPTIONS, **UPDATES),
        SAMPLING_OPTIONS=with_values(quickstart.SAMPLING_OPTIONS, **shown),
    )

    def inject() -> None:
        small_library(materials.folder / "library")()
        be_quickstart()

    def words(output: Path) -> tuple[Any, ...]:
        return ("scripts.quickstart.language_model", "--output", output)

    return Preparation(words, inject, writes=12, content=of_quickstart)


def translation_quickstart() -> Preparation:
    """The quickstart of a translation, with a few sentences and updates."""
    sizes = {"train": 400, "valid": 20, "test": 20}
    training = {"freeze_branch_weights_after": 8, "max_tokens": 400, **UPDATES}
    inject = changed(
        quickstart_translation,
        CORPUS_OPTIONS=with_values(quickstart_translation.CORPUS_OPTIONS, **sizes),
        TRAINING_OPTIONS=with_values(quickstart_translation.TRAINING_OPTIONS, **training),
    )

    def words(output: Path) -> tuple[Any, ...]:
        return ("scripts.quickstart.translation", "--output", output)

    return Preparation(words, inject, writes=20, content=of_quickstart)


def set_up(python: Callable[[], Path]) -> Callable[[Path], tuple[Any, ...]]:
    """Words of the set-up of a checkout with a Python."""

    def words(output: Path) -> tuple[Any, ...]:
        for name in ("scripts/set_up.sh", "requirements/development.txt"):
            if not (output / name).exists():
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, output / name)
        return ("bash", output / "scripts/set_up.sh", python())

    return words


def stand_in(folder: Path) -> Path:
    """What stands in for Python and uv, in a folder that is made."""
    path = folder / "python"
    if not path.exists():
        folder.mkdir(parents=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    return path


def preparations(materials: Materials) -> dict[str, Preparation]:
    """Commands that write files, by the names of their cases."""

    def average(output: Path) -> tuple[Any, ...]:
        last = materials.checkpoints["transformer_xl"]
        several = (last, last.with_name("checkpoint_1_4.pt"))
        return ("scripts.convert.average", *several, "--output", output)

    def source(output: Path) -> tuple[Any, ...]:
        return ("scripts.prepare.python_source", "--output", output, "--subwords", 60)

    def numbers(output: Path) -> tuple[Any, ...]:
        sizes = ("--train", 3000, "--valid", 50, "--test", 50)
        return ("scripts.prepare.number_names", "--output", output, *sizes)

    def news(output: Path) -> tuple[Any, ...]:
        words = ("scripts.prepare.news", "--input", materials.news, "--output", output)
        return (*words, "--bpe-size", 40, "--workers", 2)

    def conversion(output: Path) -> tuple[Any, ...]:
        return materials.conversion(materials.foreign, output)

    def facts(output: Path) -> tuple[Any, ...]:
        return ("scripts.prepare.facts", "--output", output, "--facts", 4096)

    library = small_library(materials.folder / "library")
    several = ("--workers", 2)
    stand_in_here = functools.partial(stand_in, materials.folder / "stand-in")
    return {
        "prepare.python_source": Preparation(source, library),
        "prepare.number_names": Preparation(numbers),
        "prepare.translation": Preparation(lambda to: translation(materials.texts, to), writes=12),
        "prepare.news": Preparation(news, writes=8),
        "convert.checkpoint": Preparation(conversion, writes=3),
        "convert.average": Preparation(average, writes=1),
        "prepare.facts": Preparation(facts, fork_commands),
        "prepare.ptb": published(ptb, ptb.PTB, materials, *several),
        "prepare.enwik8": published(enwik8, enwik8.ENWIK8, materials, "--newlines", "eos"),
        "prepare.text8": published(text8, text8.TEXT8, materials),
        "prepare.wikitext103": published(wikitext103, wikitext103.WIKITEXT103, materials, *several),
        "prepare.lm1b": published(lm1b, lm1b.LM1B, materials, *several),
        "prepare.wmt14": workshop(materials),
        "quickstart.language_model": language_model_quickstart(materials),
        "quickstart.translation": translation_quickstart(),
        "set-up with a stand-in": Preparation(set_up(stand_in_here), writes=0, content=of_set_up),
        "set-up": Preparation(
            set_up(lambda: sys.executable), None, 2, quick_kills=0, writes=0, content=of_set_up
        ),
    }
