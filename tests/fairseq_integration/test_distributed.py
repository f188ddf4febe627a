"""Kinds of distributed training that a model does not support are refused; devices of commands."""

import os
import re
from contextlib import nullcontext

import fairseq.models
import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf

from tests import tiny
from tests.product_key_memory.tiny import MEMORY
from tests.recipes import EXAMPLES

SIZES = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_attention_heads": 2}
PLAIN = {"_name": "transformer_xl", "decoder_ffn_embed_dim": 24, **SIZES}
SPANS = {"_name": "all_attention_lm", "adaptive_span": True, "attention_span": 8, "span_ramp": 2}
SPANS |= {"persistent_vectors": 5, **SIZES}
SPARSE = {**PLAIN, **MEMORY, "memory_layers": "2"}
BRANCHES = {"_name": "weighted_transformer_tiny", "encoder_layers": 1, "decoder_layers": 1}
MODELS = [PLAIN, SPANS, SPARSE, BRANCHES]
# rows about distributed training in the table of docs/training.md
BACKENDS = ("legacy_ddp", "no_c10d", "pytorch_ddp", "c10d", "fully_sharded", "slowmo")
DISTRIBUTED_OPTIONS = {
    **{backend: {"ddp_backend": backend} for backend in BACKENDS},
    "--model-parallel-size": {"model_parallel_size": 2},
    "--pipeline-model-parallel": {"pipeline_model_parallel": True},
    "--use-bmuf": {"use_bmuf": True},
    "--zero-sharding": {"zero_sharding": "os"},
}


def build(model, group="distributed_training", from_checkpoint=False, **options):
    """Build a model as fairseq-train and fairseq-hydra-train do."""
    root = OmegaConf.create(
        {
            "task": tiny.SEGMENTS,
            "model": model,
            "optimizer": {"_name": "adam_with_memory"},
            group: options,
            # other groups refer to these values
            "bmuf": {name: f"${{{group}.{name}}}" for name in options},
        }
    )
    return fairseq.models.build_model(root.model, tiny.tiny_task(), from_checkpoint)


def test_what_does_not_go_with_a_model_is_refused():
    for model, group, options, words in (
        (PLAIN, "common", {"model_parallel_size": 2}, "--model-parallel-size is 2: .*leave it"),
        (PLAIN, "other", {"ddp_backend": "slowmo"}, "--ddp-backend is slowmo: .*pytorch_ddp"),
        (SPANS, "optimization", {"use_bmuf": True}, "--use-bmuf is True: .*AdaptiveSpan"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            build(model, group, **options)
        # evaluation does not train
        build(model, group, from_checkpoint=True, **options)
    # parsed options are checked, too
    args = tiny.translation_arguments(arch="weighted_transformer", zero_sharding="os")
    ARCH_CONFIG_REGISTRY["weighted_transformer"](args)
    with pytest.raises(ValueError, match=r"^--zero-sharding is .*: parameters of BranchWeights"):
        fairseq.models.build_model(args, tiny.tiny_task())


def test_the_page_says_what_is_refused():
    page = (EXAMPLES.parent / "docs" / "training.md").read_text(encoding="utf-8")
    table = page.partition("\n## What goes with what\n")[2].partition("\n## ")[0]
    seen = set()
    for row in re.findall(r"^\| (`--.*) \|$", table, re.MULTILINE):
        label, *cells = row.split(" | ")
        words = re.findall(r"[-\w]+", label)
        named = [word for word in DISTRIBUTED_OPTIONS if word in words]
        seen.update(named)
        assert set(cells) <= {"tested", "refused", "not run", "no such option"}
        assert named or "refused" not in cells, label
        for word in named:
            for model, cell in zip(MODELS, cells, strict=True):
                flag = next(iter(DISTRIBUTED_OPTIONS[word])).replace("_", "-")
                refused = pytest.raises(ValueError, match=f"^--{flag} is ")
                with refused if cell == "refused" else nullcontext():
                    build(model, **DISTRIBUTED_OPTIONS[word])
    assert seen == set(DISTRIBUTED_OPTIONS)


def test_with_cpu_a_command_sees_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cfg, seen = OmegaConf.structured(FairseqConfig()), []
    cfg.common.cpu, cfg.distributed_training.distributed_world_size = True, 1
    distributed_utils.call_main(cfg, lambda cfg: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    assert seen == [""]
