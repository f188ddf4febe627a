"""The lag of batch norm in the log of a validation, and its warning."""

import pytest
import torch
from fairseq.logging import metrics

from fairseq_plugins.product_key_memory import usage_log
from tests.product_key_memory.layer import BATCH_NORM, TOKENS, D, draw, exact_memory


def validate(memory, *batches):
    """Return what a validation logs."""
    memory.eval()
    with metrics.aggregate(new_root=True) as logged, torch.no_grad():
        for batch in batches:
            memory(batch)
    return logged.get_smoothed_values()


def test_a_validation_logs_the_lag_and_warns_of_a_large_one_once(caplog):
    memory, x = exact_memory(**BATCH_NORM), draw(4 * TOKENS, D).detach()
    usage_log.UsageLog(memory, "memory5")
    norm, queries = memory.query.batch_norm, memory.query.layers(x).detach()
    for shift in (0.1, 3.0, 5.0):
        norm.running_var.copy_(queries.var(0))
        norm.running_mean.copy_(queries.mean(0) - shift * queries.std(0))
        # an evaluation, which is not logged, and two validations of the same tokens
        memory.eval()(x + 1)
        for batches in ([x], x.split([5, 1, len(x) - 6])):
            logged = validate(memory, *batches)
            assert logged["memory5_lag"] == pytest.approx(shift, rel=1e-3)
            assert logged.keys() == {f"memory5_{name}" for name in ("lag", "usage", "kl")}
        warnings = [text for text in caplog.messages if "lag behind the queries of memory5" in text]
        assert len(warnings) == (shift > 1)
