"""Rooms import in one direction, and layers know no options: what the package says of itself.

Sources are parsed, not imported: imports within functions count too.
"""

import ast
import re

import pytest

from tests.end_to_end.commands import ROOT

PACKAGE = "fairseq_plugins"
# the other rooms that a room may import from
ROOMS = {
    "fairseq_integration": set(),
    "product_key_memory": {"fairseq_integration"},
    "weighted_transformer": {"fairseq_integration"},
    "segment_language_model": {"product_key_memory", "fairseq_integration"},
    "transformer_xl": {"segment_language_model", "product_key_memory", "fairseq_integration"},
    "all_attention": {"segment_language_model", "product_key_memory", "fairseq_integration"},
    "python_interface": {"segment_language_model", "fairseq_integration"},
}
# files that know tensors and arguments, and no options
LAYERS = [
    *("segment_language_model/attention", "segment_language_model/attention_blocks"),
    *("segment_language_model/attention_kernel", "segment_language_model/key_value_cache"),
    *("segment_language_model/layer", "segment_language_model/positions"),
    "segment_language_model/recurrence",
    "transformer_xl/layers",
    *("all_attention/adaptive_span", "all_attention/persistent_vectors"),
    *("product_key_memory/cpu_kernels", "product_key_memory/memory", "product_key_memory/query"),
    *("product_key_memory/search", "product_key_memory/sharding", "product_key_memory/usage"),
    *("product_key_memory/value_table", "product_key_memory/values"),
    *("weighted_transformer/attention", "weighted_transformer/branch_weights"),
    *("weighted_transformer/layers", "weighted_transformer/as_written_attention"),
    "weighted_transformer/as_written_layers",
]
# files of the shared model to which all-attention adds spans and persistent vectors from outside
PLAIN = [
    f"segment_language_model/{name}"
    for name in (
        *("attention", "attention_blocks", "attention_kernel", "decoder", "key_value_cache"),
        *("layer", "model", "positions", "recurrence", "stream_iterator", "streams"),
    )
]
OPTION = re.compile(r"--[a-z]")
ADDITION = re.compile(r"span|persistent", re.IGNORECASE)
# which are not in a room, and import from all of them
OUTSIDE = {"scripts", "tests"}


def read(name):
    """The source of a file of the package, such as "transformer_xl/model"."""
    return (ROOT / PACKAGE / f"{name}.py").read_text(encoding="utf-8")


def files(folder):
    """The names of the files in a folder of the package, as ``read`` takes them."""
    base = ROOT / PACKAGE
    return [
        path.relative_to(base).with_suffix("").as_posix() for path in (base / folder).rglob("*.py")
    ]


def called(node):
    """The name of the function that a node calls; None for another node."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", None))


def imports(source, name):
    """The dotted names that a file imports, wherever in it."""
    module = [PACKAGE, *name.split("/")]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = [*module[: -node.level], node.module] if node.level else [node.module]
            found |= {".".join(filter(None, [*origin, alias.name])) for alias in node.names}
        elif called(node) in ("import_module", "__import__"):
            found |= {
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            }
    return found


def wrong_imports(source, name):
    """What a file of a room imports, and may not."""
    room = name.split("/")[0]
    allowed = {room} | ROOMS[room]
    return [
        found
        for found in sorted(imports(source, name))
        for top, part in [(found + ".").split(".")[:2]]
        if top in OUTSIDE or (top == PACKAGE and part not in allowed)
    ]


def code(source):
    """All nodes of a source but its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del node.body[0]
    return list(ast.walk(tree))


def options(source):
    """The texts of a source, outside of docstrings, that name an option."""
    nodes = code(source)
    formatted = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    # a value that is put into a text may be the name of an option
    texts = [
        "".join(part.value if isinstance(part, ast.Constant) else "x" for part in parts)
        for parts in formatted
    ]
    parts = {part for parts in formatted for part in parts}
    texts += [node.value for node in nodes if isinstance(node, ast.Constant) and node not in parts]
    return [text for text in texts if isinstance(text, str) and OPTION.search(text)]


