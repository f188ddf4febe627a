"""Recipes: published settings, and small ones, as data in examples/<paper>/recipes.yaml.

    python -m scripts.recipe                                list all, with groups for tables
    python -m scripts.recipe PAPER/NAME show                print the commands, run nothing
    python -m scripts.recipe PAPER/NAME prepare DATA        then fairseq reads DATA/bin
    python -m scripts.recipe PAPER/NAME train DATA CHECKPOINTS
    python -m scripts.recipe PAPER/NAME finish DATA CHECKPOINTS     a last phase, if there is one
    python -m scripts.recipe PAPER/NAME evaluate DATA CHECKPOINTS
    python -m scripts.recipe results OUT [--to-reach LOSS]

Options at the end win over those of the recipe; "--option no" takes one back. `prepare` passes
--from to the download, other options to the command that writes DATA/bin. `show --hydra` prints a
configuration for fairseq-hydra-train.

Several names, names of groups, or --seeds 1 2 make tables: train, finish and evaluate then read
and write OUT/PAPER/NAME/SEED in place of CHECKPOINTS, one after another, and pass over what is
complete. `results` prints one table of them.
"""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

from scripts._hydra_configuration import hydra_configuration
from scripts._recipe_results import results_table
from scripts._recipes import (
    ACTIONS,
    NO,
    PAPERS,
    YES,
    Options,
    commands,
    explain,
    find_recipes,
    load,
    merge,
    parse,
    read_recipes,
)
from scripts._shared.commands import format_command, program


def describe(recipe: Options, *keys: str) -> str:
    """Return what a recipe says about itself, on one line."""
    facts = [recipe["what"]] if "what" in recipe else []
    return "; ".join(facts + [f"{key}: {recipe[key]}" for key in keys if key in recipe])


def show(paper: str, name: str, folders: list[str], more: Options) -> None:
    """Print all commands of a recipe; options are those of fairseq-train."""
    recipe = load(paper, name)
    print(f"# {paper}/{name}: {describe(recipe, 'published', 'source')}")
    for action in ACTIONS:
        if isinstance(recipe.get(action), dict):
            options = more if action in ("train", "finish") else {}
            print(f"\n# {action}")
            for words in commands(paper, name, action, *folders, more=options):
                for line in explain(paper, words):
                    print(f"# {line}")
                if "--log-file" in words:
                    print(f"mkdir -p {shlex.quote(words[words.index('--save-dir') + 1])}")
                print(format_command(words))


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
    paper: str, name: str, action: str, folders: list[str], more: Options, again: bool = True
) -> None:
    """Run the commands of an action, unless they are complete and it is not to be done again."""
    todo = commands(paper, name, action, *folders, more=more)
    folder = Path(folders[-1])
    if action == "prepare":
        for words in todo:
            run(words)
        return
    record = folder / f"{action}.done"
    text = "\n".join(map(format_command, todo)) + "\n"
    if not again and record.exists() and record.read_text("utf-8") == text:
        print(f"{folder}: {action} is complete", flush=True)
        return
    if not Path(folders[0], "bin").is_dir():
        raise ValueError(f"there is no {folders[0]}/bin: run `prepare {folders[0]}` first")
    if action == "finish" and not (folder / "checkpoint_last.pt").exists():
        raise ValueError(f"there is no checkpoint_last.pt in {folder} to go on from: train first")
    folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    for words in todo:
        run(words, folder / "evaluate.log" if action == "evaluate" else None)
    record.write_text(text, "utf-8")


def print_list() -> None:
    """Print all recipes and groups, by paper."""
    print(__doc__)
    for paper in PAPERS:
        content = read_recipes(paper)
        names = [name for name in content["recipes"] if not name.startswith("_")]
        width = max(map(len, names)) + len(paper) + 1
        for name in names:
            print(f"{f'{paper}/{name}':{width}}  {describe(load(paper, name), 'published')}")
        print(f"\ngroups: {', '.join(f'{paper}/{name}' for name in content['groups'])}\n")


def work(words: list[str]) -> None:
    """Do what the words of the command line say."""
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    plain, more = words[:end], parse(words[end:])
    if not plain or "help" in more:
        return print_list()
    if plain[0] == "results":
        if len(plain) != 2:
            raise ValueError("results takes one folder after it: the OUT of trainings")
        return print(results_table(Path(plain[1]), more.get("to-reach", [None])[0]))
    verbs = [index for index, word in enumerate(plain) if word in ("show", *ACTIONS)]
    if not verbs:
        raise ValueError(f"`{' '.join(plain)}` has no action: give show, {', '.join(ACTIONS)}")
    action, folders = plain[verbs[0]], plain[verbs[0] + 1 :]
    recipes = find_recipes(plain[: verbs[0]])
    wanted = {"show": (0, 1, 2), "prepare": (1,)}.get(action, (2,))
    if len(folders) not in wanted:
        raise ValueError(f"{action} takes DATA{' CHECKPOINTS' * (action != 'prepare')} after it")
    seeds, hydra = more.pop("seeds", None), more.pop("hydra", NO)
    if action == "show":
        if seeds:
            raise ValueError("--seeds is for train, finish and evaluate: show takes --seed")
        for number, (paper, name) in enumerate(recipes):
            if hydra == YES:
                words = commands(paper, name, "train", *folders, more=more)[0]
                print(hydra_configuration(words[1:]))
                continue
            if number:
                print()
            show(paper, name, folders, more)
    elif action == "prepare":
        # most tables have the same data for all recipes
        for paper, name in {str(load(*recipe)["prepare"]): recipe for recipe in recipes}.values():
            run_action(paper, name, action, folders, more)
    elif seeds or len(recipes) > 1:
        for paper, name in recipes:
            for seed in seeds or ["1"]:
                folder = str(Path(folders[1], paper, name, seed))
                options = merge(more, {"seed": [seed]}) if action != "evaluate" else more
                run_action(paper, name, action, [folders[0], folder], options, again=False)
    else:
        run_action(*recipes[0], action, folders, more)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        work(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # end quietly when the list goes through head or less
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
