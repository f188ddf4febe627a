"""Options and vocabularies that do not fit are refused by name."""

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
BANDS = transformer_xl(CUTOFFS, 2)


@pytest.mark.parametrize(
    ("foreign", "changed", "named"),
    [
        (BANDS, {"n_token": 31}, "n_token is 31"),
        (BANDS, {"d_head": 9}, "d_head is 9"),
        (BANDS, {"d_embed": 8}, "d_embed is 8"),
        (BANDS, {"attn_type": 2}, "attn_type is 2"),
        (BANDS, {"ext_len": 4}, "ext_len is 4"),
        (BANDS, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        (BANDS, {"pre_lnorm": None}, "pre_lnorm is missing: it must be true or false"),
        (BANDS, {"mem_len": 2.0}, "mem_len is 2.0: it must be a whole number"),
        (BANDS, {"dropout": True}, "dropout is true: it must be a number"),
        (TENSORFLOW, {"same_length": None}, "same_length is missing"),
        (SPANS, {"vocab_size": 31}, "vocab_size is 31"),
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


def test_wrong_vocabularies_are_refused(tmp_path, import_error):
    late = BANDS._replace(symbols=[*SYMBOLS[5:], *SYMBOLS[:5]])
    assert "first 9 symbols" in import_error(late)
    for symbol in ("", "a b", "<pad>", "<eos>"):
        message = import_error(BANDS._replace(symbols=["<eos>", symbol, *SYMBOLS[5:-1], "<unk>"]))
        assert f"--vocab {tmp_path}/vocab.txt, line 2: {symbol!r}" in message
