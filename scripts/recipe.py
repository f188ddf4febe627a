"""Recipes: published settings, and small ones, as data in examples/<paper>/recipes.yaml.

    python -m scripts.recipe [PART]                         list those whose name has PART, or all
    python -m scripts.recipe PAPER/NAME show                print the commands, run nothing
    python -m scripts.recipe PAPER/NAME prepare DATA        then fairseq reads DATA/bin
    python -m scripts.recipe PAPER/NAME train DATA CHECKPOINTS
    python -m scripts.recipe PAPER/NAME finish DATA CHECKPOINTS     a last phase, if there is one
    python -m scripts.recipe PAPER/NAME evaluate DATA CHECKPOINTS
    python -m scripts.recipe results OUT [--to-reach LOSS]

Options at the end win over those of the recipe; "--option no" takes one back. `prepare DATA --input
TEXT` prepares your own text in place of a language model's. `show --hydra` prints a configuration
for fairseq-hydra-train.

Several names, names of groups, or --seeds 1 2 make tables: train, finish and evaluate then read
and write OUT/PAPER/NAME/SEED in place of CHECKPOINTS, one after another, and pass over what is
complete. `results` prints one table of them.

"GiB 0.6 + 22 x 0.55" is a training's memory in fp32, by formula: 0.6 for weights, gradients and
Adam's state, and 0.55 for the activations of each of 22 streams (in brackets: as long as all spans
are whole); --bf16, --batch-split and --checkpoint-activations take less.
"""

import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts._recipes import (
    ACTIONS,
    AVERAGE,
    NO,
    PAPERS,
    YES,
    Options,
    commands,
    find_recipes,
    hydra_configuration,
    load,
    merge,
    needs,
    parse,
    read_recipes,
)
from scripts._shared.command_line import exit_status
from scripts._shared.commands import format_command, name_commands, program
from scripts._shared.results import markdown_table

# how long an interrupted command may take to end by itself
SECONDS_TO_END = 5


def describe(recipe: Options, *keys: str) -> str:
    """Return what a recipe says about itself, on one line."""
    facts = [recipe["what"]] if "what" in recipe else []
    return "; ".join(facts + [f"{key}: {recipe[key]}" for key in keys if key in recipe])


def show(paper: str, name: str, folders: list[str], more: Options) -> None:
    """Print all commands of a recipe; options are those of fairseq-train."""
    recipe = load(paper, name)
    print(f"# {paper}/{name}: {describe(recipe, 'published', 'source')}")
    print(f"# training {needs(recipe)}")
    for action in ACTIONS:
        if isinstance(recipe.get(action), dict):
            options = more if action in ("train", "finish") else {}
            print(f"\n# {action}")
            for words in commands(paper, name, action, *folders, more=options):
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
    try:
        if log:
            with log.open("wb") as file:
                for line in process.stdout:
                    file.write(line)
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
        process.wait()
    finally:
        # Ctrl-C reaches the command, too, but kill does not: a training that went on alone would
        # write beside the next one
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        process.terminate()
        process.wait()
    if process.returncode:
        raise ValueError(f"{words[0]} ended with exit status {process.returncode}: see above")


def run_action(
    paper: str, name: str, action: str, folders: list[str], more: Options, again: bool = True
) -> None:
    """Run the commands of an action, unless they are complete and it is not to be done again."""
    todo = commands(paper, name, action, *folders, more=more)
    folder = Path(folders[-1])
    if action == "prepare":
        # it compares what is there with what it would write
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
    # what was done with the weights of before has to be done again
    for outdated in ACTIONS[ACTIONS.index(action) :]:
        (folder / f"{outdated}.done").unlink(missing_ok=True)
    if action != "evaluate" and "average" in load(paper, name):
        (folder / AVERAGE).unlink(missing_ok=True)
    for words in todo:
        run(words, folder / "evaluate.log" if action == "evaluate" else None)
    record.write_text(text, "utf-8")


def recorded_words(folder: Path) -> list[str]:
    """Return the words of the command that trained a folder."""
    return shlex.split((folder / "train.done").read_text("utf-8").replace("\\\n", ""))


def print_list(part: str = "") -> bool:
    """Print the recipes and groups whose names have a part; return whether there are any."""
    lines = []
    for paper in PAPERS:
        content = read_recipes(paper)
        names = {f"{paper}/{name}": name for name in content["recipes"] if name[0] != "_"}
        for path, name in names.items():
            if part in path:
                width = max(map(len, names))
                lines.append(f"{path:{width}}  {describe(load(paper, name), 'published')}")
        groups = [f"{paper}/{name}" for name in content["groups"] if part in f"{paper}/{name}"]
        lines += [f"\ngroups: {', '.join(groups)}\n"] if groups else []
    if lines:
        print("\n".join(lines if part else [name_commands(__doc__), *lines]))
    return bool(lines)


