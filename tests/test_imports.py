"""Subpackages import in one direction; layers know no options; models import what they need."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.end_to_end.commands import PLUGIN, ROOT, environment

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
OPTION = re.compile(r"--[a-z]")


def statements(file):
    """Return all syntax nodes of a file except its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            del node.body[0]
    return list(ast.walk(tree))


def imported(file):
    """Yield the dotted names that a file imports, at any place in it."""
    package = ("fairseq_plugins", *file.relative_to(PLUGIN).parent.parts)
    for node in statements(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join(filter(None, [*start, node.module]))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def layers():
    """Return the files that make up the standalone layers."""
    files = [PLUGIN / "modules" / "__init__.py"]
    for file in files:
        for name in imported(file):
            path = ROOT.joinpath(*name.split(".")[:3]).with_suffix(".py")
            if path.is_file() and path not in files:
                files.append(path)
    return [file for file in files if file.parent.name in PACKAGES.keys() - {"fairseq_integration"}]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_from_those_below_it(package):
    allowed = {package, "__version__"} | PACKAGES[package]
    wrong = [
        (file.name, name)
        for file in (PLUGIN / package).glob("*.py")
        for name in imported(file)
        for top, part in [(f"{name}.".split(".")[:2])]
        if top in ("scripts", "tests") or (top == "fairseq_plugins" and part not in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("file", layers(), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_layer_knows_no_fairseq_and_names_no_option(file):
    assert not [name for name in imported(file) if name.split(".")[0] in ("fairseq", "omegaconf")]
    texts = [node.value for node in statements(file) if isinstance(node, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and OPTION.search(text)]


@pytest.mark.parametrize("paper", ["transformer_xl", "all_attention"])
def test_a_segment_model_imports_no_other_paper(paper):
    script = f"import sys, json, fairseq_plugins.{paper}.model; print(json.dumps([*sys.modules]))"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    rooms = {name.split(".")[1] for name in modules if name.startswith("fairseq_plugins.")}
    assert rooms == {paper, "segment_language_model", "fairseq_integration"}
