"""Subpackages import in one direction; models import what they need."""

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
    "python_interface": {"segment_language_model", "fairseq_integration"},
}

# fairseq, and what it brings
FAIRSEQ = {"fairseq", "hydra", "omegaconf"}


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
    allowed = {package, "__version__", "precision"} | PACKAGES[package]
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


# files on the plain side of a paper's folder
PLAIN = {
    "product_key_memory": "memory query search values lazy_adam cpu_kernels cpu_loops usage",
    "all_attention": "network attention adaptive_span persistent_vectors adagrad_with_clip",
    "transformer_xl": "network dropout",
    "weighted_transformer": "layers as_written branch_weights",
}


@pytest.mark.parametrize("paper", PLAIN)
def test_the_plain_side_imports_nothing_of_fairseqs(paper):
    for name in PLAIN[paper].split():
        files = reached(PLUGIN / paper / f"{name}.py")
        assert not {"fairseq_integration"} & {file.parent.name for file in files}
        assert {file.stem for file in files if file.parent.name == paper} <= {
            "__init__",
            *PLAIN[paper].split(),
        }
        imports = [each for file in files for each in imported(file)]
        assert [each for each in imports if each.split(".")[0] in FAIRSEQ] == []
