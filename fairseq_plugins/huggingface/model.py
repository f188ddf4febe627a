"""The networks of two papers as models of Hugging Face's transformers, without fairseq.

A model reads a text as ``fairseq-eval-lm`` does: in segments of ``tokens_per_sample`` tokens, each
with the past of those before. A ``<s>`` at the beginning, where the tokenizer puts it, counts as
``</s>``, from which fairseq predicts a first token.

Shapes: B rows, T tokens of a row, V symbols, d model width.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from fairseq_plugins.all_attention.network import (
    AllAttentionNetwork,
    AllAttentionSettings,
    learned_spans,
)
from fairseq_plugins.huggingface.vocabulary import AdaptiveSoftmax, build_embedding, build_output
from fairseq_plugins.precision import without_autocast
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED, Window
from fairseq_plugins.segment_language_model.network import SegmentNetwork
from fairseq_plugins.segment_language_model.past import HiddenStates, Past
from fairseq_plugins.transformer_xl.dropout import WordDropout
from fairseq_plugins.transformer_xl.network import (
    INIT_STD,
    TransformerXL,
    TransformerXLSettings,
    dropout_class,
    initialise,
)

# fairseq's index of </s>
EOS = 2
# the name of a cache in calls and outputs; releases of transformers differ
FIELDS = CausalLMOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if "cache" in FIELDS else "past_key_values"


class SegmentConfig(PreTrainedConfig):
    """The options of fairseq-train that a model was trained with; docs/options.md explains them.

    Those of product-key memories are left out. ``pad_token_id`` and so on are those of fairseq's
    dictionaries, whose ``</s>`` ends a line, and not a text.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "decoder_embed_dim",
        "intermediate_size": "decoder_ffn_embed_dim",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    # options that exported folders lack need a default here
    use_cache: bool = True
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int | None = None

    def layer_settings(self) -> dict[str, Any]:
        """Return the arguments of a :class:`.LayerSettings`."""
        return {
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "clamp_len": self.clamp_len,
            "normalize_before": self.decoder_normalize_before,
            "final_norm": not self.no_decoder_final_norm,
            "layer_norm_epsilon": self.layer_norm_epsilon,
        }


class TransformerXLConfig(SegmentConfig):
    """Options of ``transformer_xl``."""

    model_type: ClassVar[str] = "transformer_xl"


class AllAttentionConfig(SegmentConfig):
    """Options of ``all_attention_lm``; spans stay as they were learned."""

    model_type: ClassVar[str] = "all_attention"


class Group(NamedTuple):
    """The ``rows`` (n,) of a batch with as much ``padding`` on the left, and their past."""

    rows: Tensor
    padding: int
    past: Past | None = None


