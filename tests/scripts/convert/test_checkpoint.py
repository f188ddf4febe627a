"""Converted models have the original's probabilities, and carry what a training leaves."""

from itertools import pairwise

import pytest
import torch
from fairseq import checkpoint_utils

import fairseq_plugins
from fairseq_plugins.units import loss_unit, read_units
from scripts.convert import checkpoint
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    importer_words,
    transformer_xl,
    transformer_xl_tensorflow,
)
from tests.tiny import scores_by_segment

TOLERANCE = 2e-4
WITHOUT_UNK = [symbol for symbol in SYMBOLS if symbol != "<unk>"]


def with_biases_in_each_layer():
    foreign = transformer_xl(hugging_face=True, untie_r=False)
    names = [f"layers.{n}.dec_attn.{name}" for n in (0, 1) for name in ("r_w_bias", "r_r_bias")]
    again = {f"transformer.{x}": foreign.tensors[f"transformer.{x[-8:]}"] for x in names}
    return foreign._replace(tensors={**foreign.tensors, **again})


def with_older_names():
    foreign = transformer_xl(CUTOFFS, 2, hugging_face=True)
    config = dict(foreign.config)
    config["n_token"] = config.pop("vocab_size")
    config["tie_weight"] = config.pop("tie_word_embeddings")
    return foreign._replace(config=config)


def with_default_options():
    foreign = transformer_xl_tensorflow(CUTOFFS)
    for name in ("untie_r", "div_val", "proj_share_all_but_first", "proj_same_dim", "d_embed"):
        del foreign.config[name]
    return foreign


LIMITED = {"same_length": True, "clamp_len": 6}
LAYOUTS = {
    "txl-plain": transformer_xl(),
    "txl-plain-untied": transformer_xl(tied=False, untie_r=True),
    "txl-pre-lnorm": transformer_xl(pre_lnorm=True, symbols=WITHOUT_UNK),
    "txl-div1": transformer_xl(CUTOFFS),
    "txl-div1-untied": transformer_xl(CUTOFFS, tied=False, mem_len=0),
    "txl-div2": transformer_xl(CUTOFFS, 2),
    "txl-div2-all-projections-tied": transformer_xl(CUTOFFS, 2, tie_projs=[True] * 4, **LIMITED),
    "txl-div2-no-projection-tied": transformer_xl(CUTOFFS, 2, tie_projs=[False] * 4),
    "txl-div2-some-projections-tied": transformer_xl(CUTOFFS, 2, tie_projs=[True, False] * 2),
    "txl-div2-untied-but-for-projections": transformer_xl(CUTOFFS, 2, tied=False),
    "hf-plain": transformer_xl(hugging_face=True),
    "hf-div2": transformer_xl(CUTOFFS, 2, hugging_face=True),
    "hf-div2-untied-pre-lnorm": transformer_xl(
        CUTOFFS, 2, False, hugging_face=True, symbols=WITHOUT_UNK, pre_lnorm=True, **LIMITED
    ),
    "hf-shared-biases-in-each-layer": with_biases_in_each_layer(),
    "hf-older-names": with_older_names(),
    "tf-plain": transformer_xl_tensorflow(same_length=True),
    "tf-div1": transformer_xl_tensorflow(CUTOFFS, untie_r=True, clamp_len=6),
    "tf-div2": transformer_xl_tensorflow(CUTOFFS, 2, untie_r=True),
    "tf-div2-none-shared": transformer_xl_tensorflow(CUTOFFS, 2, False, symbols=WITHOUT_UNK),
    "tf-div2-first-not-projected": transformer_xl_tensorflow(CUTOFFS, 2, True, False, **LIMITED),
    "tf-defaults": with_default_options(),
    "span-ff-fixed": adaptive_span(0, adaptive=False),
    "all-attention": adaptive_span(far=25.0),
    "all-attention-fixed": adaptive_span(adaptive=False),
    "all-attention-trimmed": adaptive_span(span=80, spans=(0.013, 0.093, 0.022, 0.004), far=25.0),
    "all-attention-adaptive-io": adaptive_span(cutoffs=CUTOFFS, symbols=WITHOUT_UNK),
    "span-ff-adaptive-io-untied": adaptive_span(0, cutoffs=CUTOFFS, tied=False),
}


def load(output):
    """Load an imported model and its dictionary as fairseq's commands do."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(output / "checkpoint.pt")], arg_overrides={"data": str(output)}
    )
    return models[0].eval(), task.dictionary


def run_importer(foreign, folder, name="model.pt", options=()):
    """Run the importer on the files in a folder; return its exit status."""
    words = importer_words(foreign.source, folder, name)
    return checkpoint.main([*words, "--output", f"{folder}/output", *options])


def imported(foreign, folder, name="model.pt", leave_out=(), options=()):
    foreign.write(folder, name, leave_out)
    assert run_importer(foreign, folder, name, options) == 0
    return load(folder / "output")


def stream(foreign):
    """Return indices in the original's vocabulary, including those of <eos> and <unk>."""
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(len(foreign.symbols), generator=generator).repeat(2)[:40].tolist()


def our_numbers(foreign, dictionary):
    """Return the index in fairseq's dictionary for each of the original's symbols."""
    return torch.tensor(
        [dictionary.index("</s>" if symbol == "<eos>" else symbol) for symbol in foreign.symbols]
    )


