"""Lets torch's safe loader read the option containers that fairseq's checkpoints hold."""

import argparse
import typing
from collections import defaultdict

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

# argparse.Namespace: options of models and optimizers that fairseq builds from parsed arguments
# (its translation transformer, sgd). The others: options as fairseq holds them in memory, and what
# stands for a tensor while worker 0 broadcasts the checkpoint that several workers resume from.
# numpy's: counts of n-grams, which --eval-bleu leaves in the meters of validation. All of them hold
# values and nothing that runs.
OPTION_CONTAINERS = [
    argparse.Namespace,
    DictConfig,
    ListConfig,
    ContainerMetadata,
    Metadata,
    AnyNode,
    _TensorPlaceholder,
    defaultdict,
    dict,
    list,
    int,
    typing.Any,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    # what an array's pickle calls to make an empty one, and a number's
    np.empty(0).__reduce__()[0],
    np.int64(0).__reduce__()[0],
]


def allow_option_containers() -> None:
    """Register fairseq's option containers with ``torch.load(weights_only=True)``."""
    torch.serialization.add_safe_globals(OPTION_CONTAINERS)
