"""A text has the same scores however a segment model reads it."""

import torch

from fairseq_plugins.segment_language_model.prompt_readers import SegmentReader
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


def precise_reader(model, segment):
    """Return a reader whose log-probabilities stay in double precision."""
    model.eval().get_normalized_probs = lambda output, **options: output[0].log_softmax(-1)
    return SegmentReader(model, segment)


@torch.no_grad()
def assert_generates_as(model, stream, expected, segment=6):
    """Check what generation reads: a prompt, then token by token, while streams change places."""
    length, order = stream.size(1), torch.arange(len(stream)).flip(0)
    # without recurrence, each segment of a prompt is read by itself
    reader = precise_reader(model, segment if model.decoder.network.mem_len else length)
    parts = list(reader.read_prompts(stream[:, : length // 2]))
    reader.select(order)
    for end in range(length // 2 + 1, length + 1):
        parts += [part[order] for part in reader.read(stream[order, :end])]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected.log_softmax(-1))
