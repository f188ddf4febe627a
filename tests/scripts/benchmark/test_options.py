"""Options of benchmarks: what is refused, with what to give in place of it, and --quick."""

import importlib

import pytest
import torch

BAD = {
    "transformer_xl": [
        ("--steps 0", "--steps is '0': give a number of 1 or more"),
        ("--threads two", "--threads is 'two': give a number of 1 or more"),
        ("--train 512/512", "--train is '512/512': give SEGMENT/MEMORY/BATCH, such as 512/512/2"),
        (
            "--train 1/2/3/4",
            "--train is '1/2/3/4': give SEGMENT/MEMORY/BATCH, such as 512/512/2",
        ),
        (
            "--evaluate 8/-1/2",
            "--evaluate is '8/-1/2': give SEGMENT/MEMORY/BATCH, such as 512/512/2, or "
            "SEGMENT/MEMORY/BATCH/CLAMP, such as 80/2100/1/820",
        ),
        ("--evaluate 8/8/0", "--evaluate is '8/8/0': only the memory may be 0"),
        (
            "--evaluate 8/0/1/4",
            "--evaluate is '8/0/1/4': CLAMP goes with a memory, give one or drop CLAMP",
        ),
        ("--train --evaluate", "--train and --evaluate are empty: give one of them a setting"),
        ("--dtype fp16", "--dtype is 'fp16': give one or more of fp32, bf16, bf16-autocast"),
        ("--device tpu", "--device is 'tpu': give cpu, cuda, or a GPU by number, as cuda:0"),
        (
            "--device cuda:7",
            "--device is 'cuda:7' and PyTorch sees 0 GPUs: give one of those, or cpu",
        ),
        (
            "--original nowhere",
            "--original is nowhere, and neither it nor its folder pytorch has mem_transformer.py: "
            "give the folder of a checkout of the published code, "
            "https://github.com/kimiyoung/transformer-xl",
        ),
    ],
    "all_attention": [
        ("--case large", "--case is 'large': give one or more of small, tiny, uneven"),
        ("--mode test", "--mode is 'test': give one or more of train, evaluate"),
        (
            "--original nowhere",
            "--original is nowhere, and it has no models.py: give the folder of a checkout of the "
            "published code, https://github.com/facebookresearch/adaptive-span",
        ),
    ],
    "product_key_memory": [
        ("--slots 64 8", "--slots is 8: product keys need a square number, such as 4 or 9"),
        ("--slots 9 4 --knn 5", "--knn is 5: give at most --slots, 4"),
        ("--slots many", "--slots is 'many': give a number of 1 or more"),
        ("--heads 0", "--heads is '0': give a number of 1 or more"),
        ("--knn -1", "--knn is '-1': give a number of 1 or more"),
        ("--tokens 1.5", "--tokens is '1.5': give a number of 1 or more"),
        ("--steps 0", "--steps is '0': give a number of 1 or more"),
        (
            "--mode test",
            "--mode is 'test': give one or more of train, inference, search, fixed-rows",
        ),
        ("--dtype fp16", "--dtype is 'fp16': give one or more of fp32, bf16, bf16-autocast"),
        ("--device tpu", "--device is 'tpu': give cpu, cuda, or a GPU by number, as cuda:0"),
        (
            "--slots 64 --knn 9 --original .",
            "--knn is 9: beside --original give at most the root of --slots, 8",
        ),
        (
            "--original nowhere",
            "--original is nowhere, and it has no xlm/model/memory/memory.py: give the folder of a "
            "checkout of the published code, https://github.com/facebookresearch/XLM",
        ),
    ],
    "weighted_transformer": [
        ("--size huge", "--size is 'huge': give one or more of small, base"),
        (
            "--part attention",
            "--part is 'attention': give one or more of matrices, training, generation",
        ),
        ("--tokens 0", "--tokens is '0': give a number of 1 or more"),
        ("--steps x", "--steps is 'x': give a number of 1 or more"),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [(name, *case) for name, cases in BAD.items() for case in cases],
)
def test_bad_options_are_refused(monkeypatch, capsys, name, arguments, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    benchmark = importlib.import_module(f"scripts.benchmark.{name}")
    assert benchmark.main(arguments.split()) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transformer_xl", "TransformerXLBenchmark"),
        ("all_attention", "AllAttentionBenchmark"),
        ("product_key_memory", "MemoryBenchmark"),
        ("weighted_transformer", "WeightedTransformerBenchmark"),
    ],
)
def test_a_quick_run_is_expected_to_take_less_than_3_minutes(name, kind):
    kind = getattr(importlib.import_module(f"scripts.benchmark.{name}"), kind)
    quick, whole = (kind(kind.parse_options(words)) for words in (["--quick"], []))
    assert quick.expected_seconds() < 180
    assert whole.expected_seconds() > 2 * quick.expected_seconds()
