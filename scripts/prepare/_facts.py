"""Random facts to memorize."""

import math
import random

RELATIONS, OBJECTS = 16, 256


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
