"""``torch.hub.load("OWNER/REPOSITORY", "load", "checkpoints")``; see docs/python.md."""

from fairseq_plugins import load  # noqa: F401 (torch.hub takes it from here)

dependencies = ["fairseq", "numpy", "torch"]
