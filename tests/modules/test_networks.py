"""Blocks equal the models' layers; the documented code runs; PyTorch's own tools work."""

import copy
import re
import runpy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from fairseq_plugins.all_attention.attention import HeadProjection
from fairseq_plugins.modules import (
    AllAttentionBlock,
    Past,
    ProductKeyMemory,
    TransformerXL,
    TransformerXLBlock,
    WeightedDecoderLayer,
)
from tests.end_to_end.commands import ROOT
from tests.segment_language_model.networks import BUILDERS, build, draw, read_segments
from tests.tiny import scores_by_segment, spread_spans, tiny_model, tiny_transformer_xl, tokens

LENGTH, MEM_LEN, SPAN, SEGMENTS = 8, 11, 6, 4
each_block = pytest.mark.parametrize("name", [name for name in BUILDERS if "Block" in name])
each_network = pytest.mark.parametrize("name", BUILDERS)


def test_the_pages_code_runs():
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    names = {"__name__": "page"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    assert names["y"].shape == (8, 16, 64)
    assert [past.length for past in names.values() if isinstance(past, Past)] == [32]
    assert names["output"].shape == (4, 12, 512)


@pytest.fixture(scope="module")
def example():
    """Return the names that the example defines."""
    return runpy.run_path(str(ROOT / "examples" / "plain_pytorch" / "train.py"))


def transformer_xl():
    model = tiny_transformer_xl(mem_len=MEM_LEN)
    for vector in model.decoder.network.layers[0].self_attn.biases.parameters():
        nn.init.normal_(vector)
    return model, TransformerXLBlock(16, 2, 24, MEM_LEN)


def all_attention():
    model = tiny_model(adaptive_span=True, span_ramp=2, mem_len=SPAN)
    spread_spans(model)
    block = AllAttentionBlock(16, 2, 5, SPAN)
    block.self_attn.span.ramp = 2
    block.positions.load_state_dict(model.decoder.network.positions.state_dict())
    return model, block


@pytest.mark.parametrize("build", [transformer_xl, all_attention])
@pytest.mark.parametrize("training", [True, False])
def test_a_block_equals_the_models_layer(build, training):
    """Compare it with each layer of a model that reads a text segment by segment."""
    model, block = (module.train(training) for module in build())
    layers, seen = model.decoder.network.layers, []
    for layer in layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append((layer, args[0], out[0])))
    pasts = {}
    with torch.set_grad_enabled(training):
        mode = torch.enable_grad if training else torch.no_grad
        scores_by_segment(model, tokens(2, SEGMENTS * LENGTH), LENGTH, mode)
        for layer, x, expected in seen:
            block.layers[0].load_state_dict(layer.state_dict())
            y, pasts[layer] = block(x, pasts.get(layer))
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert len(seen) == SEGMENTS * len(layers)
    # without its past, it would not equal the layer
    assert not torch.allclose(block(x)[0], expected)


def test_the_example_carries_its_past_through_the_text(example, monkeypatch):
    lengths, forward = [], example["LanguageModel"].forward

    def recorded(self, inputs, past=None):
        lengths.append(None if past is None else past.length)
        return forward(self, inputs, past)

    monkeypatch.setattr(example["LanguageModel"], "forward", recorded)
    example["train"]("to be or not to be? " * 4, updates=5, streams=2, segment=13)
    # three segments of each stream, then from the start again
    assert lengths == [None, 13, 26, None, 13]


# under PyTorch's own tools


def outputs_and_gradients(call, network, with_gradients=True):
    """Return the outputs of three segments, and the gradients of their sum of squares."""
    with torch.set_grad_enabled(with_gradients):
        y, _ = read_segments(call, draw().split(4, dim=1))
    if not with_gradients:
        return [y]
    parameters = list(network.parameters())
    return [y, *torch.autograd.grad(y.square().sum(), parameters, materialize_grads=True)]


@pytest.mark.slow
@each_network
def test_compiled_networks_compute_the_same(name):
    torch.compiler.reset()
    network = build(name)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for training in (True, False):
        network.train(training)
        torch.testing.assert_close(
            outputs_and_gradients(compiled, network, training),
            outputs_and_gradients(network, network, training),
        )
    # a past that was made without the compiler
    with torch.no_grad():
        text, rest = draw().split([7, 5], dim=1)
        _, past = read_segments(network, text.split([6, 1], dim=1))
        torch.testing.assert_close(compiled(rest, past)[0], network(rest, past)[0])


@pytest.mark.slow
@pytest.mark.parametrize("build_model", [tiny_transformer_xl, tiny_model])
@pytest.mark.parametrize("training", [True, False])
def test_models_with_compiled_layers_compute_the_same(monkeypatch, build_model, training):
    torch.compiler.reset()
    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, **options: compile_module(self, backend="aot_eager", **options),
    )
    # --mem-len 6 is full after one segment of 8, and the last segment is shorter
    stream, options, results = tokens(2, 36), {"mem_len": 6}, []
    for compiled in (True, False):
        model = build_model(**options, compile_layers=compiled).double().train(training)
        scores = scores_by_segment(
            model, stream, 8, torch.enable_grad if training else torch.no_grad
        )
        results.append([scores])
        if training:
            results[-1] += torch.autograd.grad(scores.square().sum(), [*model.parameters()])
    torch.testing.assert_close(*results)


