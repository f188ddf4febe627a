"""Read tensors that other code saved, by its names; nothing in a file is executed."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor, strided, zeros
from torch import equal as equal_tensors

from scripts._shared.checkpoints import load_safely
from scripts._shared.commands import short

# keys under which a training's checkpoint has the weights
_CONTAINERS = ("model", "state_dict")
# torch.nn.DataParallel adds it to each name
_PREFIX = "module."
_REMEDY = (
    "name the weights that the original code saved; if it saved the whole model, save the "
    'weights with its own code: torch.save(model.state_dict(), "weights.pt")'
)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that torch.save or safetensors wrote, by name.

    The rest of a training's checkpoint, and ``module.`` before all names, are left out.
    """
    name = f"--checkpoint {short(path)}"
    if path.suffix == ".safetensors":
        content = _read_safetensors(path, name)
    else:
        content = load_safely(path, name, _REMEDY)
    for container in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(container), dict):
            content = content[container]
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{name} holds {type(content).__name__}, not tensors by name: {_REMEDY}")
    others = [key for key, value in content.items() if not isinstance(value, Tensor)]
    others += [key for key in content if not isinstance(key, str)]
    if others:
        listed = ", ".join(map(repr, others))
        raise ValueError(f"{name} has more than tensors by name: {listed}: {_REMEDY}")
    if all(key.startswith(_PREFIX) for key in content):
        content = {key.removeprefix(_PREFIX): value for key, value in content.items()}
    return content


def _read_safetensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(
            f"{name} needs the package safetensors: pip install safetensors"
        ) from error
    if not path.is_file():
        raise ValueError(f"{name} is not a file: {_REMEDY}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{name} is cut short or damaged ({error}): {_REMEDY}") from error


class ForeignTensors:
    """Tensors of a checkpoint, taken by the names of Transformer-XL's PyTorch code.

    Args:
        tensors: the checkpoint's tensors by name.
        problems: list to which problems with the tensors are added, one line each.
        renaming: regular expressions and replacements that, in turn, yield the checkpoint's names.
        transposed: regular expression for the checkpoint's names of transposed matrices.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        problems: list[str],
        renaming: Sequence[tuple[str, str]] = (),
        transposed: str = r"(?!)",
    ) -> None:
        self._tensors = tensors
        self._problems = problems
        self._left = set(tensors)
        self._renaming = renaming
        self._transposed = transposed

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in single precision, or note a problem with it and return zeros."""
        name = self._rename(name)
        self._left.discard(name)
        found = self._tensors.get(name)
        transposed = re.search(self._transposed, name)
        if transposed:
            shape = shape[::-1]
        expected = " x ".join(map(str, shape))
        if found is None:
            self._problems.append(f"the checkpoint lacks {name} ({expected})")
        elif found.layout != strided or found.is_meta or not found.is_floating_point():
            self._problems.append(f"{name} is not a dense tensor of floating-point numbers")
        elif tuple(found.shape) != shape:
            got = " x ".join(map(str, found.shape)) or "a number"
            self._problems.append(f"{name} is {got}, but the configuration says {expected}")
        elif not found.isfinite().all():
            self._problems.append(f"{name} has a number that is not finite")
        else:
            return found.float().T if transposed else found.float()
        # takes no memory, whatever the sizes
        nothing = zeros(()).expand(shape)
        return nothing.T if transposed else nothing

    def take_tied(self, name: str, others: Iterable[str], *shape: int) -> Tensor:
        """Return a tensor that the original has under several names; the file may have any."""
        present = [other for other in (name, *others) if self._rename(other) in self._tensors]
        first, *rest = present or [name]
        tensor = self.take(first, *shape)
        for other in rest:
            if not equal_tensors(self.take(other, *shape), tensor):
                self._problems.append(
                    f"{self._rename(other)} differs from {self._rename(first)}: the configuration "
                    "says tied, the weights are not"
                )
        return tensor

    def take_both(self, first: str, second: str, tied: bool, *shape: int) -> tuple[Tensor, Tensor]:
        """Return two tensors of a shape, or the same one twice if the original ties them."""
        if tied:
            both = self.take_tied(first, [second], *shape)
            return both, both
        return self.take(first, *shape), self.take(second, *shape)

    def take_affine(self, ours: str, theirs: str, *shape: int) -> dict[str, Tensor]:
        """Return the weight, of ``shape``, and the bias of a linear layer or norm, by our names."""
        shapes = {"weight": shape, "bias": shape[:1]}
        return {f"{ours}.{kind}": self.take(f"{theirs}.{kind}", *s) for kind, s in shapes.items()}

    def skip(self, name: str) -> None:
        """Leave out a tensor that follows from the configuration."""
        self._left.discard(self._rename(name))

    def note_surplus(self) -> None:
        """Note a problem for each tensor that was not taken."""
        names = sorted(self._left)
        self._problems += [f"the checkpoint's {name!r} is not used" for name in names]

    def _rename(self, name: str) -> str:
        for pattern, replacement in self._renaming:
            name = re.sub(pattern, replacement, name)
        return name