def work(words: list[str]) -> None:
    """Do what the words of the command line say."""
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    plain, more = words[:end], parse(words[end:])
    if not plain or "help" in more:
        print_list()
        return
    if plain[0] == "results":
        if len(plain) != 2:
            raise ValueError("results takes one folder after it: the OUT of trainings")
        print(results_table(Path(plain[1]), more.get("to-reach", [None])[0]))
        return
    verbs = [index for index, word in enumerate(plain) if word in ("show", *ACTIONS)]
    if not verbs:
        if len(plain) == 1 and not more and print_list(plain[0]):
            return
        find_recipes(plain)
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
        for paper, name in recipes:
            if hydra == YES:
                train = commands(paper, name, "train", *folders, more=more)[0]
                print(hydra_configuration(train[1:]))
            else:
                show(paper, name, folders, more)
                print()
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


def in_unit(bits: float, unit: str) -> str:
    """Return a loss in bits a symbol as the unit of the data has it."""
    return f"{bits:.4f} bits" if unit in ("characters", "bytes") else f"{2**bits:.2f} ppl"


def data_unit(folder: Path) -> str:
    """Return the unit of the data that a training read, from the record of its command."""
    path = Path(recorded_words(folder)[1], "units.json")
    return json.loads(path.read_text("utf-8"))["unit"] if path.exists() else "words"


def test_results(folder: Path, unit: str) -> str:
    """Return the result of the evaluation: BLEU by folder, or the loss in the unit of the data."""
    if not (folder / "evaluate.done").exists():
        return ""
    scores = []
    for path in sorted(folder.glob("*/scores.json")):
        score = json.loads(path.read_text("utf-8"))["detokenized"]["score"]
        scores.append(f"{path.parent.name} {score:.1f}")
    log = folder / "evaluate.log"
    if scores or not log.exists():
        return ", ".join(scores)
    losses = re.findall(r"Loss \(base 2\): ([\d.]+)", log.read_text("utf-8"))
    return in_unit(float(losses[-1]), unit) if losses else ""


def training_row(folder: Path, to_reach: float | None) -> list[str]:
    """Return the figures of a training: those of its log, and of its evaluation."""
    unit, updates, seconds = data_unit(folder), 0, 0.0
    # updates, loss in bits, and minutes of training of each validation
    checks: list[tuple[int, float, float]] = []
    speeds = []
    text = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
    for line in re.findall(r'\{".*\}$', text, re.MULTILINE):
        figures: dict[str, Any] = json.loads(line)
        seconds = float(figures.get("wall", figures.get("train_wall_total", seconds)))
        updates = int(figures.get("valid_num_updates", figures.get("num_updates", updates)))
        if "wps" in figures:
            speeds.append(float(figures["wps"]))
        if "valid_num_updates" in figures:
            bits = float(figures.get("valid_nll_loss", figures["valid_loss"]))
            checks.append((updates, bits, seconds / 60))
    lowest = in_unit(min(bits for _, bits, _ in checks), unit) if checks else ""
    speed = f"{statistics.median(speeds[1:]):,.0f}" if speeds[1:] else ""
    row = [f"{updates:,}", lowest, test_results(folder, unit), speed]
    row.append(f"{seconds / 60:.1f}" if seconds else "")
    if to_reach is not None:
        reached = [check for check in checks if check[1] <= to_reach][:1]
        row += [f"{reached[0][0]:,}", f"{reached[0][2]:.1f}"] if reached else ["never", ""]
    return row


def name_training(folder: Path, output: Path) -> list[str]:
    """Return a training's folder below ``output``, without its seed, and its seed."""
    words = recorded_words(folder)
    seed = words[words.index("--seed") + 1] if "--seed" in words else "1"
    name = str(folder.relative_to(output))
    return [name.removesuffix(f"/{seed}") if name != "." else output.resolve().name, seed]


def results_table(output: Path, loss: str | None = None) -> str:
    """Return a table of the trainings in OUT/PAPER/NAME/SEED, or in any folders below.

    ``loss`` (--to-reach) is a validation loss in bits a symbol: when a training first had it.
    """
    if not output.is_dir():
        raise ValueError(f"there is no folder {output}: name the OUT of trainings")
    try:
        to_reach = None if loss is None else float(loss)
    except ValueError as error:
        raise ValueError(f"--to-reach is {loss}: give a loss in bits, such as 2.69") from error
    heads = ["recipe", "seed", "updates", "lowest validation loss", "test loss or BLEU"]
    heads += ["tokens/s", "minutes"]
    if to_reach is not None:
        heads += [f"updates to {to_reach} bits", "minutes to it"]
    folders = [path.parent for path in sorted(output.rglob("train.done"))]
    if not folders:
        raise ValueError(f"{output} has no finished trainings of recipes: train some with --seeds")
    names = [name_training(folder, output) for folder in folders]
    rows = [training_row(folder, to_reach) for folder in folders]
    return markdown_table(heads, [[*name, *row] for name, row in zip(names, rows, strict=True)])


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: work(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    # end quietly when the list goes through head or less
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
