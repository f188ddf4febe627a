"""Loads a checkpoint that fairseq-train wrote, with its dictionary, for use from Python."""

import logging
import os
from argparse import Namespace
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq.checkpoint_utils import load_checkpoint_to_cpu, load_model_ensemble_and_task
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import BaseFairseqModel
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask

from fairseq_plugins.fairseq_integration.registration import register
from fairseq_plugins.python_interface.language_model import LanguageModel
from fairseq_plugins.python_interface.text import build_lines, step_options
from fairseq_plugins.python_interface.translation import TranslationModel
from fairseq_plugins.segment_language_model.options import CHANGED_IN_EVALUATION
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from fairseq_plugins.units import Units, check_unit, read_units

logger = logging.getLogger(__name__)

register()
# looked for in a folder; scripts.convert.checkpoint writes the last
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt", "checkpoint.pt")
TASKS = (LanguageModelingTask, SegmentLanguageModelingTask, TranslationTask)
# options of the training that load() resets: without an optimizer, a memory hides nothing from it
_RESET = {
    "continue_past_eos": False,
    "dataset_impl": None,
    "eval_bleu": False,
    "memory_optimizer": None,
}


def load(
    path: str | os.PathLike,
    data: str | os.PathLike | None = None,
    *,
    tokens_per_sample: int | None = None,
    extended_context: int | None = None,
    unit: str | None = None,
    tokenizer: str | None = None,
    bpe: str | None = None,
    allow_unknown: bool = False,
    **options: Any,
) -> LanguageModel | TranslationModel:
    """Load a trained model, without executing anything in its file.

    For example, ``load("checkpoints").score("some text")``.

    Args:
        path: a checkpoint, or a folder with ``checkpoint_best.pt`` or ``checkpoint_last.pt``.
        data: the folder with ``dict.txt``, or with ``dict.LANGUAGE.txt`` for both languages; None
            for the checkpoint's folder or the data that the model was trained on.
        tokens_per_sample: a language model's segment length; None for the training's.
        extended_context: tokens that a language model reads before each segment, without a
            recurrence; None for the training's.
        unit: "characters", "bytes", "words" or "subwords"; None for the unit in ``units.json``
            beside the dictionary, or words.
        tokenizer: fairseq's name of the tokenizer, such as ``moses``; None for the training's, or
            the one in ``units.json``.
        bpe: fairseq's name of the BPE, such as ``subword_nmt``; None as for ``tokenizer``.
        allow_unknown: read symbols that the dictionary lacks as ``<unk>`` instead of refusing them.
        options: options of the tokenizer and BPE (``bpe_codes="codes"``), and changed options of
            the model (``mem_len=512``), as in ``--model-overrides``.
    """
    file = find_checkpoint(Path(path))
    try:
        state = load_checkpoint_to_cpu(str(file))
    except Exception as error:
        reason = " ".join(str(error).split())
        # PyTorch's own advice is to execute what is in the file
        if detail := reason.partition("WeightsUnpickler error: ")[2]:
            reason = f"Weights only load failed: {detail.partition(' Check the')[0]}"
        raise ValueError(f"{file} is not a checkpoint that can be read ({reason[:300]})") from error
    task_options = saved_options(state, "task")
    kind = TASK_REGISTRY.get(task_options.get("_name"), object)
    if not issubclass(kind, TASKS):
        raise ValueError(
            f"{file} holds a model of the task {task_options.get('_name')!r}: name one of "
            "language_modeling, segment_language_modeling or translation"
        )
    translates = issubclass(kind, TranslationTask)
    lengths = {"tokens_per_sample": tokens_per_sample, "extended_context": extended_context}
    if translates:  # which has no segments, so that these are refused like other names
        options |= {name: value for name, value in lengths.items() if value is not None}
    folder = find_data(file, data, {**task_options, **options}, translates)
    units = read_units(folder)
    if unit is not None:
        check_unit(unit)
    # fastbpe and subword_nmt make the same subwords
    same_bpe = "subword_nmt" if bpe == "fastbpe" else bpe
    for name, value in {"unit": unit, "tokenizer": tokenizer, "bpe": same_bpe}.items():
        if value not in (None, getattr(units, name)) and (folder / "units.json").exists():
            logger.warning(
                "%s is %r, and %s says %r: text may get other symbols than in training",
                *(name, value, folder / "units.json", getattr(units, name)),
            )
    if unit not in (None, units.unit):
        units = Units(unit)
    steps, changed = _split_options(
        file, state, {"tokenizer": tokenizer, "bpe": bpe}, options, units
    )
    model, task = _build(file, state, folder, changed)
    # scripts.prepare makes the punctuation of translations uniform
    normalize = translates and steps["tokenizer"] == units.tokenizer
    dictionaries = [task.source_dictionary, *([task.target_dictionary] if translates else [])]
    lines = build_lines(**steps, units=units, dictionaries=dictionaries, normalize=normalize)
    if translates:
        return TranslationModel(model, task, lines[0], lines[1], allow_unknown)
    return LanguageModel(
        model, task, lines[0], units.unit, allow_unknown, tokens_per_sample, extended_context
    )


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at ``path``, a file or a folder with one of :data:`CHECKPOINTS`."""
    if not path.exists():
        raise ValueError(
            f"there is no file or folder {str(path)!r}: name a checkpoint, or the --save-dir of a "
            "training"
        )
    if not path.is_dir():
        return path
    for name in CHECKPOINTS:
        if (path / name).is_file():
            return path / name
    raise ValueError(
        f"{path} has no {', '.join(CHECKPOINTS[:-1])} or {CHECKPOINTS[-1]}: name a checkpoint, or "
        "the --save-dir of a training"
    )


def saved_options(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a checkpoint's options of a ``part``, such as "model", by their names."""
    options = state["cfg"].get(part) or {}
    # parsed arguments, or a configuration
    return vars(options) if isinstance(options, Namespace) else dict(options)


