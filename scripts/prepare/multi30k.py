"""Multi30k, 29,000 descriptions of images in English, German and French, as plain text.

    python -m scripts.prepare.multi30k --output data/multi30k

OUTPUT/{train,val,test_2016_flickr}.{en,de,fr}    one sentence a line, aligned
OUTPUT/joined/    with --joined, English-German and English-French in one pair of texts: .en, whose
                  lines begin with <2de> or <2fr>, and .de, which has both other languages

The sha256 of each text is compared, since archives may be packed again. scripts.prepare.translation
binarizes them: --train data/multi30k/train.
"""

import argparse
import gzip
import hashlib
import sys
from pathlib import Path

from scripts._shared.command_line import exit_status
from scripts._shared.files import atomic_write
from scripts.prepare._downloads import Archive, add_source_option
from scripts.prepare._stages import file_digest, preparation_parser

ADDRESS = "raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
# sha256 of the unpacked texts
TEXTS = {
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.fr": "cb3160d69b002bb638e66cc7612fcd56cb0af82eadc9c142dedc438afb885ef6",
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.fr": "5925a3c18f1587b6b54b87743106e6e8ab93618edb6f65d19eac0621f853a10d",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.fr": "5304e444d842e962b2dda4d816b70b22a1765b15401642b7ca37a67477e708dc",
}


def join(folder: Path, part: str) -> None:
    """Write English-German and English-French of a part as one pair of texts."""
    (folder / "joined").mkdir(exist_ok=True)
    en, de, fr = (
        (folder / f"{part}.{language}").read_bytes().splitlines(keepends=True)
        for language in ("en", "de", "fr")
    )
    english = [b"<2de> " + line for line in en] + [b"<2fr> " + line for line in en]
    for language, lines in (("en", english), ("de", de + fr)):
        with atomic_write(folder / "joined" / f"{part}.{language}") as partial:
            partial.write_bytes(b"".join(lines))


def prepare(options: argparse.Namespace) -> None:
    """Write the texts that are missing or differ."""
    options.output.mkdir(parents=True, exist_ok=True)
    for name, checksum in TEXTS.items():
        text = options.output / name
        if text.exists() and file_digest(text) == checksum:
            continue
        archive = Archive(f"{ADDRESS}/{name}.gz", []).path(options)
        content = gzip.decompress(archive.read_bytes())
        if hashlib.sha256(content).hexdigest() != checksum:
            raise ValueError(f"{archive} is not the published text of {name}: get it again")
        with atomic_write(text) as partial:
            partial.write_bytes(content)
    if options.joined:
        for part in sorted({name.rpartition(".")[0] for name in TEXTS}):
            join(options.output, part)
    print(f"{options.output}: complete", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    add_source_option(parser, "the nine texts, *.gz")
    parser.add_argument("--joined", action="store_true", help="also write OUTPUT/joined")
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
