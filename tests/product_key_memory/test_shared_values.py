"""Memories that share one table of values: gradients, updates, state."""

import pytest
import torch
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import nn

from fairseq_plugins.fairseq_integration.parameters import set_update_rule
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import FairseqAdamWithMemory
from tests.gradients import assert_same
from tests.product_key_memory.standalone import (
    TOKENS,
    WIDTH,
    D,
    dense,
    draw,
    exact_memory,
    learn,
    options,
)
from tests.product_key_memory.tiny import (
    build,
    memories,
    padded,
    parameters,
    score,
    tiny_language_model,
)
from tests.reference.product_key_memory import product_key_memory


class Pair(nn.Module):
    """Two memories, one after the other, the second with the values of the first."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    @property
    def values(self):
        return self.first.values

    def forward(self, x):
        return self.second(x + self.first(x))


def make_pair(apart, slots=16, knn=16, seed=1):
    torch.manual_seed(seed)
    first = ProductKeyMemory(WIDTH, slots=slots, heads=2, knn=knn, query_dim=4)
    second = ProductKeyMemory(WIDTH, slots=slots, heads=1, knn=knn, query_dim=6, values_of=first)
    if apart:
        for memory in (first, second):
            memory.keep_gradient_beside_autograd()
            set_update_rule(memory.keys.subkeys, memory.table)
    return Pair(first, second)


@pytest.mark.parametrize("search", ["torch", "plain"])
def test_values_and_all_gradients_equal_the_reference(search):
    first = exact_memory(value_dim=3, search=search)
    second = exact_memory(2, value_dim=3, search=search, heads=1, output_gate=True, values_of=first)
    x = draw(TOKENS, D)
    slow = product_key_memory(second, x + product_key_memory(first, x))
    fast = second(x + first(x))
    assert_same(fast, slow, [x, *nn.ModuleList([first, second]).parameters()])


def test_a_gradient_beside_autograd_is_the_same():
    """Also over two passes, of which the first leaves a memory out."""
    plain, apart = make_pair(False, slots=64, knn=3), make_pair(True, slots=64, knn=3)
    x = torch.randn(2, 5, WIDTH)
    for pair in (plain, apart):
        pair.first(x[0]).square().sum().backward()
        pair(x[1]).square().sum().backward()
    torch.testing.assert_close(apart.values.grad.to_dense(), plain.values.grad)
    for of_apart, of_plain in zip(dense(apart), dense(plain)[1:], strict=True):
        torch.testing.assert_close(of_apart.grad, of_plain.grad)


def test_a_gradient_that_a_failed_pass_left_is_cleared():
    pair, fresh = make_pair(True), make_pair(True)
    x = torch.randn(2, 5, WIDTH)
    pair(x[0]).sum().backward()
    for parameter in dense(pair):
        parameter.grad = None
    for each in (pair, fresh):
        each(x[1]).square().sum().backward()
    torch.testing.assert_close(pair.values.grad.to_dense(), fresh.values.grad.to_dense())


def test_the_table_is_updated_once_as_fairseqs_adam_would():
    """All rows are read, so that lazy Adam is Adam."""
    lazy, plain = make_pair(apart=True), make_pair(apart=False)
    choices = {"lr": [1e-3], "adam_eps": 1e-6}
    optimizer = FairseqAdamWithMemory(options(**choices), dense(lazy))
    assert len(optimizer.tables) == 1
    learn(lazy, optimizer)
    learn(plain, FairseqAdam(options(FairseqAdamConfig, **choices), dense(plain)))
    torch.testing.assert_close(dict(lazy.state_dict()), dict(plain.state_dict()))
    assert [state["step"] for state in optimizer.state_dict()["tables"]] == [5]


def test_a_state_has_the_table_once():
    pair, other = make_pair(False), make_pair(False, seed=2)
    state = pair.state_dict()
    assert [name for name in state if name.endswith("values")] == ["first.values"]
    other.load_state_dict(state)
    assert other.second.values is other.first.values
    assert torch.equal(other.second.values, pair.values)


def test_a_state_with_two_tables_is_refused():
    pair = make_pair(False)
    state = {**pair.state_dict(), "second.values": torch.zeros(16, WIDTH)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "second.values"'):
        pair.load_state_dict(state)


def test_values_of_another_shape_are_refused():
    first = exact_memory()
    for change in ({"slots": 36}, {"value_dim": 4}):
        (name,) = change
        with pytest.raises(ValueError, match=f"^`{name}` is .* whose values are shared: give both"):
            exact_memory(values_of=first, **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_counts_the_table_once(dtype):
    own, shared = (
        tiny_language_model(memory_layers="1,2,3", memory_share_values=share).to(dtype)
        for share in (False, True)
    )
    assert parameters(own) - parameters(shared) == 2 * 49 * 16
    one, *others = memories(shared)
    assert all(other.values is one.values for other in others)
    assert sum(name.endswith("memory.values") for name in shared.state_dict()) == 1


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "recomputed"])
def test_encoder_and_decoder_share_a_table(checkpoint):
    """With activations that are computed again, and the gradient beside autograd."""
    choices = {"memory_share_values": True, "memory_output_gate": True, "memory_parallel": True}
    found = []
    for optimizer, again in (("adam", False), ("adam_with_memory", checkpoint)):
        model = build(
            "translation", memory_optimizer=optimizer, checkpoint_activations=again, **choices
        )
        score(model.train(), padded(7, 4)).square().sum().backward()
        one, other = memories(model)
        assert other.values is one.values
        found.append(one.values.grad)
    torch.testing.assert_close(found[1].to_dense(), found[0])
