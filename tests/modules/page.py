"""Run the code of docs/layers.md with no import but ``fairseq_plugins.modules`` and torch."""

import re
import sys
from pathlib import Path

import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
# what each piece of code computes
OUTPUTS = ["y", "y", "outputs", "output"]


def results():
    """Return the output of each piece of code, and the gradients of its layers."""
    code, computed = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL), []
    for piece, output in zip(code, OUTPUTS, strict=True):
        torch.manual_seed(1)
        names = {"__name__": "page", "torch": torch}
        exec(piece, names)
        names[output].square().mean().backward()
        layers = [value for value in names.values() if isinstance(value, nn.Module)]
        gradients = [p.grad.to_dense() for p in nn.ModuleList(layers).parameters()]
        computed.append([names[output].detach(), *gradients])
    return computed


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
