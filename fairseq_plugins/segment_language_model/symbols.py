"""What the symbols of running text are, and how they are written."""

from typing import Any

from fairseq.data import Dictionary


class RunningTextDictionary(Dictionary):
    """A dictionary that writes ``</s>`` out where fairseq's leaves it away."""

    def string(self, tensor: Any, *args: Any, **options: Any) -> str:
        """Return ``tensor`` as text, with ``</s>`` where it stands."""
        return super().string(tensor, *args, **{**options, "include_eos": True})


def is_characters(dictionary: Dictionary) -> bool:
    """Return whether symbols are single characters, or bytes by their number (0 to 255)."""
    words = dictionary.symbols[dictionary.nspecial :]
    return all(len(w) == 1 for w in words) or all(w.isdecimal() and int(w) < 256 for w in words)
