"""Memories that are compiled, exported, on the meta device, copied, pickled and saved."""

import copy
import pickle

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_plugins.product_key_memory.model import MemoryLanguageModel, MemoryLanguageModelConfig
from tests.product_key_memory.standalone import (
    EVERYTHING,
    PADDING,
    TOKENS,
    D,
    adam_with_memory,
    draw,
    exact_memory,
)
from tests.product_key_memory.tiny import BUILDERS, build, memories, padded, score

VARIANTS = pytest.mark.parametrize(
    "variant", [{}, {"keys": "flat"}, {"query_batch_norm": True}, EVERYTHING]
)
MASKS = pytest.mark.parametrize("mask", [None, torch.tensor(PADDING)], ids=["", "padded"])


@VARIANTS
@MASKS
def test_a_compiled_memory_is_one_graph_with_the_same_gradients(variant, mask):
    eager = exact_memory(**variant)
    twin = copy.deepcopy(eager)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = draw(TOKENS, D)
    found = []
    for module, memory in ((eager, eager), (compiled, twin)):
        out = module(x, mask)
        gradients = torch.autograd.grad(out.square().sum(), [x, *memory.parameters()])
        found.append([out.detach(), *gradients, *memory.buffers()])
    torch.testing.assert_close(*found)


@VARIANTS
@MASKS
def test_an_exported_memory_is_the_same(variant, mask):
    memory, x = exact_memory(**variant).eval(), draw(TOKENS, D).detach()
    given = (x,) if mask is None else (x, mask)
    exported = torch.export.export(memory, given).module()
    torch.testing.assert_close(exported(*given), memory(*given))


@VARIANTS
@MASKS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_memory_on_the_meta_device_gives_shapes(variant, mask, training, sparse):
    memory = exact_memory(sparse=sparse, **variant).to("meta").train(training)
    x = torch.empty(TOKENS, D, dtype=torch.float64, device="meta", requires_grad=True)
    out = memory(x, None if mask is None else mask.to("meta"))
    out.sum().backward()
    assert out.is_meta
    assert out.shape == x.grad.shape == x.shape
    assert memory.values.grad.shape == memory.values.shape


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_copy_of_a_model_is_trained_as_the_model_is(kind, copied):
    model = build(kind, memory_optimizer="adam_with_memory", memory_share_values=True)
    twin, batch = copied(model), padded(7, 4)
    for each in (model, twin):
        optimizer = adam_with_memory(each)
        (table,) = optimizer.tables
        assert all(memory.table is table for memory in memories(each))
        optimizer.backward(score(each.train(), batch).square().sum())
        optimizer.step()
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))


def test_a_language_model_of_a_command_line_can_be_pickled():
    """omegaconf makes classes of choices, which pickle does not find."""
    model = build("language model")
    given = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 2}
    sizes = {"memory_layers": "2", "memory_slots": 49, "memory_knn": 3, "memory_query_dim": 8}
    others = {"add_bos_token": False, "max_target_positions": None, "tokens_per_sample": 16}
    cfg = OmegaConf.merge(
        OmegaConf.structured(MemoryLanguageModelConfig),
        {**given, **sizes, **others, "decoder_layers": 2, "memory_optimizer": None, "tpu": False},
    )
    task = type("Task", (), {"source_dictionary": None, "target_dictionary": None})
    task.source_dictionary = task.target_dictionary = model.decoder.dictionary
    model = MemoryLanguageModel.build_model(cfg, task).eval()
    torch.testing.assert_close(by_pickle(model)(padded(5))[0], model(padded(5))[0])
