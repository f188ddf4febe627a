"""A text has the same scores however a segment model reads it."""

import torch

from tests.tiny import scores_by_segment


def assert_reads_as(model, stream, expected, lengths=(1, 7)):
    """Check the scores of a stream (B, T), read in segments of each of the lengths and as a whole.

    Training keeps hidden states, evaluation without gradients keeps keys and values.
    """
    for length in (*lengths, stream.size(1)):
        # reading token by token is slow, so skip evaluation with gradients
        for training in (True,) if length == 1 else (True, False):
            scores = scores_by_segment(model.train(training), stream, length, torch.enable_grad)
            torch.testing.assert_close(scores, expected)
        torch.testing.assert_close(scores_by_segment(model, stream, length), expected)
    torch.testing.assert_close(model(stream)[0], expected)


@torch.no_grad()
def assert_generates_as(model, stream, expected):
    """Check the scores of token-by-token generation, in which the streams change their order."""
    length, order, state = stream.size(1), torch.arange(len(stream)).flip(0), {}
    model.eval()
    steps = []
    for end in range(1, length + 1):
        if end == length // 2:
            model.decoder.reorder_incremental_state(state, order)
            stream, expected = stream[order], expected[order]
            steps = [step[order] for step in steps]
        steps.append(model.decoder(stream[:, :end], incremental_state=state)[0])
    assert {step.size(1) for step in steps} == {1}
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)
