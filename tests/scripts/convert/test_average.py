"""The average of checkpoints: torch's own of the same weights, and what is refused."""

import torch
from torch.optim.swa_utils import AveragedModel

from scripts.convert.average import average_weights, main
from tests.scripts.evaluate.saved_models import Mischief, write_checkpoint


def write_training(folder, number=3):
    """Checkpoints after 10, 20, … updates; returns their paths, newest first, and the models."""
    paths, models = [], []
    for seed in range(1, number + 1):
        path = folder / f"checkpoint{seed}.pt"
        models.append(write_checkpoint(path, "transformer_xl", seed=seed))
        state = torch.load(path, weights_only=True)
        state["optimizer_history"][-1]["num_updates"] = 10 * seed
        state["last_optimizer_state"] = {"state": torch.ones(3)}
        state["extra_state"]["train_iterator"]["memory"] = {"end": 8}
        torch.save(state, path)
        paths.append(path)
    return paths[::-1], models


def test_the_average_is_torchs_and_the_rest_the_newest_checkpoints(tmp_path, capsys):
    paths, models = write_training(tmp_path)
    output = tmp_path / "checkpoint_average.pt"
    assert main(["--checkpoint", *map(str, paths), "--output", str(output)]) == 0
    said = f"average of 3 checkpoints, after 10 to 30 updates, written to {output}\n"
    assert capsys.readouterr().out == said
    reference = AveragedModel(models[0])
    for model in models:
        reference.update_parameters(model)
    state = torch.load(output, weights_only=True)
    expected = reference.module.state_dict()
    assert set(state["model"]) == set(expected)
    for name, weight in state["model"].items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    assert state["optimizer_history"][-1]["num_updates"] == 30
    assert state["last_optimizer_state"] is None
    assert "memory" not in state["extra_state"]["train_iterator"]
    # fairseq's own loader takes it
    models[0].load_state_dict(state["model"])


def test_whole_numbers_are_not_averaged_and_precision_stays():
    models = [
        {"count": torch.tensor(number), "weight": torch.tensor([1.0, number], dtype=torch.float16)}
        for number in (1, 2, 4)
    ]
    averaged = average_weights(models)
    assert averaged["count"] == 4
    torch.testing.assert_close(averaged["weight"], torch.tensor([1, 7 / 3], dtype=torch.float16))


def test_checkpoints_that_do_not_go_together_are_refused(tmp_path, refused):
    (newest, *_), _ = write_training(tmp_path)
    refused(main, ["--checkpoint", newest, newest], "--checkpoint names 1 file: name two or more")
    other = tmp_path / "other.pt"
    write_checkpoint(other, "transformer_xl", decoder_ffn_embed_dim=32)
    refused(main, ["--checkpoint", newest, other], f"--checkpoint {other} has other weights than")
    torch.save({"model": Mischief(tmp_path / "made")}, other)
    refused(main, ["--checkpoint", newest, other], f"--checkpoint {other} holds more than weights")
    assert not (tmp_path / "made").exists()
    torch.save({"cfg": {}}, other)
    refused(main, ["--checkpoint", newest, other], f"--checkpoint {other} holds no model")