class SegmentCache:
    """What a model keeps of the B rows of a batch: ``cache``, or ``past_key_values``, in a call.

    A past has no gaps, so rows with as much padding are read together, and others by themselves.
    """

    # for ``generate``: the cache grows, goes on from its end only, and holds keys of tokens
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        self.length, self.ends_in_padding = 0, False
        if attention_mask is None:
            self.groups = [Group(torch.arange(len(input_ids), device=input_ids.device), 0)]
            return
        mask = attention_mask.long()
        if (
            mask.shape != input_ids.shape
            or ((mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0] != 1).any()
        ):
            raise ValueError(
                f"attention_mask has the shape {tuple(mask.shape)} for input_ids of "
                f"{tuple(input_ids.shape)}, or gaps: padding can only be on the left or right of a "
                "row's tokens, so give no mask, or one as the tokenizer makes it"
            )
        padding = mask.argmax(1)
        self.groups = [
            Group(padding.eq(each).nonzero().view(-1), each) for each in padding.unique().tolist()
        ]
        self.ends_in_padding = not bool(mask[:, -1].all())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read so far, with padding."""
        return self.length

    def reorder_cache(self, order: Tensor) -> None:
        """Make row ``order[i]`` row i, as beam search asks; ``order`` is (B,)."""
        groups = []
        for rows, padding, past in self.groups:
            new, old = (order.unsqueeze(1) == rows).nonzero().unbind(1)
            groups.append(Group(new, padding, None if past is None else past.select(old)))
        self.groups = groups


class SegmentForCausalLM(PreTrainedModel, GenerationMixin):
    """Embeddings, a network that reads segments, and an output, with fairseq's names of weights."""

    config_class = SegmentConfig
    supports_gradient_checkpointing = True
    # a cache cannot go back, which assisted generation would ask for
    _is_stateful = True
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["span"]  # as Float32Module does

    def __init__(
        self,
        config: SegmentConfig,
        network: SegmentNetwork,
        embed_scale: float,
        dropout: type[nn.Module] = nn.Dropout,
    ) -> None:
        super().__init__(config)
        self.embed_tokens = build_embedding(config)
        self.embed_scale = embed_scale
        self.embed_dropout = dropout(config.embed_dropout)
        self.network = network
        self.output_dropout = dropout(config.output_dropout)
        output = build_output(config, self.embed_tokens)
        adaptive = isinstance(output, AdaptiveSoftmax)
        self.adaptive_softmax = output if adaptive else None
        self.output_projection = None if adaptive else output
        self.word_dropout: nn.Module | None = None
        self.segment = config.tokens_per_sample + config.extended_context
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: SegmentCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        past_key_values: SegmentCache | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return the scores (B, T, V) of what follows each token, or the last ``logits_to_keep``.

        An adaptive softmax returns log-probabilities. ``input_ids`` (B, T) are a text or, with the
        ``cache`` of the call before, which changes, what follows its tokens. ``labels`` (B, T) are
        the tokens themselves, with -100 where they do not count; the loss is in nats.
        ``past_key_values`` is the former name of ``cache``.
        """
        cache = past_key_values if cache is None else cache
        if cache is None:
            cache = SegmentCache(input_ids, attention_mask)
        elif cache.ends_in_padding:
            raise ValueError(
                "the cache is of rows that end in padding, which nothing can follow: give "
                'tokenizer.padding_side = "left"'
            )
        features, groups = [], []
        for group in cache.groups:
            first = max(0, group.padding - cache.length)
            x, past = self.read(input_ids[group.rows, first:], group.past)
            features.append(nn.functional.pad(x, (0, 0, first, 0)))
            groups.append(group._replace(past=past))
        order = torch.cat([group.rows for group in groups]).argsort()
        cache.groups, cache.length = groups, cache.length + input_ids.size(1)
        x = torch.cat(features)[order]
        output = self.adaptive_softmax or self.output_projection
        logits = output(self.output_dropout(x[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        named = {CACHE_NAME: cache if use_cache else None}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **named)

    def read(self, tokens: Tensor, past: Past | None = None) -> tuple[Tensor, Past | None]:
        """Read tokens (B, T) segment by segment; return the output (B, T, d) and the next past."""
        network, place = self.network, 0 if past is None else past.num_tokens
        if past is None:
            tokens = tokens.clone()
            tokens[:, 0].masked_fill_(tokens[:, 0] == self.config.bos_token_id, EOS)
        seen = tokens.size(1) + (0 if network.absolute_positions is None else place)
        if network.mem_len == 0 and seen > self.segment:
            raise ValueError(
                f"the model has no recurrence (mem_len is 0) and reads {self.segment} tokens, not "
                f"{seen}: give fewer"
            )
        # without recurrence, generation sees as much as training
        keep = network.mem_len or self.segment - 1
        outputs = []
        for segment in tokens.split(self.segment, dim=1):
            x = self._embed(segment, place)
            if past is None and self.config.zero_past and network.mem_len > 0:
                zeros = x.new_zeros(x.size(0), network.mem_len, x.size(2))
                past = Past(tuple(HiddenStates((zeros,)) for _ in network.layers), 0)
            x, past = network(x, past, keep)
            outputs.append(x)
            place += segment.size(1)
        return torch.cat(outputs, dim=1), past

    def _embed(self, tokens: Tensor, place: int) -> Tensor:
        # under autocast, the bands of an adaptive input would have different types
        with without_autocast(tokens):
            x = self.embed_scale * self.embed_tokens(tokens)
        if self.word_dropout is not None:
            x = self.word_dropout(x, tokens)
        if self.network.absolute_positions is not None:
            x = self.network.absolute_positions.add_to_embeddings(x, place)
        return self.embed_dropout(x)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the first call makes the cache."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        """Return the map of tokens to embeddings."""
        return self.embed_tokens

    def resize_token_embeddings(self, *sizes: Any, **options: Any) -> nn.Module:
        """Refuse: outputs are tied in ways that transformers does not know."""
        raise ValueError(
            "the vocabulary of this model cannot be resized: prepare the data with the dictionary "
            "that you need, and train a model on it"
        )

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
        self.network.checkpoint_activations = enable

    def _init_weights(self, module: nn.Module) -> None:
        """Draw embeddings that are scaled by √d; networks and outputs have their initial values."""
        if isinstance(module, nn.Embedding) and self.embed_scale != 1:
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


class TransformerXLForCausalLM(SegmentForCausalLM):
    """Transformer-XL (Dai et al. 2019) for ``AutoModelForCausalLM`` and ``generate``."""

    config_class = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        # with same length, mem_len counts the token itself
        seen_before = config.mem_len - (not config.same_length_excludes_self)
        settings = TransformerXLSettings(
            **config.layer_settings(),
            positions=config.positions,
            window=Window(0, seen_before if config.same_length else UNLIMITED),
            segment=config.tokens_per_sample + config.extended_context,
            separate_biases=config.untie_r,
            position_dropout=config.embed_dropout,
            locked_dropout=config.locked_dropout,
        )
        network = TransformerXL(
            config.decoder_layers,
            config.decoder_embed_dim,
            config.decoder_attention_heads,
            config.decoder_ffn_embed_dim,
            config.mem_len,
            config.dropout,
            config.attention_kernel,
            settings,
        )
        scale = config.decoder_embed_dim**0.5
        super().__init__(config, network, scale, dropout_class(config.locked_dropout))
        self.word_dropout = WordDropout(config.word_dropout, config.vocab_size)
        initialise(self, INIT_STD, INIT_STD, set())


class AllAttentionForCausalLM(SegmentForCausalLM):
    """All-attention (Sukhbaatar et al. 2019) for ``AutoModelForCausalLM`` and ``generate``.

    Learned spans are no parameters here, since Hugging Face's training would not keep them in
    [0, 1].
    """

    config_class = AllAttentionConfig

    def __init__(self, config: AllAttentionConfig) -> None:
        settings = AllAttentionSettings(
            **config.layer_settings(),
            persistent=config.persistent_variant,
            learned_spans=config.adaptive_span,
            span_ramp=config.span_ramp,
            span_init=config.span_init,
            span_epsilon=config.span_epsilon,
            seen=config.mem_len if config.same_length else config.attention_span,
            ffn_dim=config.decoder_ffn_embed_dim,
        )
        network = AllAttentionNetwork(
            config.decoder_layers,
            config.decoder_embed_dim,
            config.decoder_attention_heads,
            config.persistent_vectors,
            config.attention_span,
            config.dropout,
            config.attention_kernel,
            settings,
            mem_len=config.mem_len,
        )
        for span in learned_spans(network):
            value = span.value.detach()
            del span.value
            span.register_buffer("value", value)
        scaled = config.share_decoder_input_output_embed or config.adaptive_input
        super().__init__(config, network, config.decoder_embed_dim**0.5 if scaled else 1.0)
