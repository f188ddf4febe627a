"""Networks in plain PyTorch: the documented code runs, and so do PyTorch's own tools."""

import copy
import runpy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from fairseq_plugins.all_attention.attention import HeadProjection
from fairseq_plugins.modules import (
    AllAttentionBlock,
    ProductKeyMemory,
    TransformerXL,
    WeightedDecoderLayer,
)
from tests.end_to_end.commands import ROOT
from tests.modules import page
from tests.segment_language_model.networks import BUILDERS, build, draw, read_segments
from tests.tiny import scores_by_segment, tiny_model, tiny_transformer_xl, tokens

each_network = pytest.mark.parametrize("name", BUILDERS)


def test_the_pages_code_runs():
    shapes = [tuple(output.shape) for output, *_ in page.results()]
    assert shapes == [(8, 16, 64), (8, 16, 64), (8, 64, 512), (4, 12, 512)]


def test_the_example_carries_its_past_through_the_text(monkeypatch):
    example = runpy.run_path(str(ROOT / "examples" / "plain_pytorch" / "train.py"))
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


class Sum(nn.Module):
    """A linear map with another one beside it, as LoRA has."""

    def __init__(self, base, beside):
        super().__init__()
        self.base, self.beside = base, beside

    def forward(self, *args):
        return self.base(*args) + self.beside(*args)


def replace(network, name, beside):
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, Sum(network.get_submodule(name), beside))


def hook(network, name, beside):
    network.get_submodule(name).register_forward_hook(lambda _, args, out: out + beside(*args))


@each_network
def test_an_adapter_or_a_hook_on_any_linear_map_acts_as_other_weights(name):
    network = build(name)
    maps = {
        each: module
        for each, module in network.named_modules()
        if isinstance(module, (nn.Linear, HeadProjection))
    }
    kinds = {"q_proj", "k_proj", "v_proj", "out_proj"}
    kinds |= set() if "AllAttention" in name else {"position_projection.proj", "fc1", "fc2"}
    assert len(maps) == len(network.layers) * len(kinds)
    for each, module in maps.items():
        beside = copy.deepcopy(module)
        beside.weight.data = torch.randn_like(module.weight[:, :1]) @ module.weight[:1].detach()
        if getattr(beside, "bias", None) is not None:
            beside.bias.data.zero_()
        expected = copy.deepcopy(network)
        expected.get_submodule(each).weight.data += beside.weight
        for attach in (replace, hook):
            changed = copy.deepcopy(network)
            attach(changed, each, beside)
            for training in (True, False):
                y, wanted, without = (
                    outputs_and_gradients(one.train(training), one, training)[0]
                    for one in (changed, expected, network)
                )
                torch.testing.assert_close(y, wanted, msg=each)
                assert not torch.allclose(y, without), each


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
def test_a_network_trains_on_after_torch_func(name):
    network, x = build(name, kernel="plain"), draw()
    loss, parameters = cubic_loss(network)
    detached = {key: weight.detach() for key, weight in parameters.items()}
    gradients = grad(loss)(detached, x)
    network(x)[0].pow(3).sum().backward()
    afterwards = dict(network.named_parameters())
    assert gradients.keys() == afterwards.keys() == parameters.keys()
    for key, weight in afterwards.items():
        assert weight is parameters[key]
        torch.testing.assert_close(gradients[key], weight.grad)


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
