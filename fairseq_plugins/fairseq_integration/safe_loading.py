"""What fairseq's checkpoints hold and torch's safe loader does not know by itself."""

import argparse
import typing
from collections import defaultdict

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

# All of them hold values, and none runs anything.
OPTION_CONTAINERS = [
    # options that fairseq parsed from words, as for its translation transformer and sgd
    argparse.Namespace,
    # options as fairseq holds them otherwise, and what those are made of
    DictConfig,
    ListConfig,
    ContainerMetadata,
    Metadata,
    AnyNode,
    defaultdict,
    dict,
    list,
    int,
    typing.Any,
    # a tensor's place, while worker 0 broadcasts the checkpoint that several workers resume from
    _TensorPlaceholder,
    # counts of n-grams, which --eval-bleu leaves in the meters of validation: arrays, numbers and
    # the functions that their pickles call to make empty ones
    np.ndarray,
    np.dtype,
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    np.empty(0).__reduce__()[0],
    np.int64(0).__reduce__()[0],
]


def allow_option_containers() -> None:
    """Register :data:`OPTION_CONTAINERS` with ``torch.load(weights_only=True)``."""
    torch.serialization.add_safe_globals(OPTION_CONTAINERS)
