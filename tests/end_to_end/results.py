"""What training wrote: the weights of its last checkpoint, its figures for TensorBoard."""

import torch
from tensorboardX.proto.event_pb2 import Event

from fairseq_plugins.fairseq_integration.registration import register

# lets torch's safe loader read fairseq's options
register()

EXACT = {"rtol": 0, "atol": 0}


def parameters(folder):
    """Weights of the last checkpoint, read by torch's safe loader."""
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def assert_equal(one, other, **tolerance):
    """All weights of two models agree."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **tolerance, msg=name)


def scalars(board, split):
    """Tag to values of a TensorBoard folder, read record by record."""
    found = {}
    for path in (board / split).iterdir():
        content, place = path.read_bytes(), 0
        while place < len(content):
            length = int.from_bytes(content[place : place + 8], "little")
            event = Event.FromString(content[place + 12 : place + 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(value.simple_value)
            place += 16 + length
    return found