def find_data(
    file: Path, data: str | os.PathLike | None, task_options: dict[str, Any], translates: bool
) -> Path:
    """Return the folder with a checkpoint's dictionaries, which is ``data`` or searched for.

    They may be beside the checkpoint, or in the data that its task was trained on.
    """
    trained = str(task_options.get("data") or "").split(os.pathsep)[0]
    folders = [file.parent, *([Path(trained)] if trained else [])]
    if data is not None:
        folders = [Path(data)]
    for folder in folders:
        names = ["dict.txt"]
        if translates:
            pair = task_options.get("source_lang"), task_options.get("target_lang")
            if None in pair and folder.is_dir():
                pair = infer_language_pair(str(folder))
            names = [f"dict.{language or 'LANGUAGE'}.txt" for language in pair]
        if all((folder / name).is_file() for name in names):
            return folder
    raise ValueError(
        f"{file} needs {' and '.join(names)}, not in {' or '.join(map(str, folders))}: give data, "
        "the folder that fairseq-preprocess wrote"
    )


def _split_options(
    file: Path,
    state: dict[str, Any],
    steps: dict[str, str | None],
    overrides: dict[str, Any],
    units: Units,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of :func:`build_lines`, and the changed options of the model."""
    task_options, model_options = saved_options(state, "task"), saved_options(state, "model")
    unit_options: dict[str, Any] = {"source_lang": units.language, "target_lang": units.language}
    # subword_nmt and fastbpe, and sentencepiece
    unit_options |= {"bpe_codes": units.model, "sentencepiece_model": units.model}
    unit_options = {option: str(value) for option, value in unit_options.items() if value}
    unit_options["moses_no_dash_splits"] = units.moses_no_dash_splits
    names: dict[str, str | None] = {}
    known: set[str] = set()
    options: dict[str, Any] = {}
    for kind, name in steps.items():
        saved = saved_options(state, kind)
        names[kind] = name or saved.get("_name") or getattr(units, kind)
        step_names = step_options(kind, names[kind]).keys()
        known |= step_names
        # Moses takes its languages from the task
        for source in (
            unit_options if names[kind] == getattr(units, kind) else {},
            {option: value for option, value in task_options.items() if value is not None},
            saved if names[kind] == saved.get("_name") else {},
            overrides,
        ):
            options |= {option: source[option] for option in step_names & source.keys()}
    if issubclass(TASK_REGISTRY[task_options["_name"]], SegmentLanguageModelingTask):
        changeable = set(CHANGED_IN_EVALUATION)
    else:
        changeable = {*task_options, *model_options} - {"_name", "data", "tokens_per_sample"}
    for option in overrides:
        if option not in known | changeable:
            near = get_close_matches(option, known | changeable, 1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            parts = [str(file), *(f"--{kind} {name}" for kind, name in names.items() if name)]
            raise ValueError(
                f"{option} is {overrides[option]}: no option of {' or '.join(parts)} that can be "
                f"changed has this name: {remedy}"
            )
    changed = {option: value for option, value in overrides.items() if option in changeable}
    return {**names, "options": options}, changed


def _build(
    file: Path, state: dict[str, Any], folder: Path, changed: dict[str, Any]
) -> tuple[BaseFairseqModel, FairseqTask]:
    """Build the model and task of a checkpoint's ``state``, with ``changed`` options."""
    # generation would compile for minutes
    overrides = {"compile_layers": False, **changed, **_RESET, "data": str(folder)}
    if state.get("args") is not None:
        vars(state["args"]).update(overrides)
    overwrite_args_by_name(state["cfg"], overrides)
    try:
        (model,), _, task = load_model_ensemble_and_task([str(file)], state=state)
    except (RuntimeError, ValueError) as error:
        # torch's last line says which weights do not fit
        lines = str(error).splitlines()
        reason = lines[-1] if isinstance(error, RuntimeError) else " ".join(lines)
        raise ValueError(f"{file} with the dictionary in {folder}: {reason.strip()}") from error
    # logs how far back the model reads
    model.prepare_for_inference_(SimpleNamespace(generation=None, task=None))
    # fairseq's commands replace it by an error, but users may train the model on
    vars(model).pop("train", None)
    return model.eval(), task
