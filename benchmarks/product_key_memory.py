"""Compare a memory with layers that do the same, and a model that has one with a deeper model.

Shapes: B texts, T tokens of a text, N tokens, H heads, k slots read by a head, n = √K sub-keys of
each half, d model width.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam

from benchmarks.measure import EVALUATION, PUBLISHED, TRAINING, Case, Model, Setting, Work
from benchmarks.published import PublishedMemory
from fairseq_plugins.modules import ProductKeyMemory
from fairseq_plugins.product_key_memory.lazy_adam import LazyMemory
from fairseq_plugins.product_key_memory.model import (
    LANGUAGE_MODELS,
    MemoryLanguageModel,
    MemoryLanguageModelConfig,
)
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemory

WIDTH, QUERY_WIDTH = 512, 256
# the paper's BPE (section 4.1)
SYMBOLS = 60_000
RATES = {"lr": 2.5e-4, "betas": (0.9, 0.98)}
MEMORY_RATE = 1e-3


class PlainMemory(nn.Module):
    """The paper's memory, made with ``nn.EmbeddingBag``, with all k² sums of two halves.

    Args:
        memory: our memory, whose weights it starts with.
        sparse: whether the values get a sparse gradient.
    """

    def __init__(self, memory: ProductKeyMemory, sparse: bool) -> None:
        super().__init__()
        self.query_network = copy.deepcopy(memory.query.layers)
        # (H, 2, n, d_q/2)
        self.subkeys = nn.Parameter(memory.keys.subkeys.detach().clone())
        self.values = nn.EmbeddingBag.from_pretrained(
            memory.values.weight.detach(), freeze=False, mode="sum", sparse=sparse
        )
        self.knn = memory.knn

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, d) to (N, d)."""
        heads, _, n, _ = self.subkeys.shape
        for layer in self.query_network:
            x = layer(x)
        halves = x.view(len(x), heads, 2, -1)
        # (N, H, 2, n) -> (N, H, 2, k)
        best, numbers = torch.einsum("nhsd,hsid->nhsi", halves, self.subkeys).topk(self.knn)
        sums = (best[:, :, 0, :, None] + best[:, :, 1, None]).flatten(2)
        slots = (numbers[:, :, 0, :, None] * n + numbers[:, :, 1, None]).flatten(2)
        scores, pairs = sums.topk(self.knn)
        weights = scores.float().softmax(-1).to(self.values.weight.dtype).flatten(1)
        return self.values(slots.gather(2, pairs).flatten(1), per_sample_weights=weights)


def our_optimizers(memory: LazyMemory) -> list[Optimizer]:
    """Return an Adam for the rows that were read and for all other weights."""
    learned = [weight for weight in memory.parameters() if weight.requires_grad]
    return [AdamWithMemory(learned, [memory.values], MEMORY_RATE, **RATES)]


def their_optimizers(module: nn.Module, sparse: bool = False) -> list[Optimizer]:
    """Return Adam, and SparseAdam for a table with sparse gradients."""
    values = module.values.weight
    rest = [weight for weight in module.parameters() if weight is not values]
    table = {"params": [values], "lr": MEMORY_RATE, "betas": RATES["betas"]}
    if sparse:
        return [SparseAdam([table]), Adam(rest, **RATES)]
    return [Adam([table, {"params": rest}], **RATES)]


