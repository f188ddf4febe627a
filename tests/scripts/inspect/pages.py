"""Pages of tiny models with random weights, one for each paper."""

from scripts.inspect import __main__ as inspect
from tests.scripts.evaluate.saved_memory_models import write_all
from tests.scripts.evaluate.saved_models import write_checkpoint

TOKENS = 40
# models by their names, and the data that their pages show
MODELS = dict.fromkeys(("recurrent", "spans", "blocks", "streams"), "text") | {"pairs": "pairs"}


def write_models(folder):
    """Write a checkpoint for each of MODELS, and the data; return the folder."""
    write_all(folder)
    write_checkpoint(folder / "recurrent.pt", "transformer_xl", mem_len=5)
    spans = {"adaptive_span": True, "span_ramp": 2, "span_init": 0.5}
    write_checkpoint(folder / "spans.pt", "all_attention_lm", attention_span=6, **spans)
    return folder


def write_page(folder, name, *options):
    """Write the page of a model; return its path."""
    page = folder / f"{name}.html"
    words = [folder / f"{name}.pt", "--data", folder / MODELS[name], "--tokens", TOKENS, *options]
    assert inspect.main([*map(str, words), "--output", str(page)]) == 0
    return page