def additions(source):
    """The names in a source, outside of docstrings, that tell of spans or persistent vectors."""
    nodes = code(source)
    # torch's word for a buffer that checkpoints hold
    buffers = {
        keyword
        for node in nodes
        if called(node) == "register_buffer"
        for keyword in node.keywords
        if keyword.arg == "persistent"
    }
    names = {
        getattr(node, field, None)
        for node in nodes
        if node not in buffers
        # of names, attributes, arguments, definitions and what is imported
        for field in ("id", "attr", "arg", "name", "asname", "module")
    }
    return sorted(name for name in names if isinstance(name, str) and ADDITION.search(name))


def test_there_are_no_other_rooms():
    found = {name.split("/")[0] for name in files(".") if "/" in name}
    assert found == {*ROOMS, "modules"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_those_below_it(room):
    wrong = {name: wrong_imports(read(name), name) for name in files(room)}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_modules_hold_nothing_of_their_own():
    assert files("modules") == ["modules/__init__"]
    docstring, *statements, exports = ast.parse(read("modules/__init__")).body
    assert isinstance(docstring, ast.Expr)
    assert {type(statement) for statement in statements} == {ast.ImportFrom}
    named = {alias.name for statement in statements for alias in statement.names}
    assert isinstance(exports, ast.Assign)
    assert set(ast.literal_eval(exports.value)) == named


def test_nobody_in_the_package_imports_the_modules():
    modules = f"{PACKAGE}.modules"
    importing = [
        name for name in files(".") if any(modules in x for x in imports(read(name), name))
    ]
    assert importing == []


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_names_no_option(name):
    assert options(read(name)) == []


@pytest.mark.parametrize("name", PLAIN)
def test_the_shared_model_knows_nothing_of_spans_and_persistent_vectors(name):
    assert additions(read(name)) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        (
            "all_attention/a",
            "import torch\nfrom fairseq_plugins.segment_language_model import b",
            [],
        ),
        ("all_attention/a", "from . import b\nfrom .b import c\nimport fairseq.tasks.d", []),
        ("all_attention/a", "from ..transformer_xl.b import c", ["transformer_xl.b.c"]),
        ("all_attention/a", "from fairseq_plugins import transformer_xl", ["transformer_xl"]),
        ("all_attention/a/b", "from ... import transformer_xl", ["transformer_xl"]),
        (
            "transformer_xl/a",
            "def f():\n  import fairseq_plugins.all_attention.b",
            ["all_attention.b"],
        ),
        (
            "product_key_memory/a",
            "if x:\n  from ..segment_language_model import b",
            ["segment_language_model.b"],
        ),
        ("fairseq_integration/a", "from fairseq_plugins.modules import B", ["modules.B"]),
        (
            "weighted_transformer/a",
            "import importlib\nimportlib.import_module('fairseq_plugins.all_attention')",
            ["all_attention"],
        ),
    ],
)
def test_a_wrong_import_would_be_found(name, source, wrong):
    assert wrong_imports(source, name) == [f"{PACKAGE}.{found}" for found in wrong]


@pytest.mark.parametrize(
    "source",
    [
        "import tests.tiny",
        "def f():\n  from scripts import download",
        "import scripts.evaluate.translation",
        "import fairseq_plugins",
    ],
)
@pytest.mark.parametrize("room", ROOMS)
def test_no_room_may_import_what_imports_it(room, source):
    assert len(wrong_imports(source, f"{room}/a")) == 1


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Of --slots."""\nclass A:\n  """Of --slots."""\n  def f():\n    """--slots"""', 0),
        ("a = '`slots` is 5 -- or - 5'  # not --slots", 0),
        ("raise ValueError('--slots is 5')", 1),
        ("f'--slots is {a}'", 1),
        ("f'--{option} is {a}'", 1),
        ("def f():\n  '''Docstring.'''\n  '--slots'", 1),
    ],
)
def test_an_option_in_a_layer_would_be_found(source, count):
    assert len(options(source)) == count


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("'''Of spans.'''\na = 'span'  # span", []),
        ("self.register_buffer('a', b, persistent=False)", []),
        ("f(persistent=False)", ["persistent"]),
        ("self.span = adaptiveSpans", ["adaptiveSpans", "span"]),
        ("def span_loss(a, *spans): ...", ["span_loss", "spans"]),
        ("class PersistentVectors: ...", ["PersistentVectors"]),
        ("from a.spans import b as Span", ["Span", "a.spans"]),
        ("import span", ["span"]),
        ("x.expand(2)", []),
    ],
)
def test_an_addition_to_the_shared_model_would_be_found(source, found):
    assert additions(source) == found
