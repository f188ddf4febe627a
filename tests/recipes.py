"""The recipes of examples/, and the models that they train, without weights."""

import argparse
from pathlib import Path

import torch
from fairseq.models import build_model

from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts import recipe
from scripts.docs.tables import configuration, count_parameters, dictionary, parse

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = [
    (paper, name)
    for paper in recipe.PAPERS
    for name in recipe.read_recipes(paper)["recipes"]
    if not name.startswith("_")
]
# a warning about fairseq's use of Hydra
HYDRA = r"ignore:[\s\S]*is validated against ConfigStore:UserWarning"


def count(paper, name):
    """Return the number of parameters of a recipe's model."""
    entry = recipe.load(paper, name)
    joint = dictionary(int(entry["symbols"]))
    task = argparse.Namespace(source_dictionary=joint, target_dictionary=joint)
    if entry["options"]["task"] == "segment_language_modeling":
        task = SegmentLanguageModelingTask(argparse.Namespace(data=None), joint)
    options = configuration(parse(recipe.commands(paper, name, "train")[0][1:]))
    with torch.device("meta"):
        return count_parameters(build_model(options, task))