@torch.no_grad()
def check_log_probabilities(foreign, model, dictionary):
    """Compare log p of all symbols after each token of a stream, read in segments with a memory."""
    numbers = our_numbers(foreign, dictionary)
    output = scores_by_segment(model, numbers[stream(foreign)][None], 7), None
    scores = model.get_normalized_probs(output, log_probs=True)[0]
    expected = foreign.log_probabilities(stream(foreign))
    assert (scores[:, numbers] - expected).abs().max().item() < TOLERANCE
    # probabilities sum to 1, and made-up symbols have probability 0
    probabilities = scores.exp()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(probabilities)))
    made_up = sorted(set(range(len(dictionary))) - set(numbers.tolist()))
    assert len(foreign.symbols) + len(made_up) == len(dictionary) == probabilities.size(1)
    assert not probabilities[:, made_up].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_log_probability_is_the_originals(tmp_path, layout):
    foreign = LAYOUTS[layout]
    model, dictionary = imported(foreign, tmp_path)
    check_log_probabilities(foreign, model, dictionary)
    norms = {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)}
    assert norms == {1e-12 if layout.startswith("tf") else 1e-5}
    if foreign.source == "adaptive-span":
        # dropout in the feed-forward layer, which models with persistent vectors lack
        activation = 0.0 if foreign.config["pers_mem_params"]["pers_mem_size"] else 0.1
        expected = {"embed-": 0.05, "output-": 0.05, "attention-": 0.1, "activation-": activation}
    else:
        expected = {"": 0.1, "embed-": 0.1, "output-": 0.1, "attention-": 0.05, "activation-": 0.1}
    words = (tmp_path / "output" / "options.txt").read_text(encoding="utf-8").split()
    options = dict(pairwise(words))
    assert {kind: float(options[f"--{kind}dropout"]) for kind in expected} == expected


@pytest.mark.parametrize("present", ["first", "second"])
@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("model.safetensors", transformer_xl(CUTOFFS, 2, True, [True] * 4, hugging_face=True)),
        ("checkpoint.pt", adaptive_span(cutoffs=CUTOFFS)),
    ],
)
def test_a_file_may_have_either_name_of_a_tied_tensor(tmp_path, name, foreign, present):
    names = {}
    for key, tensor in foreign.tensors.items():
        names.setdefault(tensor.data_ptr(), []).append(key)
    absent = slice(1, None) if present == "first" else slice(None, -1)
    left_out = [key for tied in names.values() for key in tied[absent]]
    assert len(left_out) >= 7
    check_log_probabilities(foreign, *imported(foreign, tmp_path, name, tuple(left_out)))


def test_half_precision_within_a_trainings_checkpoint_is_read(tmp_path):
    foreign = transformer_xl()
    half = {name: tensor.half() for name, tensor in foreign.tensors.items()}
    foreign = foreign._replace(tensors=half)
    foreign.write(tmp_path)
    torch.save({"state_dict": half, "epoch": 3}, tmp_path / "model.pt")
    assert run_importer(foreign, tmp_path) == 0
    model, dictionary = load(tmp_path / "output")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    check_log_probabilities(foreign, model, dictionary)


@pytest.mark.parametrize(
    ("symbols", "options", "unit"),
    [
        (["<eos>", *map(str, range(97, 126))], (), "bytes"),
        (["_", *"abcdefghijklmnopqrstuvwxyzäöü"], (), "characters"),
        (SYMBOLS, ("--unit", "subwords"), "subwords"),
    ],
)
def test_import_writes_its_unit_and_refuses_another_dictionary(tmp_path, symbols, options, unit):
    # the other dictionary is of the same size
    imported(transformer_xl(symbols=symbols), tmp_path, options=options)
    output = tmp_path / "output"
    assert read_units(output).unit == unit
    assert fairseq_plugins.load(output).unit == loss_unit(unit)
    lines = (output / "dict.txt").read_text(encoding="utf-8").splitlines()
    (output / "dict.txt").write_text("\n".join(lines[::-1]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="was trained with another dictionary"):
        load(output)


def test_a_vocabulary_without_line_ends_is_imported(tmp_path):
    foreign = transformer_xl()
    foreign = foreign._replace(symbols=[f"c{number}" for number in range(30)])
    model, dictionary = imported(foreign, tmp_path)
    check_log_probabilities(foreign, model, dictionary)
    tokens = our_numbers(foreign, dictionary)[stream(foreign)][None]
    with torch.no_grad():
        output = model(tokens)
        # padding is not text
        tokens[0, -3:] = dictionary.pad()
        model.get_normalized_probs(output, True, {"target": tokens})
        for symbol in ("</s>", "<unk>"):
            tokens[0, 5] = dictionary.index(symbol)
            with pytest.raises(ValueError, match=f"the text has {symbol}"):
                model.get_normalized_probs(output, True, {"target": tokens})


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, 130), (RuntimeError("no room"), 1)]
)
def test_an_output_is_written_whole_and_replaces_nothing(tmp_path, monkeypatch, error, status):
    foreign, output = transformer_xl(), tmp_path / "output"
    foreign.write(tmp_path)

    def fail(state, path):
        path.write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        assert run_importer(foreign, tmp_path) == status
    assert not list(tmp_path.glob("output*"))
    # left by a killed run
    (tmp_path / "output.partial-1").mkdir()
    (tmp_path / "output.partial-1" / "left").touch()
    assert run_importer(foreign, tmp_path) == 0
    assert [path.name for path in tmp_path.glob("output*")] == ["output"]
    assert not (output / "left").exists()
    (output / "options.txt").write_text("mine")
    assert run_importer(foreign, tmp_path) == 1
    assert (output / "options.txt").read_text() == "mine"