def feed_forward(_: ProductKeyMemory) -> nn.Module:
    """Return the sublayer that a memory replaces."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def memory_case(
    slots: int,
    mode: str,
    published: type[nn.Module] | None = None,
    heads: int = 4,
    knn: int = 32,
    tokens: int = 2048,
    title: str = "",
) -> Case:
    """Return a case of a memory of K slots that reads N tokens; training includes the update."""

    def build(
        make: Callable[[ProductKeyMemory], nn.Module],
        make_optimizers: Callable[[Any], list[Optimizer]],
        setting: Setting,
    ) -> Work:
        x, grad = torch.randn(2, tokens, WIDTH)
        memory = LazyMemory(WIDTH, slots, heads, knn, QUERY_WIDTH)
        module = setting.prepare(make(setting.prepare(memory)))
        x, grad = (numbers.to(next(module.parameters())) for numbers in (x, grad))
        # the layers below a memory need a gradient as well
        x.requires_grad_()
        optimizers = make_optimizers(module)

        def train() -> None:
            module.train()
            with setting.precision():
                output = module(x)
            output.backward(grad.to(output.dtype))
            for optimizer in optimizers:
                optimizer.step()
            module.zero_grad(set_to_none=True)
            x.grad = None

        def infer() -> Tensor:
            module.eval()
            with setting.precision(training=False):
                return module(x.detach())

        return Work(train if mode == TRAINING else infer, infer)

    def plain_adam(module: nn.Module) -> list[Optimizer]:
        return [Adam(module.parameters(), **RATES)]

    models = {
        "ProductKeyMemory": Model(partial(build, lambda memory: memory, our_optimizers)),
        "feed-forward": Model(partial(build, feed_forward, plain_adam)),
    }
    for name, sparse in (("", False), (", sparse", True)):
        optimizers = partial(their_optimizers, sparse=sparse)
        plain = partial(PlainMemory, sparse=sparse)
        models["EmbeddingBag" + name] = Model(partial(build, plain, optimizers), same=True)
        if published:
            theirs = partial(PublishedMemory, published, sparse=sparse)
            models[PUBLISHED + name] = Model(partial(build, theirs, optimizers), same=True)
    name = f"{slots:,} slots, {heads} heads, {knn} slots a head"
    # of nearly equal scores at the last rank, either may be selected
    close = {"tolerance": 1e-5, "min_agreement": 0.99}
    return Case("product_key_memory", name, mode, tokens, models, title, **close)


def inference_case(
    layers: int,
    width: int,
    texts: int,
    generated: bool,
    length: int = 256,
    symbols: int = SYMBOLS,
    slots: int = 512**2,
) -> Case:
    """Return a case of half of the ``layers`` and a memory beside all of them (section 4.4).

    A turn reads B prompts of T tokens, or generates as many symbols one by one, the output layer
    included. Nothing is trained, so the texts are random.
    """
    dictionary = Dictionary()
    for number in range(symbols - dictionary.nspecial):
        dictionary.add_symbol(str(number))

    def build(depth: int, memory_layers: str | None, setting: Setting) -> Work:
        preset = LANGUAGE_MODELS["pkm_transformer_lm_24l_1024d"]
        sizes = {"decoder_embed_dim": width, "decoder_ffn_embed_dim": 4 * width}
        options = MemoryLanguageModelConfig(
            **{**preset, **sizes, "decoder_layers": depth},
            memory_layers=memory_layers,
            memory_slots=slots if memory_layers else 512**2,
            memory_optimizer=None,
            add_bos_token=False,
            max_target_positions=length,
            tpu=False,
        )
        task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
        model = setting.prepare(MemoryLanguageModel.build_model(options, task)).eval()
        tokens = torch.randint(4, symbols, (texts, length)).to(setting.device)

        def read() -> Tensor:
            with setting.precision(training=False):
                return model(tokens)[0]

        def generate() -> None:
            state: dict[str, Any] = {}
            text = tokens[:, :1]
            with setting.precision(training=False):
                for _ in range(length):
                    scores, _ = model.decoder(text, incremental_state=state)
                    text = torch.cat([text, scores[:, -1:].argmax(-1)], dim=1)

        return Work(generate if generated else read, read)

    half = layers // 2
    models = {
        f"{half} layers and a memory": Model(partial(build, half, str(half // 2))),
        f"{layers} layers": Model(partial(build, layers, None)),
    }
    work = "generation of" if generated else "prompts of"
    name = f"{work} {texts} x {length} tokens, width {width:,}"
    return Case("product_key_memory", name, EVALUATION, texts * length, models)
