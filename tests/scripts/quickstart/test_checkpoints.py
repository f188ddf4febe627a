import zipfile

import torch

from scripts.quickstart import _checkpoints as checkpoints


def write_checkpoint(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", content * 1000)
    return path.read_bytes()


def cut_short(path):
    path.write_bytes(path.read_bytes()[:500])


def test_checkpoint_cut_short_is_replaced_with_the_newest_complete_one(tmp_path, capsys):
    write_checkpoint(tmp_path / "checkpoint_1_250.pt", "old")
    newest = write_checkpoint(tmp_path / "checkpoint_1_1000.pt", "newest")
    for name in ("checkpoint_2_1250.pt", "checkpoint_best.pt", "checkpoint_last.pt"):
        write_checkpoint(tmp_path / name, "cut short")
        cut_short(tmp_path / name)
    (tmp_path / "checkpoint_2_1500.pt.tmp").touch()

    checkpoints.repair_checkpoints(tmp_path)

    assert (tmp_path / "checkpoint_last.pt").read_bytes() == newest
    assert (tmp_path / "checkpoint_best.pt").read_bytes() == newest
    assert not list(tmp_path.glob("*.tmp"))
    assert capsys.readouterr().out.splitlines()[1] == (
        f"replaced {tmp_path}/checkpoint_last.pt, which was cut short, with checkpoint_1_1000.pt"
    )


def test_checkpoint_cut_short_is_removed_if_it_is_the_only_one(tmp_path, capsys):
    last = tmp_path / "checkpoint_last.pt"
    write_checkpoint(last, "cut short")
    cut_short(last)
    checkpoints.repair_checkpoints(tmp_path)
    assert not last.exists()
    assert capsys.readouterr().out == (
        f"removed {last}: it was cut short and no other is complete\n"
    )


def test_complete_checkpoints_stay(tmp_path, capsys):
    write_checkpoint(tmp_path / "checkpoint_1_250.pt", "interval")
    best = write_checkpoint(tmp_path / "checkpoint_best.pt", "best")
    last = write_checkpoint(tmp_path / "checkpoint_last.pt", "last")
    checkpoints.repair_checkpoints(tmp_path)
    assert (tmp_path / "checkpoint_best.pt").read_bytes() == best
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == last
    assert capsys.readouterr().out == ""


def test_file_that_torch_saved_is_complete_until_cut(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    assert checkpoints.is_complete(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert not checkpoints.is_complete(path)


def test_training_progress(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    assert checkpoints.training_progress(path) == (0, 0.0)
    history = [{"num_updates": 3}, {"num_updates": 7}]
    extra = {"previous_training_time": 1.5}
    torch.save({"optimizer_history": history, "extra_state": extra}, path)
    assert checkpoints.training_progress(path) == (7, 1.5)
