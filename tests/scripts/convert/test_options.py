"""Options and vocabularies that do not fit are import_error by name."""

import pytest

from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    run_importer,
    transformer_xl,
    transformer_xl_tensorflow,
)

SPANS = adaptive_span(cutoffs=CUTOFFS)
TENSORFLOW = transformer_xl_tensorflow(CUTOFFS, 2)
HUGGING_FACE = transformer_xl(CUTOFFS, 2, hugging_face=True)
BANDS = transformer_xl(CUTOFFS, 2)
LATE_CUTOFFS = {"adapt_io_params": {"adapt_io_enabled": True, "adapt_io_cutoffs": [9, 30]}}


@pytest.mark.parametrize(
    ("foreign", "changed", "named"),
    [
        (BANDS, {"n_token": 31}, "31 symbols"),
        (BANDS, {"d_head": 9}, "d_head is 9"),
        (BANDS, {"d_embed": 8}, "d_embed is 8"),
        (BANDS, {"attn_type": 2}, "attn_type is 2"),
        (BANDS, {"ext_len": 4}, "ext_len is 4"),
        (BANDS, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        (BANDS, {"cutoffs": [9, 16, 30]}, "cutoffs end at 30"),
        (BANDS, {"pre_lnorm": None}, "pre_lnorm is missing"),
        *((BANDS, {"mem_len": value}, "mem_len is") for value in (-1, 2.0, True)),
        *((BANDS, {"dropout": value}, "dropout is") for value in (1, True, float("nan"))),
        *((BANDS, {"cutoffs": x}, "cutoffs is") for x in ([2, 1], [0, 1], [1.0], 3)),
        *((BANDS, {"tie_projs": x}, "tie_projs is") for x in ([True] * 3, [True, 0, 1, True])),
        (HUGGING_FACE, {"vocab_size": 31}, "31 symbols"),
        (TENSORFLOW, {"n_token": 31}, "31 symbols"),
        (TENSORFLOW, {"cutoffs": []}, "div_val is 2"),
        (TENSORFLOW, {"same_length": None}, "same_length is missing"),
        (SPANS, {"vocab_size": 31}, "31 symbols"),
        (SPANS, LATE_CUTOFFS, "adapt_io_cutoffs end at 30"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, import_error, foreign, changed, named):
    error = import_error(foreign._replace(config={**foreign.config, **changed}))
    assert named in error
    assert f"--config {tmp_path}/config.json" in error


def test_options_with_defaults_in_the_original_code_may_be_missing(tmp_path):
    foreign = transformer_xl_tensorflow(CUTOFFS, 1)
    for name in ("untie_r", "div_val", "proj_share_all_but_first", "proj_same_dim", "d_embed"):
        del foreign.config[name]
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 0


@pytest.mark.parametrize("foreign", [BANDS, TENSORFLOW, SPANS])
def test_wrong_vocabularies_are_refused(tmp_path, import_error, foreign):
    late = foreign._replace(symbols=[*SYMBOLS[5:], *SYMBOLS[:5]])
    assert "first 9 symbols" in import_error(late)
    for symbol in ("", "a b", "<pad>", "w5"):
        message = import_error(foreign._replace(symbols=["<eos>", symbol, *SYMBOLS[5:-1], "<unk>"]))
        assert f"--vocab {tmp_path}/vocab.txt, line " in message
        assert repr(symbol) in message
