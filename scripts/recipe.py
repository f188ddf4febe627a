"""Recipes: published settings, and small ones, as data in examples/<paper>/recipes.yaml.

    python -m scripts.recipe                                list all, with groups for tables
    python -m scripts.recipe PAPER/NAME show                print the commands, run nothing
    python -m scripts.recipe PAPER/NAME prepare DATA        then fairseq reads DATA/bin
    python -m scripts.recipe PAPER/NAME train DATA CHECKPOINTS
    python -m scripts.recipe PAPER/NAME finish DATA CHECKPOINTS     a last phase, if there is one
    python -m scripts.recipe PAPER/NAME evaluate DATA CHECKPOINTS
    python -m scripts.recipe results OUT [--to-reach LOSS]

Options at the end win over those of the recipe; "--option no" takes one back. `prepare` passes
--from and --mirror to the download, other options to the command that writes DATA/bin. `show
--hydra` prints a configuration for fairseq-hydra-train.

Several names, names of groups, or --seeds 1 2 make tables: train, finish and evaluate then read
and write OUT/PAPER/NAME/SEED in place of CHECKPOINTS, one after another, and pass over what is
complete. `results` prints one table of them.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from scripts._recipe_results import results_table
from scripts._shared.commands import ROOT, format_command, program

Options = dict[str, Any]
EXAMPLES = ROOT / "examples"
PAPERS = ("transformer_xl", "all_attention", "product_key_memory", "weighted_transformer")
ACTIONS = ("prepare", "train", "finish", "evaluate")
# In a recipe, and after an option of the user: a flag without value; an option that is left out.
YES, NO = "yes", "no"
PRECISIONS = ("fp16", "bf16", "amp")
# Options of the download, the first command of a preparation.
OF_DOWNLOAD = ("from", "mirror")


@cache
def read(paper: str) -> dict[str, Any]:
    """Return a paper's recipes, groups and explanations; all values are texts."""
    # BaseLoader: 1e-7 and 0.00025 stay as they are written
    return yaml.load((EXAMPLES / paper / "recipes.yaml").read_text("utf-8"), yaml.BaseLoader)


