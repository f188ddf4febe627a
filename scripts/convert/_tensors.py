"""Read tensors that other code saved, by its names; nothing in a file is executed."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor
from torch import equal as equal_tensors

from scripts._shared.checkpoints import load_safely
from scripts._shared.commands import short

# keys under which a training's checkpoint has the weights
_CONTAINERS = ("model", "state_dict")
# names of matrices that TensorFlow stores as (in, out); no other source has slashes in its names
_TRANSPOSED = re.compile(r"/(kernel|proj|proj_W)$")
# torch.nn.DataParallel adds it to each name
_PREFIX = "module."
_OTHER_CONFIG = "give the --config and --vocab of this checkpoint"
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
        # optional: pip install safetensors
        from safetensors.torch import load_file

        try:
            content = load_file(path)
        # damage may raise anything
        except Exception as error:
            raise ValueError(f"{name} cannot be read ({error}): {_REMEDY}") from error
    else:
        content = load_safely(path, name, _REMEDY)
    for container in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(container), dict):
            content = content[container]
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise ValueError(f"{name} holds other things than tensors by name: {_REMEDY}")
    if all(key.startswith(_PREFIX) for key in content):
        content = {key.removeprefix(_PREFIX): value for key, value in content.items()}
    return content


class ForeignTensors:
    """Tensors of a checkpoint, taken by the names of Transformer-XL's PyTorch code.

    Args:
        tensors: the checkpoint's tensors by name.
        renaming: regular expressions and replacements that, in turn, yield the checkpoint's names.
    """

    def __init__(self, tensors: dict[str, Tensor], renaming: Sequence[tuple[str, str]]) -> None:
        self._tensors = tensors
        self._unused = set(tensors)
        self._renaming = renaming

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in single precision; raise ValueError if it is not of this shape."""
        name = self._rename(name)
        self._unused.discard(name)
        if name not in self._tensors:
            raise ValueError(f"the checkpoint lacks {name}, {shape}: {_OTHER_CONFIG}")
        tensor = self._tensors[name]
        tensor = tensor.T if _TRANSPOSED.search(name) else tensor
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)} and the type {tensor.dtype}, but the "
                f"configuration says {shape}, of real numbers: {_OTHER_CONFIG}"
            )
        return tensor.float()

    def take_tied(self, name: str, others: Iterable[str], *shape: int) -> Tensor:
        """Return a tensor that the original has under several names; the file may have any."""
        present = [other for other in (name, *others) if self._rename(other) in self._tensors]
        first, *rest = present or [name]
        tensor = self.take(first, *shape)
        for other in rest:
            if not equal_tensors(self.take(other, *shape), tensor):
                raise ValueError(
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
        self._unused.discard(self._rename(name))

    def check_all_used(self) -> None:
        """Raise ValueError if there is a tensor that was not taken."""
        if self._unused:
            names = ", ".join(sorted(self._unused)[:9])
            raise ValueError(f"the checkpoint's {names} are not used: {_OTHER_CONFIG}")

    def _rename(self, name: str) -> str:
        for pattern, replacement in self._renaming:
            name = re.sub(pattern, replacement, name)
        return name
