"""The configuration for fairseq-hydra-train that says what a fairseq-train command does."""

from typing import Any

import yaml


def hydra_configuration(words: list[str]) -> str:
    """Return what the words of a fairseq-train command say as YAML for fairseq-hydra-train."""
    from argparse import Namespace

    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
    from omegaconf import OmegaConf

    from fairseq_plugins.fairseq_integration.registration import register

    register()
    namespace = options.parse_args_and_arch(options.get_training_parser(), words)
    groups = OmegaConf.to_container(convert_namespace_to_omegaconf(namespace), enum_to_str=True)
    preset = Namespace()
    ARCH_CONFIG_REGISTRY[namespace.arch](preset)
    if not isinstance(groups["model"], dict):
        groups["model"] = vars(groups["model"])
    # others refer to the first group that has an option
    order = ["common", "dataset", "optimization", "distributed_training", "checkpoint"]
    order += ["task", "model", "criterion", "optimizer", "lr_scheduler"]
    wanted = {"data", *vars(preset)}
    wanted |= {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    # Hydra writes each training's log
    wanted.discard("log_file")
    config: dict[str, Any] = {}
    for group in order:
        values = {name: groups[group][name] for name in wanted & groups[group].keys()}
        if groups[group].get("_name"):
            values["_name"] = groups[group]["_name"]
        config[group] = dict(sorted(values.items()))
        wanted -= values.keys()
    config["model"] = {**config["model"], "_name": ARCH_MODEL_NAME_REGISTRY[namespace.arch]}
    config["model"].pop("arch", None)
    # train.log beside the checkpoints, also in a sweep whose trainings have a folder each
    folder = "${checkpoint.save_dir}"
    config["hydra"] = {
        "run": {"dir": folder},
        "sweep": {"dir": folder, "subdir": "."},
        "job": {"name": "train", "chdir": False},
        "output_subdir": None,
    }
    return yaml.safe_dump(config, sort_keys=False)
