r"""Average the weights of several checkpoints of one training.

    python -m scripts.convert.average CHECKPOINTS --last 5 --output CHECKPOINTS/average.pt
    python -m scripts.convert.average checkpoint8.pt checkpoint9.pt --output average.pt

--last N takes the N checkpoints in a folder with the most updates: checkpointEPOCH.pt and
checkpoint_EPOCH_UPDATES.pt, not the copies checkpoint_best.pt and checkpoint_last.pt.

The mean of each weight is computed in double precision. Spans stay within their range, and κ and α
of a Weighted Transformer stay on the simplex, since both sets are convex. The statistics of batch
norms of queries are averaged too. Counts and options come from the checkpoint with the most
updates. The result has no optimizer state: use it for evaluation or with --finetune-from-model.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts._shared.checkpoints import checkpoint_options, read_checkpoint, save_for_new_training
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import atomic_write

if TYPE_CHECKING:
    from torch import Tensor

# Names of the checkpoints that fairseq-train keeps.
_NAMES = re.compile(r"checkpoint(\d+|_\d+_\d+)\.pt")


def choose(paths: list[Path], last: int | None) -> dict[int, tuple[Path, dict[str, Any]]]:
    """Return the paths and contents of checkpoints by their updates, the most updates last.

    Tensors stay on the disk. The weights at the end of an epoch may be saved under two names.
    """
    if last is not None:
        if len(paths) > 1 or not paths[0].is_dir():
            raise ValueError("--last takes the folder of one training: give that alone")
        paths = sorted(path for path in paths[0].iterdir() if _NAMES.fullmatch(path.name))
    states = {}
    for path in paths:
        state = read_checkpoint(path, "CHECKPOINT")
        if not state.get("optimizer_history") or "model" not in state:
            raise ValueError(
                f"CHECKPOINT {short(path)} holds no model: name one that fairseq-train wrote"
            )
        states[state["optimizer_history"][-1]["num_updates"]] = path, state
    if last is None and len(states) < max(2, len(paths)):
        raise ValueError(
            "CHECKPOINT: give two or more, or a folder and --last; if two have as many updates, as "
            "a checkpoint and its copy do, leave one out"
        )
    if last is not None and not 2 <= last <= len(states):
        raise ValueError(
            f"--last is {last}, of {len(states)} checkpoints: give a number from 2 to that; train "
            "without --no-epoch-checkpoints or with --save-interval-updates to have more"
        )
    return dict(sorted(states.items())[-(last or 0) :])


def _signature(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a training's checkpoints share: model, task, dictionaries, shapes of weights."""
    signature = {part: checkpoint_options(state, part).get("_name") for part in ("model", "task")}
    for name, weight in state["model"].items():
        # digests of dictionaries are integers that stay the same
        digest = name.startswith("dictionary_version.")
        signature[name] = tuple(weight.tolist()) if digest else tuple(weight.shape)
    return signature


def average(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each weight over models; integers are taken from the last model.

    Weights that share storage in all models, as tied embeddings do, share it in the mean. Raises
    ValueError if a mean is not finite.
    """
    by_storage: dict[tuple, Tensor] = {}
    means = {}
    for name in models[-1]:
        weights = [model[name] for model in models]
        storage = tuple((x.data_ptr(), x.shape, x.stride()) for x in weights)
        if storage not in by_storage:
            by_storage[storage] = weights[-1].clone()
            if weights[-1].is_floating_point():
                total = weights[0].double()
                for weight in weights[1:]:
                    total += weight
                by_storage[storage] = (total / len(weights)).to(weights[-1].dtype)
            if not by_storage[storage].isfinite().all():
                raise ValueError(
                    f"{name} is not finite in every checkpoint: leave out damaged ones"
                )
        means[name] = by_storage[storage]
    return means


def write_average(paths: list[Path], last: int | None, output: Path) -> None:
    """Average checkpoints and write the result to a file."""
    if output.exists():
        raise ValueError(f"--output {short(output)} already exists: name another, or remove it")
    chosen = choose(paths, last)
    newest_path, newest = [*chosen.values()][-1]
    expected = _signature(newest)
    for path, state in chosen.values():
        actual = _signature(state)
        for name in {**expected, **actual}:
            if expected.get(name) != actual.get(name):
                raise ValueError(
                    f"{short(newest_path)} and {short(path)} differ in {name}: "
                    f"{expected.get(name)} and {actual.get(name)}: give checkpoints of one training"
                )
    parts = ("args", "cfg", "criterion", "optimizer_history", "task_state")
    result = {part: newest[part] for part in parts if part in newest}
    result["model"] = average([state["model"] for _, state in chosen.values()])
    with atomic_write(output) as partial:
        save_for_new_training(result, partial)
    for updates, (path, _) in chosen.items():
        print(f"{short(path)}: {updates:,} updates")
    print(f"the mean of {len(chosen)} checkpoints is written to {short(output)}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    help_text = "checkpoints, or with --last their folder"
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help=help_text)
    help_text = "average the N checkpoints with the most updates in the folder"
    parser.add_argument("--last", type=int, metavar="N", help=help_text)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parsed = parser.parse_args(arguments)
    paths, output = [path.resolve() for path in parsed.checkpoints], parsed.output.resolve()
    return exit_status(lambda: write_average(paths, parsed.last, output), output=output)


if __name__ == "__main__":
    sys.exit(main())
