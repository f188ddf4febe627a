"""The run for the first minutes on a GPU: its stages, and its kernels on the meta device."""

import contextlib
import json
import sys

import torch

from benchmarks import gpu
from benchmarks.cases import Selection
from benchmarks.gpu import Stage
from benchmarks.measure import BF16, Setting


def python(script):
    return [sys.executable, "-c", script]


def test_stages_keep_to_their_limits_and_do_not_stop_the_next(tmp_path, monkeypatch):
    line = json.dumps({"loss": "7.5", "wall": "12", "num_updates": "30"})
    stages = [
        Stage("first", 20, [python("import time; print('so far', flush=True); time.sleep(60)")]),
        Stage("second", 20, [python("raise SystemExit(3)"), python("print('done')")]),
        Stage("training", 20, [python(f"print('log | {line}')")]),
    ]
    stages[0] = stages[0]._replace(seconds=3)
    monkeypatch.setattr(gpu, "stages", lambda _: stages)
    assert gpu.main(["--output", str(tmp_path), "--data", str(tmp_path)]) == 0
    assert (tmp_path / "first_0.log").read_text().startswith("so far\n")
    assert (tmp_path / "second_1.log").read_text() == "done\n"
    report = (tmp_path / "report.md").read_text()
    for cell in ("['time is up']", "[3, 0]", " 7.5 |"):
        assert cell in report
    assert json.loads((tmp_path / "training.json").read_text()) == {"sdpa": [[12.0, 30, 7.5]]}


def test_our_models_run_with_each_kernel(monkeypatch):
    meta = torch.device("meta")
    # torch has no autocast for the meta device
    monkeypatch.setattr(Setting, "precision", lambda *_: contextlib.nullcontext())
    papers = ["transformer_xl", "kernels"]
    for case in Selection(papers, False, meta, 1, [], first=True).cases().values():
        for name, model in case.models.items():
            if name.startswith(case.ours) and BF16 in model.dtypes and "compiled" not in name:
                case.build(name, Setting(meta, BF16)).turn()
