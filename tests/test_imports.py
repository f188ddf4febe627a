"""Rooms import in one direction; in each room, plain PyTorch imports nothing of fairseq's side."""

import ast

import pytest

from tests.end_to_end.commands import PLUGIN, ROOT

# the other subpackages that each subpackage may import from
PACKAGES = {
    "fairseq_integration": set(),
    "product_key_memory": {"fairseq_integration"},
    "weighted_transformer": {"fairseq_integration"},
    "segment_language_model": {"product_key_memory", "fairseq_integration"},
    "transformer_xl": {"segment_language_model", "fairseq_integration"},
    "all_attention": {"segment_language_model", "fairseq_integration"},
    "huggingface": {
        "all_attention",
        "python_interface",
        "segment_language_model",
        "transformer_xl",
    },
    "python_interface": {"segment_language_model", "fairseq_integration"},
}
# the files of each room that know fairseq; all others are plain PyTorch
FAIRSEQ_SIDE = {
    "product_key_memory": "fairseq_layers model optimizer options usage_log",
    "weighted_transformer": "model optimizer options",
    "segment_language_model": "adaptive_softmax batch_split evaluation generation loss model "
    "options prompt_readers split streams task",
    "transformer_xl": "model",
    "all_attention": "model optimizer",
    "huggingface": "",
}
PLAIN = [
    *(PLUGIN / name for name in ("modules/__init__.py", "precision.py", "sizes.py", "units.py")),
    PLUGIN / "python_interface" / "lines.py",
    *(
        file
        for room, names in FAIRSEQ_SIDE.items()
        for file in sorted((PLUGIN / room).glob("*.py"))
        if file.stem not in names.split()
    ),
]
# fairseq and what it is configured with
FAIRSEQ = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


def statements(file, in_functions=True):
    """Return the syntax nodes of a file except its docstrings."""
    nodes = [ast.parse(file.read_text(encoding="utf-8"))]
    for node in nodes:
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            del node.body[0]
        if in_functions or not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)
    return nodes


def imported(file, in_functions=True):
    """Yield the dotted names that a file imports."""
    package = ("fairseq_plugins", *file.relative_to(PLUGIN).parent.parts)
    for node in statements(file, in_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join(filter(None, [*start, node.module]))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def reached(file):
    """Return the files of the plugin's subpackages that a file imports outside of functions."""
    files = [file]
    for each in files:
        for name in imported(each, in_functions=False):
            path = ROOT.joinpath(*name.split(".")[:3]).with_suffix(".py")
            for made in (path, path.with_name("__init__.py")):
                if path.is_file() and made not in files:
                    files.append(made)
    return [each for each in files if each.parent.name in PACKAGES]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_from_those_below_it(package):
    allowed = {package, "__version__", "precision", "sizes", "units"} | PACKAGES[package]
    wrong = [
        (file.name, name)
        for file in (PLUGIN / package).glob("*.py")
        for name in imported(file)
        for top, part in [(f"{name}.".split(".")[:2])]
        if top in ("scripts", "tests") or (top == "fairseq_plugins" and part not in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("paper", ["transformer_xl", "all_attention"])
def test_a_segment_model_imports_no_memory_before_it_has_one(paper):
    files = reached(PLUGIN / paper / "model.py")
    packages = {file.parent.name for file in files}
    shared = {"segment_language_model", "product_key_memory", "fairseq_integration"}
    assert packages == {paper, *shared}
    memory = {file.name for file in files if file.parent.name == "product_key_memory"}
    assert memory == {"__init__.py", "options.py"}


@pytest.mark.parametrize("file", PLAIN, ids=lambda file: str(file.relative_to(PLUGIN)))
def test_plain_pytorch_imports_only_plain_pytorch(file):
    wrong = []
    for name in imported(file):
        path = ROOT.joinpath(*name.split("."))
        files = [made.with_suffix(".py") for made in (path, path.parent, path / "__init__")]
        made = next((each for each in files if each.is_file()), None)
        ours = name.startswith("fairseq_plugins.")
        if name.split(".")[0] in FAIRSEQ or (ours and made is not None and made not in PLAIN):
            wrong.append(name)
    assert wrong == []


def test_translation_imports_nothing_of_language_models():
    for file in ("python_interface/translation.py", "weighted_transformer/model.py"):
        assert "segment_language_model" not in {made.parent.name for made in reached(PLUGIN / file)}
