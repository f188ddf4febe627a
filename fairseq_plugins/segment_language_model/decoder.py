"""The decoder of segment language models: layers that read a segment and earlier states.

Shapes: B streams, T tokens of a segment, V symbols, d model width.
"""

import logging
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from fairseq.modules import AdaptiveSoftmax
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.fairseq_integration.forward_passes import InferenceCache
from fairseq_plugins.segment_language_model.attention import SegmentLayer
from fairseq_plugins.segment_language_model.attention_blocks import Clamped
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates, LayerState
from fairseq_plugins.segment_language_model.recurrence import Recurrence

logger = logging.getLogger(__name__)


class Context(NamedTuple):
    """How far back the layers read: ``mem_len`` tokens before a segment.

    Generation reads one token at a time; there a decoder without recurrence sees ``segment``
    tokens, its length in training. With ``from_zeros`` streams start from zero vectors.
    """

    mem_len: int
    segment: int
    from_zeros: bool = False


class SegmentDecoder(FairseqIncrementalDecoder):
    """Embeddings, layers and output of a segment language model.

    Args:
        embed_tokens: maps tokens (B, T) to embeddings (B, T, d), which ``embed_scale`` multiplies.
        output: projection to V scores, or an adaptive softmax.
        word_dropout: acts on the embeddings and sees their tokens.
        positions: maps the farthest distance F to an encoding of F, F - 1, …, -1, which each
            layer's attention projects.
        absolute_positions: adds a vector for each place to the embeddings or layer inputs.
        layer_norm: normalises the last layer's output.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        embed_scale: float,
        layers: list[SegmentLayer],
        output: nn.Module,
        context: Context,
        word_dropout: nn.Module | None,
        embed_dropout: nn.Module,
        output_dropout: nn.Module,
        positions: nn.Module | None = None,
        absolute_positions: nn.Module | None = None,
        layer_norm: nn.Module | None = None,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        self.embed_scale = embed_scale
        self.word_dropout = word_dropout
        self.embed_dropout = embed_dropout
        self.positions = positions
        self.absolute_positions = absolute_positions
        self.layers = nn.ModuleList(layers)
        self.layer_norm = layer_norm
        self.output_dropout = output_dropout
        adaptive = isinstance(output, AdaptiveSoftmax)
        self.adaptive_softmax = output if adaptive else None
        self.output_projection = None if adaptive else output
        self.context = context
        self.checkpoint_activations = checkpoint_activations
        self._takes_padding = any(getattr(m, "takes_padding", False) for m in self.modules())
        self.inference_positions: InferenceCache[tuple[int, list[Any]]] = InferenceCache()
        self._warned_of_places = False

    @property
    def without_penalty(self) -> dict[str, str]:
        """For each penalty that the model needs: a warning about training without it."""
        return {}

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Return scores (B, T, V), or the (B, T, d) input of the adaptive softmax; and None."""
        features, extra = self.extract_features(prev_output_tokens, encoder_out, **options)
        return self.output_layer(features), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[str, Any] | None = None,
        recurrence: Recurrence | None = None,
        start: int | None = None,
    ) -> tuple[Tensor, None]:
        """Return the final representation (B, T, d); and None.

        ``prev_output_tokens`` (B, T) are the segment. With ``incremental_state``, fairseq's
        dictionary for one generation, they are all tokens so far, and only the new ones are
        computed. ``recurrence`` is None for a segment without a past. ``start`` is the segment's
        place in its stream; None continues where this decoder stopped.
        """
        mem_len, first = self.context.mem_len, 0
        if incremental_state is not None:
            recurrence = incremental_state.setdefault("recurrence", Recurrence())
            start = first = recurrence.end(self)
            prev_output_tokens = prev_output_tokens[:, first:]
            mem_len = mem_len or self.context.segment - 1
        elif recurrence is not None:
            mem_len += recurrence.longer
        if start is None:
            start = 0 if recurrence is None else recurrence.end(self)
        x = self._embed(prev_output_tokens, first)
        padding_mask = self._padding_mask(prev_output_tokens)
        past = None if recurrence is None else recurrence.read(self, start, like=x)
        if past is None and self.context.from_zeros and self.context.mem_len > 0:
            zeros = HiddenStates(x.new_zeros(x.size(0), mem_len, x.size(2)))
            past = [zeros] * len(self.layers)
        # layers may keep different lengths
        kept = 0 if past is None else max(state.length for state in past)
        if start == 0:
            self.inference_positions.clear()  # a new walk
        positions = self.positions_of_layers(
            kept + x.size(1) - 1, mem_len + x.size(1) - 1, once=recurrence is None
        )
        states: list[LayerState] = []
        for index, layer in enumerate(self.layers):
            if self.absolute_positions is not None:
                x = self.absolute_positions.add_to_layer(x, index, first)
            state = None if past is None else past[index]
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, state = checkpoint(
                    layer, x, positions[index], state, padding_mask, use_reentrant=False
                )
            else:
                x, state = layer(x, positions[index], state, padding_mask)
            states.append(state)
        if recurrence is not None:
            recurrence.write(self, start, states, x.size(1), mem_len)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return self.output_dropout(x), None

    def _embed(self, tokens: Tensor, first: int) -> Tensor:
        # under autocast fairseq's adaptive input gives bands of different types, and fails
        with torch.autocast(tokens.device.type, enabled=False):
            x = self.embed_scale * self.embed_tokens(tokens)
        if self.word_dropout is not None:
            x = self.word_dropout(x, tokens)
        if self.absolute_positions is not None:
            self._check_places(first + tokens.size(1), self.absolute_positions.max_positions)
            x = self.absolute_positions.add_to_embeddings(x, first)
        return self.embed_dropout(x)

    def _check_places(self, end: int, places: int | None) -> None:
        """Refuse places without a position vector; warn about untrained ones."""
        if places is not None and end > places:
            raise ValueError(
                f"a segment of {end} tokens, --extended-context included, is longer than the "
                f"{places} places that --positions learned-absolute was trained for: "
                "give a smaller --tokens-per-sample"
            )
        if end > self.context.segment and not self._warned_of_places:
            self._warned_of_places = True
            logger.warning(
                "a segment has %d tokens, its context included, and positions were trained up "
                "to %d: give a smaller --tokens-per-sample or --extended-context",
                end,
                self.context.segment,
            )

    def _padding_mask(self, tokens: Tensor) -> Tensor | None:
        """Return where ``tokens`` (B, T) are padding; None if no layer takes it, or nothing is."""
        if not self._takes_padding:
            return None
        padding_mask = tokens.eq(self.dictionary.pad())
        # on an accelerator, reading the mask would make the host wait
        if tokens.device.type == "cpu" and not padding_mask.any():
            return None
        return padding_mask

    def positions_of_layers(
        self, farthest: int, ever_farthest: int, once: bool = False
    ) -> list[Any]:
        """Return each layer's projected positions for the distances ``farthest`` (or more) to -1.

        Inference computes them once for all segments of a walk; ``once``: there is one segment.
        """
        cache = self.inference_positions
        if self.training or torch.is_grad_enabled() or once:
            cache.clear()
            return self.compute_positions(farthest)

        def compute() -> tuple[int, list[Any]]:
            # twice as many as needed: a past that grows token by token would project each time
            last = max(farthest, min(2 * farthest, ever_farthest))
            return last, self.compute_positions(last)

        attentions = [layer.self_attn for layer in self.layers]
        weights = [p for attention in attentions for p in attention.position_parameters()]
        if self.positions is not None:
            weights += self.positions.parameters()
        last, positions = cache.get(weights, compute)
        if last < farthest:
            cache.clear()
            _, positions = cache.get(weights, compute)
        return positions

    def compute_positions(self, farthest: int) -> list[Any]:
        """Return each layer's projected positions for the distances ``farthest`` to -1."""
        encoding = self.encode_distances(farthest)
        return [layer.self_attn.project_positions(encoding) for layer in self.layers]

    def encode_distances(self, farthest: int) -> Tensor | Clamped | None:
        """Return the encoding of the distances from ``farthest`` to -1, or None."""
        if self.positions is None:
            return None
        return self.positions(farthest, next(self.parameters()).device)

    def penalties(self) -> dict[str, Tensor]:
        """Return the model's own penalties per token, by the name of the option for their cost."""
        return {}

    def train(self, mode: bool = True) -> "SegmentDecoder":
        """Switch between training and evaluation; training frees the cached positions."""
        if mode:
            self.inference_positions.clear()
        return super().train(mode)

    def output_layer(self, features: Tensor) -> Tensor:
        """Map (B, T, d) to scores (B, T, V); the loss applies an adaptive softmax itself."""
        return features if self.output_projection is None else self.output_projection(features)

    def reorder_incremental_state(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        """Let beam i continue beam ``new_order[i]``."""
        if "recurrence" in incremental_state:
            incremental_state["recurrence"].reorder(new_order)

    def max_positions(self) -> int:
        """Return the most tokens that an input may have; relative positions set no limit."""
        if self.absolute_positions is not None:
            return self.context.segment
        return 1_000_000_000
