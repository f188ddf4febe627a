"""Files that other code wrote: weights, options and vocabularies, and what does not fit.

Nothing in a file is executed. What is wrong is collected, so that a user learns it all at once.
"""

import json
import math
import pickle
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_plugins.fairseq_integration.safe_loading import is_whole
from scripts._shared.commands import short
from scripts.convert._tensorflow import read_symbols

EOS, UNK = "<eos>", "<unk>"
# Under one of these a training's checkpoint has the weights.
_CONTAINERS = ("model", "state_dict")
# what PyTorch says of a pickle that names a class or a function of other code
_OTHER_CODE = re.compile(r"\bGLOBAL\b")
# torch.nn.DataParallel puts it before each name
_PREFIX = "module."


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file that torch.save or safetensors wrote, by name.

    What a training keeps beside the weights, and ``module.`` before all names, are left out.
    Raises ValueError when there is no such file, or it is broken or holds more than tensors.
    """
    label = f"--checkpoint {short(path)}"
    if not path.is_file():
        raise ValueError(f"{label} is no file: name the weights that the original code saved")
    content = _load_safetensors(path) if path.suffix == ".safetensors" else _load(path)
    for name in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not (isinstance(content, dict) and content and all(isinstance(k, str) for k in content)):
        raise ValueError(
            f"{label} holds {type(content).__name__}, not tensors by name: save the state dict of "
            "the model"
        )
    others = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"{label} has more than tensors among the weights: {', '.join(map(repr, others))}; "
            "save these alone, as a state dict"
        )
    if all(name.startswith(_PREFIX) for name in content):
        content = {name.removeprefix(_PREFIX): value for name, value in content.items()}
    return content


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(
            f"--checkpoint {short(path)} needs the package safetensors: pip install safetensors"
        ) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"--checkpoint {short(path)} is broken: {error}") from error


def _load(path: Path) -> Any:
    label = f"--checkpoint {short(path)}"
    # torch itself reads over flipped bits
    if is_zipfile(path) and not is_whole(path):
        raise ValueError(f"{label} is broken: a checksum in it is wrong; get it anew")
    try:
        # files of before PyTorch 1.6 are no zip archives and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        # reading a damaged file may fail in any way
        of_pickle = isinstance(error, pickle.UnpicklingError)
        if not (of_pickle and _OTHER_CODE.search(str(error))):
            # PyTorch would advise to execute what is in it
            detail = "" if of_pickle else f" ({error})"
            raise ValueError(
                f"{label} is broken or no file of torch.save{detail}: get it anew, or name another"
            ) from error
        raise ValueError(
            f"{label} holds more than tensors, and loading the rest would execute what is in it. "
            "If it is a whole model, extract its tensors where it was trained, with the original "
            f'code:\n    model = torch.load("{path.name}", map_location="cpu")\n'
            '    torch.save(model.state_dict(), "weights.pt")\nand name weights.pt here'
        ) from error


class ForeignTensors:
    """Tensors by the names that the original code gave them.

    Args:
        tensors: the checkpoint's.
        problems: takes what is wrong with them, a line each.
    """

    def __init__(self, tensors: dict[str, Tensor], problems: list[str]) -> None:
        self._tensors = tensors
        self._problems = problems
        self._left = set(tensors)

    def take(self, name: str, *shape: int) -> Tensor:
        """Tensor of a name in single precision; zeros where a problem takes its place."""
        self._left.discard(name)
        found = self._tensors.get(name)
        expected = " x ".join(map(str, shape))
        if found is None:
            self._problems.append(f"the checkpoint lacks {name} ({expected})")
        elif found.layout != torch.strided or found.is_meta or not found.is_floating_point():
            self._problems.append(f"{name} is not of floating-point numbers, all of them there")
        elif tuple(found.shape) != shape:
            got = " x ".join(map(str, found.shape)) or "a number"
            self._problems.append(f"{name} is {got}, and by the configuration {expected}")
        elif not found.isfinite().all():
            self._problems.append(f"{name} has a number that is not finite")
        else:
            return found.float()
        return torch.zeros(shape)

    def take_tied(self, name: str, others: Iterable[str], *shape: int) -> Tensor:
        """Tensor that the original has under several names, of which a file may keep any.

        Notes a problem where they differ.
        """
        present = [other for other in (name, *others) if other in self._tensors]
        tensor = self.take(present[0] if present else name, *shape)
        for other in present[1:]:
            again = self.take(other, *shape)
            if not torch.equal(again, tensor):
                self._problems.append(
                    f"{other} differs from {present[0]}: the configuration says tied, the weights "
                    "are not"
                )
        return tensor

    def take_both(self, first: str, second: str, tied: bool, *shape: int) -> tuple[Tensor, Tensor]:
        """Two tensors of a shape, or the same one twice where the original has tied them."""
        if tied:
            both = self.take_tied(first, [second], *shape)
            return both, both
        return self.take(first, *shape), self.take(second, *shape)

    def take_affine(self, ours: str, theirs: str, *shape: int) -> dict[str, Tensor]:
        """Weight of a shape, and bias, of a linear layer or a norm, by what we call it."""
        shapes = {"weight": shape, "bias": shape[:1]}
        return {f"{ours}.{kind}": self.take(f"{theirs}.{kind}", *s) for kind, s in shapes.items()}

    def skip(self, name: str) -> None:
        """Leave a tensor out that follows from the configuration."""
        self._left.discard(name)

    def note_surplus(self) -> None:
        """Note a problem for each tensor that nobody took."""
        names = sorted(self._left)
        self._problems += [f"nothing takes {name!r} of the checkpoint" for name in names]


class ForeignConfig:
    """Options of the original code, from a JSON file; groups of them count as one.

    Args:
        path: the file.
        problems: takes what is wrong with them, a line each.

    ``readable`` tells whether sizes can be told, and tensors be compared with them.

    Raises ValueError when the file holds no options.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.readable = True
        self._label = f"--config {short(path)}"
        self._problems = problems
        if not path.is_file():
            raise ValueError(f"{self._label} is no file: name the model's options as JSON")
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self._label} is not JSON: {error}") from error
        if not isinstance(read, dict):
            raise ValueError(f"{self._label} has no options: it must be an object of JSON")
        self._values: dict[str, Any] = {}
        self._unread: set[str] = set()
        self._most_layers: float = math.inf
        self._most_size: float = math.inf
        for name, value in read.items():
            for option, given in (value if isinstance(value, dict) else {name: value}).items():
                self._unread.add(option)
                if isinstance(given, dict):
                    continue  # a group in a group is no option
                if json.dumps(self._values.get(option, given)) != json.dumps(given):
                    self.note(f"{option} occurs twice, with different values")
                self._values[option] = given

    def compare_with(self, tensors: Collection[Tensor]) -> None:
        """Let no more layers, and no larger sizes, be read than these tensors can have."""
        self._most_layers = len(tensors)
        self._most_size = max((size for tensor in tensors for size in tensor.shape), default=0)

    def layers(self, name: str) -> int | None:
        """Number of layers, each of which has tensors of its own; None after a problem."""
        most = self._most_layers
        return self._at_most(most, f"the checkpoint has {most} tensors", name)

    def size(self, name: str, least: int = 1, default: int | None = None) -> int | None:
        """Size that a dimension of some tensor has; None after a problem."""
        most = self._most_size
        has = f"the checkpoint's longest dimension is {most}"
        return self._at_most(most, has, name, least, default)

    def _at_most(self, most: float, has: str, name: str, *options: Any) -> int | None:
        value = self.integer(name, *options)
        if value is None or value <= most:
            return value
        self.note(f"{name} is {value}, and {has}", False)
        return None

    def unread(self) -> list[str]:
        """Names of the options that nobody has asked for."""
        return sorted(self._unread)

    def name_of(self, *names: str) -> str:
        """The one of several names of an option that the file has, else the first."""
        return next((name for name in names if name in self._values), names[0])

    def integer(self, name: str, least: int = 1, default: int | None = None) -> int | None:
        """Whole number of at least ``least``; None after a problem."""

        def fits(value: Any) -> bool:
            return type(value) is int and value >= least

        return self._checked(name, default, fits, f"a whole number of at least {least}")

    def rate(self, name: str) -> float:
        """Rate of a dropout, 0 where there is none."""

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and 0 <= value < 1

        return self._checked(name, 0.0, fits, "a number in [0, 1)")

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        """True or false; None after a problem."""
        return self._checked(name, default, lambda value: isinstance(value, bool), "true or false")

    def numbers(self, name: str) -> list[int] | None:
        """List of rising whole numbers, which may be empty; None after a problem."""

        def fits(value: Any) -> bool:
            whole = isinstance(value, list) and all(type(x) is int and x > 0 for x in value)
            return whole and sorted(set(value)) == value

        return self._checked(name, None, fits, "a list of rising numbers")

    def flags(self, name: str, length: int) -> list[bool] | None:
        """List of so many truth values; None after a problem."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and [type(flag) for flag in value] == [bool] * length

        return self._checked(name, None, fits, f"a list of {length} times true or false")

    def expect(self, name: str, value: Any, why: str, default: Any = None) -> None:
        """Note a problem where an option has another value than the only one that is known."""
        self._unread.discard(name)
        found = self._values.get(name, value if default is None else default)
        if found != value:
            self._problems.append(f"{name} is {json.dumps(found)} in {self._label}: {why}")

    def note(self, problem: str, readable: bool = True) -> None:
        """Note a problem with the options, and whether sizes can be told nevertheless."""
        self._problems.append(f"{self._label}: {problem}")
        self.readable &= readable

    def _checked(self, name: str, default: Any, fits: Any, description: str) -> Any:
        self._unread.discard(name)
        value = self._values.get(name, default)
        if value is None:
            self._problems.append(f"{self._label} lacks {name}: {description}")
        elif not fits(value):
            found = f"{name} is {json.dumps(value)} in {self._label}"
            self._problems.append(f"{found}: it must be {description}")
        else:
            return value
        self.readable = False
        return None


class ForeignVocabulary:
    """The symbols of a model in the order of its numbers, and how fairseq numbers them.

    fairseq's dictionaries begin with <s>, <pad>, </s> and <unk>. <eos> of the original becomes
    </s>, <unk> stays itself. Rows that the original does not have are made up: no such symbol is
    ever predicted, and evaluation refuses a text that has one.

    Args:
        path: a text file, a symbol a line, or the TensorFlow code's cache.pkl.
        problems: takes what is wrong with them, a line each.

    Raises ValueError when there is no such text.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        label = f"--vocab {short(path)}"
        if not path.is_file():
            raise ValueError(f"{label} is no file: name the model's symbols, one a line")
        try:
            cached = path.suffix == ".pkl"
            symbols = read_symbols(path) if cached else path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{label} is not UTF-8: {error}") from error
        self.symbols = symbols if cached else symbols.removesuffix("\n").split("\n")
        self.dictionary = Dictionary()
        self._find_problems(label, problems)
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        special = (None, None, numbers.get(EOS), numbers.get(UNK))
        # of each of our symbols the original's number, None for those that it does not have
        self._order: list[int | None] = list(special)
        for number, symbol in enumerate(self.symbols):
            if symbol not in (EOS, UNK):
                self.dictionary.add_symbol(symbol)
                self._order.append(number)
        self._last_special = max((n for n in special if n is not None), default=0)

    def _find_problems(self, label: str, problems: list[str]) -> None:
        seen: set[str] = set()
        reserved = {self.dictionary.bos_word, self.dictionary.pad_word, self.dictionary.eos_word}
        for line, symbol in enumerate(self.symbols, start=1):
            at = f"{label}, line {line}: {symbol!r}"
            if symbol.split() != [symbol]:
                problems.append(f"{at} is empty or has spaces")
            elif symbol in seen:
                problems.append(f"{at} occurs twice")
            elif symbol in reserved:
                problems.append(f"{at} is a special symbol of fairseq's")
            seen.add(symbol)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def lacks(self) -> list[str]:
        """Which of <eos> and <unk> the original does not have."""
        return [symbol for symbol in (EOS, UNK) if symbol not in self.symbols]

    @property
    def added(self) -> int:
        """How many symbols fairseq has more."""
        return len(self._order) - len(self.symbols)

    def fits_first_band(self, size: int) -> bool:
        """Whether fairseq's special symbols are all among the first ``size`` of the original."""
        return self._last_special < size

    def arrange(self, rows: Tensor, missing: float = 0.0) -> Tensor:
        """Rows (W, …) of the first W symbols as those of our first W + ``added`` ones.

        Symbols that the original does not have get ``missing``.
        """
        order = self._order[: len(rows) + self.added]
        known = torch.tensor([number is not None for number in order])
        arranged = rows.new_full((len(order), *rows.shape[1:]), missing)
        arranged[known] = rows[[number for number in order if number is not None]]
        return arranged
