"""Generated texts: sentences with number names in English and German, and random facts."""

import hashlib
import math
import random
from collections.abc import Iterator
from functools import cache

LANGUAGES = ("en", "de")
DIGITS = 6
SENTENCES = (
    ("from {small} to {large}", "von {small} bis {large}"),
    ("{small} comes before {large}", "vor {large} kommt {small}"),
    ("{large} is more than {small}", "{large} ist mehr als {small}"),
    ("because {small} is less than {large}", "weil {small} weniger als {large} ist"),
    ("add {small} to {large}", "zähle {small} zu {large} hinzu"),
    ("subtract {small} from {large}", "ziehe {small} von {large} ab"),
)
RELATIONS, OBJECTS = 16, 256
# One in this many numbers belongs to the validation part, and one to the test part.
SHARE = 20


def draw_part(number: int, seed: int) -> str:
    """Return the part that a number belongs to."""
    # by a hash: the part does not depend on which numbers are drawn before
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return {0: "valid", 1: "test"}.get(int.from_bytes(digest[:8], "big") % SHARE, "train")


def numbers(part: str, seed: int) -> Iterator[int]:
    """Yield numbers of a part without end, each length as likely as another."""
    draw = random.Random(f"{seed} {part}")
    # only random() is guaranteed to draw the same in every version of Python
    while True:
        digits = 1 + int(draw.random() * DIGITS)
        number = int((1 + 9 * draw.random()) * 10 ** (digits - 1))
        if draw_part(number, seed) == part:
            yield number


@cache
def name(number: int, language: str) -> str:
    """Return the name of a number."""
    from num2words import num2words

    return num2words(number, lang=language)


def sentences(part: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield different sentences of a part in English and German."""
    drawn = numbers(part, seed)
    draw = random.Random(f"{seed} {part} sentences")
    seen = set()
    while len(seen) < count:
        small, large = sorted((next(drawn), next(drawn)))
        sentence = int(draw.random() * len(SENTENCES))
        if small == large or (sentence, small, large) in seen:
            continue
        seen.add((sentence, small, large))
        yield tuple(
            pattern.format(small=name(small, language), large=name(large, language))
            for pattern, language in zip(SENTENCES[sentence], LANGUAGES, strict=True)
        )


def names_per_position(facts: int) -> int:
    """Return the number of different symbols for each of the two names of a subject."""
    names = math.isqrt(max(0, facts) // RELATIONS)
    if names == 0 or RELATIONS * names**2 != facts:
        raise ValueError(
            f"--facts is {facts}: give 16 times a square number, such as 4096, 16384 or 65536"
        )
    return names


def draw_facts(facts: int, seed: int) -> list[str]:
    """Return the facts, drawn with a seed, in the order of subjects and relations."""
    names = names_per_position(facts)
    # only random() is guaranteed to draw the same in every version of Python
    draw = random.Random(f"{seed} facts")
    return [
        f"a{first} b{second} r{relation} o{int(draw.random() * OBJECTS)}"
        for first in range(names)
        for second in range(names)
        for relation in range(RELATIONS)
    ]
