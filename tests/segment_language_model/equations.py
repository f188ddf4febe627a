"""A network that reads a text in segments, against its paper's equations."""

import torch

from tests.gradients import assert_same
from tests.segment_language_model.networks import STREAMS, TOKENS, draw


def assert_equals_the_equations(network, reference):
    """Compare outputs and gradients of segments of 5, 1 and 6 tokens; pasts have no gradient.

    ``reference`` maps network, segment (T, d) and past of one stream to outputs and inputs.
    """
    x, sizes = draw().requires_grad_(), [5, 1, TOKENS - 6]
    outputs, past = [], None
    for segment in x.split(sizes, dim=1):
        y, past = network(segment, past)
        outputs.append(y)
    expected = []
    for stream in range(STREAMS):
        past, rows = None, []
        for segment in x[stream].split(sizes):
            y, inputs = reference(network, segment, past)
            past = [context.detach() for context in inputs]
            rows.append(y)
        expected.append(torch.cat(rows))
    assert_same(torch.cat(outputs, dim=1), torch.stack(expected), [x, *network.parameters()])
