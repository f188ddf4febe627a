"""Lets a resumed training go on, and end, as if it had not stopped.

fairseq begins anew if the file of ``--restore-file`` is missing, draws other batches when it
resumes after the first epoch, adds an update to a complete training, and forgets how long
validation has not improved.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from fairseq_plugins.fairseq_integration.checkpoint_files import lock_folder

logger = logging.getLogger(__name__)
# fairseq's own value of --restore-file: the last checkpoint of --save-dir, if there is one
LAST = "checkpoint_last.pt"
# in a checkpoint's "extra_state"
PATIENCE = "patience"
# counters of torch's scheduler that fairseq leaves out of a checkpoint
PLATEAU = ("num_bad_epochs", "cooldown_counter")


def _should_stop_early(cfg: Any, valid_loss: float | None) -> bool:
    """Stand in for fairseq's function of this name, which keeps the patience as attributes."""
    return False


def resume_as_if_unbroken() -> None:
    """Let fairseq's commands save and restore all that a resumed training needs."""
    checkpoint_utils.load_checkpoint = functools.partial(_resume, checkpoint_utils.load_checkpoint)
    Trainer.save_checkpoint = functools.partialmethod(_save, Trainer.save_checkpoint)
    plateau = ReduceLROnPlateauLRSchedule
    plateau.state_dict = functools.partialmethod(_plateau_state, plateau.state_dict)
    plateau.load_state_dict = functools.partialmethod(_load_plateau, plateau.load_state_dict)


def _resume(load: Callable[..., Any], cfg: Any, trainer: Trainer, **options: Any) -> Any:
    """Restore a training from its checkpoint, or begin one."""
    global _should_stop_early
    # the caller is fairseq_cli.train, which python -m names __main__
    _should_stop_early = sys._getframe(1).f_globals.get("should_stop_early", _should_stop_early)
    # fairseq's name of the file with --checkpoint-suffix
    wanted = cfg.restore_file.replace(".pt", (trainer.checkpoint_suffix or "") + ".pt")
    if cfg.restore_file != LAST and not PathManager.isfile(wanted):
        raise ValueError(
            f"--restore-file is {wanted}, which is not a file: give the path of a checkpoint, or "
            "leave it out to go on with the last one of --save-dir"
        )
    if trainer.data_parallel_rank == 0 and not cfg.no_save:
        lock_folder(cfg.save_dir)
    _forget_other_trainings()
    with _keep_order_of_batches(trainer.task, trainer.cfg.dataset.update_ordered_indices_seed):
        state, epochs = load(cfg, trainer, **options)
    # fine-tuning also loads a checkpoint, but starts at update 0
    begun = state is not None and trainer.get_num_updates() > 0
    if begun and not (cfg.reset_optimizer or cfg.reset_meters):
        vars(_should_stop_early).update(state.get(PATIENCE, {}))
        if not (cfg.reset_lr_scheduler or cfg.reset_dataloader):
            _step_at_the_end_of_an_epoch(trainer, state)
    reason = _find_reason_to_end(cfg, trainer, state, epochs) if begun else ""
    if reason:
        if cfg.restore_file != LAST:
            raise ValueError(
                f"--restore-file is {wanted}, which {reason}: give more, or --reset-optimizer "
                "--reset-meters --reset-dataloader to count anew"
            )
        logger.info(
            "nothing is left to train: %s in --save-dir %s %s; give more, or another --save-dir "
            "for a new training",
            LAST,
            cfg.save_dir,
            reason,
        )
        # this ends fairseq's loop over epochs before the first one
        trainer.cfg.optimization.max_epoch = -1
    return state, epochs


def _find_reason_to_end(cfg: Any, trainer: Trainer, state: dict[str, Any], epochs: Any) -> str:
    """Return why a restored training is complete; "" if it is not."""
    options = trainer.cfg.optimization
    updates, epoch = trainer.get_num_updates(), epochs.next_epoch_idx - 1
    hours = state.get("previous_training_time", 0) / 3600
    waited = vars(_should_stop_early).get("num_runs", 0)
    if updates >= options.max_update > 0:
        return f"has {updates} updates, and --max-update is {options.max_update}"
    if epoch >= options.max_epoch > 0:
        return f"has {epoch} epochs, and --max-epoch is {options.max_epoch}"
    if hours > options.stop_time_hours > 0:
        return f"took {hours:.2f} hours, and --stop-time-hours is {options.stop_time_hours}"
    if waited >= cfg.patience > 0:
        return f"has not improved in {waited} validations, and --patience is {cfg.patience}"
    return ""


def _forget_other_trainings() -> None:
    """Forget an earlier training in this process, as in Hydra's sweeps."""
    for function in (checkpoint_utils.save_checkpoint, _should_stop_early):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None)


def _save(self: Trainer, save: Callable[..., Any], filename: str, extra: dict[str, Any]) -> Any:
    return save(self, filename, {**extra, PATIENCE: dict(vars(_should_stop_early))})


def _plateau_state(self: Any, theirs: Callable[..., Any]) -> dict[str, Any]:
    return {**theirs(self), **{name: getattr(self.lr_scheduler, name) for name in PLATEAU}}


def _load_plateau(self: Any, theirs: Callable[..., Any], state: dict[str, Any]) -> None:
    theirs(self, state)
    for name in PLATEAU:
        setattr(self.lr_scheduler, name, state.get(name, 0))


def _step_at_the_end_of_an_epoch(trainer: Trainer, state: dict[str, Any]) -> None:
    """Step a plateau scheduler after an epoch: fairseq writes the checkpoint before this step."""
    if not isinstance(trainer.lr_scheduler, ReduceLROnPlateauLRSchedule):
        return
    position = state["train_iterator"]
    if position["iterations_in_epoch"] == 0 and state["val_loss"] is not None:
        trainer.lr_step(position["epoch"] - 1, state["val_loss"])


@contextmanager
def _keep_order_of_batches(task: FairseqTask, seed_of_epoch: bool) -> Iterator[None]:
    """Let fairseq sort sentences into batches as it did when the training began.

    It uses the epoch's number, which differs after resuming: the rest of the epoch would repeat
    some sentences and skip others. ``seed_of_epoch``: the seed includes this number.
    """
    make = task.get_batch_iterator

    def make_as_before(dataset: Any, *args: Any, **options: Any) -> Any:
        anew = options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr")
        if task.can_reuse_epoch_itr(dataset) and not anew:
            if seed_of_epoch:
                options["seed"] += 1 - options["epoch"]
            options["epoch"] = 1
        return make(dataset, *args, **options)

    own = type(task).get_batch_iterator is not FairseqTask.get_batch_iterator
    if own or getattr(task.cfg, "rebuild_batches", False):
        # the task takes care of this itself
        yield
        return
    task.get_batch_iterator = make_as_before
    try:
        yield
    finally:
        del task.get_batch_iterator
