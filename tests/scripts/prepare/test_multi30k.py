"""Multi30k's texts, from made-up archives."""

import gzip
import hashlib

from scripts.prepare import multi30k
from tests.scripts.prepare.prepared import contents
from tests.scripts.refusals import refused


def test_multi30k_unpacks_and_joins_its_texts(tmp_path, monkeypatch, call):
    archives = tmp_path / "archives"
    archives.mkdir()
    for name in multi30k.TEXTS:
        part, language = name.split(".")
        text = f"{part} 1 {language}\n{part} 2 {language}\n".encode()
        (archives / f"{name}.gz").write_bytes(gzip.compress(text))
        monkeypatch.setitem(multi30k.TEXTS, name, hashlib.sha256(text).hexdigest())
    words = ("--output", tmp_path / "data", "--from", archives)
    assert call(multi30k.main, *words, "--joined")[0] == 0
    written = contents(tmp_path / "data")
    assert set(multi30k.TEXTS) < set(written)
    assert written["val.fr"] == b"val 1 fr\nval 2 fr\n"
    assert (
        written["joined/val.en"]
        == b"<2de> val 1 en\n<2de> val 2 en\n<2fr> val 1 en\n<2fr> val 2 en\n"
    )
    assert written["joined/val.de"] == b"val 1 de\nval 2 de\nval 1 fr\nval 2 fr\n"
    (tmp_path / "data/val.en").write_bytes(b"changed")
    (archives / "val.en.gz").write_bytes(gzip.compress(b"changed"))
    assert refused(call(multi30k.main, *words), "val.en")
