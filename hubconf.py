"""``torch.hub.load("OWNER/REPOSITORY", "load", "checkpoints")``: what docs/python.md tells of."""

from fairseq_plugins import load  # noqa: F401 (torch.hub takes it from here)

dependencies = ["fairseq", "numpy", "torch"]