def projections(network):
    """Return the names of all linear maps of a network, and the maps."""
    kinds = (nn.Linear, HeadProjection)
    return {name: each for name, each in network.named_modules() if isinstance(each, kinds)}


class Adapted(nn.Module):
    """A linear map with another one of low rank beside it, as LoRA has."""

    def __init__(self, base, added):
        super().__init__()
        self.base, self.added = base, copy.deepcopy(base)
        self.added.weight.data.copy_(added)
        if getattr(base, "bias", None) is not None:
            self.added.bias.data.zero_()

    def forward(self, *args):
        return self.base(*args) + self.added(*args)


@each_network
def test_every_linear_map_can_be_replaced(name):
    torch.manual_seed(1)
    network = build(name)
    names = set(projections(network))
    maps = {"q_proj", "k_proj", "v_proj", "out_proj"}
    maps |= set() if "AllAttention" in name else {"position_projection.proj", "fc1", "fc2"}
    assert len(names) == len(network.layers) * len(maps)
    for each in names:
        adapted, expected = copy.deepcopy(network), copy.deepcopy(network)
        weight = projections(network)[each].weight
        added = torch.randn_like(weight[:, :1]) @ torch.randn_like(weight[:1])
        parent, _, child = each.rpartition(".")
        setattr(adapted.get_submodule(parent), child, Adapted(projections(adapted)[each], added))
        projections(expected)[each].weight.data += added
        for training in (True, False):
            (y, *_), (wanted, *_), (without, *_) = (
                outputs_and_gradients(one.train(training), one, training)
                for one in (adapted, expected, network)
            )
            torch.testing.assert_close(y, wanted)
            assert not torch.allclose(y, without), each


@each_network
def test_networks_call_each_linear_map_with_its_hooks(name):
    network = build(name)
    for linear_map, module in projections(network).items():
        for training in (True, False):
            network.train(training)
            plain = outputs_and_gradients(network, network, training)[0]
            hook = module.register_forward_hook(lambda _, args, out: 2 * out)
            hooked = outputs_and_gradients(network, network, training)[0]
            hook.remove()
            assert not torch.allclose(hooked, plain), linear_map


# higher derivatives and torch.func


def cubic_loss(network, past=None):
    """Return a function from parameters and a segment to a loss, and the parameters."""

    def loss(parameters, x):
        y, _ = functional_call(network, parameters, (x, past))
        return y.pow(3).sum()

    return loss, dict(network.named_parameters())


def training_past(network):
    """Return a past for training, without gradients."""
    with torch.no_grad():
        return network(draw(1, 3, seed=5))[1]


@each_network
def test_plain_networks_have_second_derivatives(name):
    network = build(name, kernel="plain")
    past, x = training_past(network), draw(1, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: network(x, past)[0], [x])
    # a penalty of the gradient, as in double backpropagation
    (gradient,) = torch.autograd.grad(network(x, past)[0].sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert all(layer.self_attn.q_proj.weight.grad.any() for layer in network.layers)


@each_network
def test_plain_networks_work_under_torch_func(name):
    network = build(name, kernel="plain")
    past, x = training_past(network), draw(3, 1, 2)
    loss, parameters = cubic_loss(network, past)
    rows = [
        torch.autograd.grad(loss(parameters, row), [*parameters.values()], materialize_grads=True)
        for row in x
    ]
    one = grad(loss)(parameters, x[0])
    torch.testing.assert_close([*one.values()], [*rows[0]])
    # gradients of each stream
    by_stream = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    expected = [torch.stack(each) for each in zip(*rows, strict=True)]
    torch.testing.assert_close([*by_stream.values()], expected)
    jacobian = jacrev(lambda x: network(x, past)[0])(x[0])
    expected = torch.autograd.functional.jacobian(lambda x: network(x, past)[0], x[0])
    torch.testing.assert_close(jacobian, expected)


@each_network
def test_fast_networks_refuse_higher_derivatives_and_name_the_kernel(name):
    network = build(name)
    x = draw(1, 2).requires_grad_()
    loss, parameters = cubic_loss(network)
    for use in (
        lambda: torch.autograd.grad(network(x)[0].sum(), x, create_graph=True),
        lambda: grad(loss)(parameters, x),
        lambda: vmap(lambda x: network(x)[0])(x[None]),
        lambda: jacrev(lambda x: network(x)[0])(x),
    ):
        with pytest.raises(ValueError, match=r"with `kernel` 'fast', .* with kernel='plain'"):
            use()


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (TransformerXL, {"num_layers": 2, "embed_dim": 8, "num_heads": 2, "ffn_dim": 8}),
        (AllAttentionBlock, {"embed_dim": 8, "num_heads": 2, "persistent_vectors": 4, "span": 4}),
        (WeightedDecoderLayer, {"embed_dim": 8, "num_heads": 2, "ffn_dim": 8}),
        (ProductKeyMemory, {"embed_dim": 8, "slots": 4, "heads": 2, "knn": 2, "query_dim": 4}),
    ],
)
def test_layers_name_a_size_that_is_too_small(layer, sizes):
    more = {"mem_len": 4} if layer is TransformerXL else {}
    for name in sizes:
        with pytest.raises(ValueError, match=f"`{name}` is -1: it must"):
            layer(**{**sizes, name: -1}, **more)
