import pytest

from scripts.prepare._bitext import REASONS, Limits, clean


def write(tmp_path, lengths):
    """Pairs of as many units, the first of each its number; returns the files."""
    sources = {}
    for side, language in enumerate(("en", "de")):
        path = sources[language] = tmp_path / f"in.{language}"
        lines = (
            " ".join([f"n{number}", *["a"] * length])
            for number, length in enumerate(pair[side] - 1 for pair in lengths)
        )
        texts = [line if pair[side] else "" for line, pair in zip(lines, lengths, strict=True)]
        path.write_text("".join(f"{text}\n" for text in texts))
    return sources


def cleaned(tmp_path, lengths, limits, pairs=None):
    targets = {language: tmp_path / f"out.{language}" for language in ("en", "de")}
    sources = write(tmp_path, lengths)
    found = clean(sources, targets, pairs or len(lengths), limits, "train")
    numbers = [
        [int(line.split()[0][1:]) for line in path.read_text().splitlines()]
        for path in targets.values()
    ]
    assert numbers[0] == numbers[1]
    assert found["units"] == {
        language: len(path.read_text().split()) for language, path in targets.items()
    }
    return numbers[0], [found[key] for key in ("kept", *REASONS)]


@pytest.mark.parametrize(
    ("limits", "lengths", "kept", "counts"),
    [
        (
            Limits(),
            [(1, 1), (0, 1), (1, 0), (0, 0), (3, 2), (2, 3), (4, 2), (5, 8), (250, 250)],
            [0, 4, 5, 8],
            [4, 3, 0, 2],
        ),
        # too long counts before too unequal
        (Limits(), [(251, 250), (250, 167), (250, 166), (1, 251)], [1], [1, 0, 2, 1]),
        (Limits(3, 1.0), [(3, 3), (3, 2), (4, 4)], [0], [1, 0, 1, 1]),
        # ratios that floats do not hold
        (Limits(99, 1.15), [(23, 20), (20, 23), (24, 20)], [0, 1], [2, 0, 0, 1]),
        (Limits(99, 1.1), [(11, 10), (33, 30), (34, 30)], [0, 1], [2, 0, 0, 1]),
    ],
)
def test_limits_are_exact(tmp_path, limits, lengths, kept, counts):
    assert cleaned(tmp_path, lengths, limits) == (kept, counts)


@pytest.mark.parametrize("pairs", [1, 3])
def test_another_number_of_lines_is_refused(tmp_path, pairs):
    message = rf"^{tmp_path}/in.en and {tmp_path}/in.de have not {pairs} lines each: remove them"
    with pytest.raises(ValueError, match=message):
        cleaned(tmp_path, [(1, 1), (1, 1)], Limits(), pairs)


@pytest.mark.parametrize("more", ["en", "de"])
def test_unequal_files_are_refused(tmp_path, more):
    sources = write(tmp_path, [(1, 1)])
    with sources[more].open("a") as file:
        file.write("b\n")
    targets = {language: tmp_path / f"out.{language}" for language in ("en", "de")}
    for pairs in (1, 2):
        with pytest.raises(ValueError, match=f"have not {pairs} lines each"):
            clean(sources, targets, pairs, Limits(), "train")
