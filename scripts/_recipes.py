"""Recipes as data, and the commands and configurations that they stand for."""

from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache
from typing import Any

import yaml

from scripts._shared.commands import FOLDER, as_installed, name_commands
from scripts.prepare._corpora import find_corpus, options_of

Options = dict[str, Any]
PAPERS = ("transformer_xl", "all_attention", "product_key_memory", "weighted_transformer")
ACTIONS = ("prepare", "train", "finish", "evaluate")
AVERAGE = "checkpoint_average.pt"
# In a recipe, and after an option of the user: a flag without value; an option that is left out.
YES, NO = "yes", "no"
# With --fp16, fairseq flattens all gradients into one tensor, which these optimizers cannot use.
UNFLATTENED = ("adam_with_memory", "adam_with_branch_weights")


@cache
def read_recipes(paper: str) -> dict[str, Any]:
    """Return a paper's recipes and groups; all values are texts."""
    # BaseLoader: 1e-7 and 0.00025 stay as they are written
    path = FOLDER / "examples" / paper / "recipes.yaml"
    return yaml.load(path.read_text("utf-8"), yaml.BaseLoader)


def merge(one: Options, other: Options) -> Options:
    """Return two trees of options in one; the second wins."""
    merged = dict(one)
    for name, value in other.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged


def load(paper: str, name: str) -> Options:
    """Return a recipe with the options of those that it extends."""
    entry = read_recipes(paper)["recipes"][name]
    parents = entry.get("extends", [])
    recipe: Options = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        recipe = merge(recipe, load(paper, parent))
    recipe.pop("what", None)
    recipe.pop("published", None)
    return merge(recipe, entry)


def find_recipes(words: list[str]) -> list[tuple[str, str]]:
    """Return the paper and the recipe of each name PAPER/NAME; a group stands for its recipes."""
    chosen: list[tuple[str, str]] = []
    for word in words:
        paper, _, name = word.partition("/")
        content = read_recipes(paper) if paper in PAPERS else {"recipes": {}, "groups": {}}
        public = [recipe for recipe in content["recipes"] if not recipe.startswith("_")]
        # a group has names, or patterns such as "english_size_*"
        patterns = content["groups"].get(name, [name])
        members = [recipe for p in patterns for recipe in public if fnmatch(recipe, p)]
        if not members:
            names = [f"{paper}/{each}" for each in (*public, *content["groups"])]
            near = get_close_matches(word, names, cutoff=0.7)
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            lists = name_commands("`python -m scripts.recipe` lists the names, PAPER/NAME")
            raise ValueError(f"there is no recipe {word}{meant}: {lists}")
        chosen += [(paper, member) for member in members if (paper, member) not in chosen]
    return chosen


def parse(words: list[str]) -> Options:
    """Return options by name, from words such as ``--lr 0.1 --bf16``."""
    options: Options = {}
    for number, word in enumerate(words):
        if word == "--":  # what follows is for fairseq-generate
            options[""] = words[number + 1 :]
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = [value] if equals else []
        else:
            options[name].append(word)
    return {name: value or YES for name, value in options.items()}


def to_words(options: Options, data: str, checkpoints: str = "") -> list[str]:
    """Return options as words of a command; folders replace DATA and CHECKPOINTS in values."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        if values == [NO]:
            continue
        words.append(f"--{name}")
        for text in [] if values == [YES] else values:
            if text.startswith("DATA/"):
                text = data + text.removeprefix("DATA")
            elif text.startswith("CHECKPOINTS/"):
                text = checkpoints + text.removeprefix("CHECKPOINTS")
            words.append(text)
    return words


def prepare_commands(recipe: Options, data: str, more: Options) -> list[list[str]]:
    """Return the command that writes DATA/bin, of the recipe's corpus or a text of the user."""
    ((name, step),) = [(name, step) for name, step in recipe["prepare"].items() if step != NO]
    if "input" in more:
        if recipe["options"]["task"] == "translation":
            raise ValueError(
                "--input is for a text in one language, and this recipe translates: prepare your "
                "pairs with `python -m scripts.prepare translation`"
            )
        unit = find_corpus(name)["defaults"]["unit"]
        taken = options_of(find_corpus("text"))
        step = {option: value for option, value in step.items() if option in taken}
        step.setdefault("unit", "characters" if unit == "bytes" else unit)
        name = "text"
    options = {**merge(step, more), "output": data}
    return [["python", "-m", "scripts.prepare", name, *to_words(options, data)]]