def merge(one: Options, other: Options) -> Options:
    """Return two trees of options in one; the second wins."""
    merged = dict(one)
    for name, value in other.items():
        old = merged.get(name)
        merged[name] = (
            merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def load(paper: str, name: str) -> Options:
    """Return a recipe with all that it extends."""
    recipes = read(paper)["recipes"]
    recipe: Options = {}
    parents = recipes[name].get("extends", [])
    for parent in [parents] if isinstance(parents, str) else parents:
        recipe = merge(recipe, load(paper, parent))
    for own in ("what", "published", "parameters"):
        recipe.pop(own, None)
    return merge(recipe, recipes[name])


def names(words: list[str]) -> list[tuple[str, str]]:
    """Return the paper and the recipe of each name PAPER/NAME; a group stands for its recipes."""
    chosen: list[tuple[str, str]] = []
    for word in words:
        paper, _, name = word.partition("/")
        content = read(paper) if paper in PAPERS else {"recipes": {}, "groups": {}}
        members = [name] if name in content["recipes"] else content["groups"].get(name)
        if not members or name.startswith("_"):
            raise ValueError(f"there is no recipe {word}: `python -m scripts.recipe` lists them")
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
        elif options:
            options[name].append(word)
        else:
            raise ValueError(
                f"{word} is no option and no recipe: `python -m scripts.recipe` lists them"
            )
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
            for place, folder in (("DATA", data), ("CHECKPOINTS", checkpoints)):
                if text.startswith(f"{place}/"):
                    text = folder + text.removeprefix(place)
            words.append(text)
    return words


def prepare_commands(recipe: Options, data: str, more: Options) -> list[list[str]]:
    """Return the commands that write DATA; the texts that they make or get are in DATA/source."""
    steps = {name: step for name, step in recipe["prepare"].items() if step != NO}
    first, *_, last = [*steps, *steps]
    download = {name: value for name, value in more.items() if name in OF_DOWNLOAD}
    steps[last] = merge(steps[last], {k: v for k, v in more.items() if k not in download})
    if first != last and not any("DATA/source" in str(value) for value in steps[last].values()):
        del steps[first]  # the user gives another text
    if first in steps:
        steps[first] = merge(steps[first], download)
    for name in steps:
        steps[name] = {**steps[name], "output": data if name == last else f"{data}/source"}
    return [
        ["python", "-m", f"scripts.prepare.{name}", *to_words(options, data)]
        for name, options in steps.items()
    ]


def train_commands(
    recipe: Options, action: str, data: str, checkpoints: str, more: Options
) -> list[list[str]]:
    """Return the commands of ``train`` or ``finish``."""
    options = merge(recipe["options"], recipe["train"])
    if action == "finish":
        options = merge(options, recipe["finish"])
    if given := [name for name in PRECISIONS if more.get(name)]:
        more = {**dict.fromkeys(PRECISIONS, NO), **{name: more[name] for name in given}, **more}
    options = merge(options, more)
    own_optimizer = options["optimizer"] in ("adam_with_memory", "adam_with_branch_weights")
    if own_optimizer and options.get("fp16", NO) != NO:
        options.setdefault("fp16-no-flatten-grads", YES)
    options.setdefault("log-format", "json")
    options = {"user-dir": "fairseq_plugins", **options, "save-dir": checkpoints}
    options.setdefault("log-file", f"{checkpoints}/train.log")
    commands = [["fairseq-train", f"{data}/bin", *to_words(options, data, checkpoints)]]
    if action == "finish" and "average" in recipe:
        target = f"{checkpoints}/checkpoint_average.pt"
        words = [checkpoints, "--last", recipe["average"], "--output", target]
        commands.append(["python", "-m", "scripts.convert.average", *words])
    return commands


def evaluate_commands(
    recipe: Options, data: str, checkpoints: str, more: Options
) -> list[list[str]]:
    """Return the commands of ``evaluate``."""
    if recipe["options"]["task"] == "translation":
        options = {"path": "CHECKPOINTS/checkpoint_last.pt", **recipe["options"], "task": NO}
        words = ["python", "-m", "scripts.evaluate.translation", f"{data}/bin"]
        commands = []
        for folder, each in recipe["outputs"].items():
            if each != NO:
                output = {"output": f"CHECKPOINTS/{folder}"}
                all_options = merge(
                    merge(merge(options, recipe["evaluate"]), {**each, **output}), more
                )
                commands.append([*words, *to_words(all_options, data, checkpoints)])
        return commands
    options = {
        **{"user-dir": "fairseq_plugins", **recipe["options"]},
        **{"path": "CHECKPOINTS/checkpoint_best.pt", "gen-subset": "test"},
        "distributed-world-size": "1",
    }
    options = merge(merge(options, recipe["evaluate"]), more)
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
        return prepare_commands(recipe, data, more)
    if action == "evaluate":
        return evaluate_commands(recipe, data, checkpoints, more)
    return train_commands(recipe, action, data, checkpoints, more)


def explained(paper: str, words: list[str]) -> Iterator[str]:
    """Yield a comment for each value of a command that looks like a mistake."""
    for option, value in pairwise(words):
        if reason := read(paper)["explain"].get(f"{option.removeprefix('--')} {value}"):
            yield f"# {option} {value}: {reason}"


def show(paper: str, name: str, places: list[str], more: Options) -> None:
    """Print all commands of a recipe; options are those of fairseq-train."""
    recipe = load(paper, name)
    facts = [recipe.get("what"), recipe.get("published") and f"published: {recipe['published']}"]
    facts.append(recipe.get("source") and f"source: {recipe['source']}")
    print(f"# {paper}/{name}: {'; '.join(filter(None, facts))}")
    for action in ACTIONS:
        if isinstance(recipe.get(action), dict):
            options = more if action in ("train", "finish") else {}
            print(f"\n# {action}")
            for words in commands(paper, name, action, *places, more=options):
                for line in explained(paper, words):
                    print(line)
                if "--log-file" in words:
                    print(f"mkdir -p {shlex.quote(words[words.index('--save-dir') + 1])}")
                print(format_command(words))


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
    # the first group that has an option owns it; others refer to that
    order = ["common", "dataset", "optimization", "distributed_training", "checkpoint"]
    order += ["task", "model", "criterion", "optimizer", "lr_scheduler"]
    wanted = {"data", *vars(preset)}
    wanted |= {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    config: Options = {}
    for group in order:
        values = {name: groups[group][name] for name in wanted & groups[group].keys()}
        if groups[group].get("_name"):
            values["_name"] = groups[group]["_name"]
        config[group] = dict(sorted(values.items()))
        wanted -= values.keys()
    config["model"] = {**config["model"], "_name": ARCH_MODEL_NAME_REGISTRY[namespace.arch]}
    config["model"].pop("arch", None)
    config["hydra"] = {"run": {"dir": "."}, "output_subdir": None}
    return yaml.safe_dump(config, sort_keys=False)


def run(words: list[str], log: Path | None = None) -> None:
    """Print a command and run it; also write what it prints into a log, if one is given."""
    print(f"$ {format_command(words)}", flush=True)
    name = Path(sys.executable).name if words[0] == "python" else words[0]
    process = subprocess.Popen(
        [program(name), *words[1:]],
        **({"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if log else {}),
    )
    if log:
        with log.open("wb") as file:
            for line in process.stdout:
                file.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
    if process.wait():
        raise ValueError(f"{words[0]} ended with exit status {process.returncode}: see above")


def run_action(
    paper: str, name: str, action: str, places: list[str], more: Options, again: bool = True
) -> None:
    """Run the commands of an action, unless they are complete and it is not to be done again."""
    todo = commands(paper, name, action, *places, more=more)
    folder = Path(places[-1])
    record = folder / f"{action}.done"
    text = "\n".join(map(format_command, todo)) + "\n"
    if not again and record.exists() and record.read_text("utf-8") == text:
        print(f"{record.parent}: {action} is complete", flush=True)
        return
    if action == "finish" and not (folder / "checkpoint_last.pt").exists():
        raise ValueError(f"there is no checkpoint_last.pt in {folder} to go on from: train first")
    if action != "prepare":
        folder.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
    log = folder / "evaluate.log" if action == "evaluate" else None
    for words in todo:
        run(words, log)
    if action != "prepare":
        record.write_text(text, "utf-8")


def print_list() -> None:
    """Print all recipes, by paper."""
    print(__doc__)
    for paper in PAPERS:
        recipes = {name: load(paper, name) for name in read(paper)["recipes"] if name[0] != "_"}
        width = max(map(len, recipes)) + len(paper) + 1
        for name, recipe in recipes.items():
            facts = [recipe.get("what")]
            facts += [recipe.get("published") and f"published {recipe['published']}"]
            facts += [recipe.get("parameters") and f"{int(recipe['parameters']) / 1e6:,.1f}M"]
            facts += [recipe.get("gib") and f"GiB {recipe['gib']}"]
            print(f"{f'{paper}/{name}':{width}}  {'; '.join(filter(None, facts))}")
        print(f"\ngroups: {', '.join(f'{paper}/{name}' for name in read(paper)['groups'])}\n")


def work(words: list[str]) -> None:
    """Do what the words of the command line say."""
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    plain, more = words[:end], parse(words[end:])
    if not plain or "help" in more:
        return print_list()
    if plain[0] == "results":
        return print(results_table(Path(plain[1]), *map(float, more.get("to-reach", []))))
    verbs = [index for index, word in enumerate(plain) if word in ("show", *ACTIONS)]
    if not verbs:
        raise ValueError(f"give an action after {plain[-1]}: show, {', '.join(ACTIONS)}")
    chosen, action, places = names(plain[: verbs[0]]), plain[verbs[0]], plain[verbs[0] + 1 :]
    wanted = {"show": (0, 1, 2), "prepare": (1,)}.get(action, (2,))
    if len(places) not in wanted:
        raise ValueError(f"{action} takes DATA{' CHECKPOINTS' * (action != 'prepare')} after it")
    seeds, hydra = more.pop("seeds", None), more.pop("hydra", NO)
    for number, (paper, name) in enumerate(chosen):
        if action == "show" and hydra == YES:
            print(hydra_configuration(commands(paper, name, "train", *places, more=more)[0][1:]))
        elif action == "show":
            print("\n" * (number > 0), end="")
            show(paper, name, places, more)
        elif action == "prepare":
            if number == 0 or load(paper, name)["prepare"] != load(*chosen[0])["prepare"]:
                run_action(paper, name, action, places, more)
        elif seeds or len(chosen) > 1:
            for seed in seeds or ["1"]:
                folder = str(Path(places[1]) / paper / name / seed)
                options = merge(more, {"seed": [seed]}) if action != "evaluate" else more
                run_action(paper, name, action, [places[0], folder], options, again=False)
        else:
            run_action(paper, name, action, places, more)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        work(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