def train_commands(
    recipe: Options, action: str, data: str, checkpoints: str, more: Options
) -> list[list[str]]:
    """Return the commands of ``train`` or ``finish``."""
    options = merge(recipe["options"], recipe["train"])
    if action == "finish":
        options = merge(options, recipe["finish"])
    options = merge(options, more)
    if options["optimizer"] in UNFLATTENED and options.get("fp16", NO) != NO:
        options.setdefault("fp16-no-flatten-grads", YES)
    options.setdefault("log-format", "json")
    options = {"user-dir": "fairseq_plugins", **options, "save-dir": checkpoints}
    options.setdefault("log-file", f"{checkpoints}/train.log")
    commands = [["fairseq-train", f"{data}/bin", *to_words(options, data, checkpoints)]]
    if action == "finish" and "average" in recipe:
        target = f"{checkpoints}/{AVERAGE}"
        words = [checkpoints, "--last", recipe["average"], "--output", target]
        commands.append(["python", "-m", "scripts.convert.average", *words])
    return commands


def evaluate_commands(
    recipe: Options, data: str, checkpoints: str, more: Options
) -> list[list[str]]:
    """Return the commands of ``evaluate``: for translations, one for each of the outputs."""
    if recipe["options"]["task"] == "translation":
        options = {"path": "CHECKPOINTS/checkpoint_last.pt", **recipe["options"], "task": NO}
        options = merge(options, recipe["evaluate"])
        commands = []
        for folder, output in recipe["outputs"].items():
            if output != NO:
                words = merge({**options, **output, "output": f"CHECKPOINTS/{folder}"}, more)
                command = ["python", "-m", "scripts.evaluate.translation", f"{data}/bin"]
                commands.append([*command, *to_words(words, data, checkpoints)])
        return commands
    options = {"user-dir": "fairseq_plugins", **recipe["options"]}
    options |= {"path": "CHECKPOINTS/checkpoint_best.pt", "gen-subset": "test"}
    options = merge({**options, "distributed-world-size": "1"}, merge(recipe["evaluate"], more))
    return [["fairseq-eval-lm", f"{data}/bin", *to_words(options, data, checkpoints)]]


def commands(
    paper: str,
    name: str,
    action: str,
    data: str = "DATA",
    checkpoints: str = "CHECKPOINTS",
    more: Options | None = None,
) -> list[list[str]]:
    """Return the words of each command of an action."""
    recipe, more = load(paper, name), more or {}
    if not isinstance(recipe.get(action), dict):
        raise ValueError(f"{paper}/{name} has no action {action}: `show` prints what there is")
    if action == "prepare":
        todo = prepare_commands(recipe, data, more)
    elif action == "evaluate":
        todo = evaluate_commands(recipe, data, checkpoints, more)
    else:
        todo = train_commands(recipe, action, data, checkpoints, more)
    return [as_installed(words) for words in todo]


def needs(recipe: Options) -> str:
    """Return what a recipe's training needs: how much it reads, and how long that takes."""
    train = merge(recipe["options"], recipe["train"])
    tokens = ""
    if train.get("max-update") not in (None, "1000000"):
        number = int(train["max-update"]) * int(train.get("update-freq", 1))
        if "max-tokens" in train:
            number *= int(train["max-tokens"])
        else:
            number *= int(train["batch-size"]) * int(train["tokens-per-sample"])
        tokens = f"reads {'at most ' * ('max-tokens' in train)}{number / 1e6:,.0f} million tokens; "
    unknown = "unknown, not timed here; divide the tokens by the wps of the first log lines"
    return f"{tokens}hours: {recipe.get('hours', unknown)}"


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
    # checkpoints beside train.log; a sweep has a folder for each training, and multirun.yaml above
    folder = config["checkpoint"]["save_dir"]
    config["checkpoint"]["save_dir"] = "${hydra:runtime.output_dir}"
    config["hydra"] = {
        "run": {"dir": folder},
        "sweep": {"dir": folder, "subdir": "${hydra.job.num}"},
        "job": {"name": "train", "chdir": False},
        "output_subdir": None,
    }
    return yaml.safe_dump(config, sort_keys=False)
