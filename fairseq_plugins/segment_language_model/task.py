"""The task: language modelling over continuous text, read as parallel streams of segments."""

import logging
import os
from typing import Any

from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.iterators import EpochBatchIterating
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import register_task
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.parameters import apply_constraints
from fairseq_plugins.segment_language_model.batch_split import split_batch, train_in_parts
from fairseq_plugins.segment_language_model.evaluation import EvaluationTask
from fairseq_plugins.segment_language_model.generation import GenerationTask, RunningTextDictionary
from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from fairseq_plugins.segment_language_model.options import (
    SegmentLanguageModelConfig,
    SegmentLanguageModelingConfig,
    find_dictionary,
)
from fairseq_plugins.segment_language_model.split import load_tokens
from fairseq_plugins.segment_language_model.stream_pasts import StreamPasts
from fairseq_plugins.segment_language_model.streams import (
    RunningText,
    StreamIterator,
    TokenStreams,
)

logger = logging.getLogger(__name__)

# a past of more segments of the training is hardly of use
MAX_PAST_IN_SEGMENTS = 16


@register_task("segment_language_modeling", dataclass=SegmentLanguageModelingConfig)
class SegmentLanguageModelingTask(EvaluationTask, GenerationTask):
    """Train and evaluate segment language models (Transformer-XL, section 3.2).

    ``--batch-size`` is the number of parallel streams of a worker. Each batch carries the streams'
    pasts, which the model reads and extends, and the segment's place in the streams, as
    ``net_input["pasts"]`` and ``["start"]``.
    """

    # models check it: some need streams and their pasts, others must not get them
    reads_streams = True

    def __init__(self, cfg: SegmentLanguageModelingConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary
        self._training_pasts: StreamPasts | None = None
        # facts about the model that the loss must fit
        self._adaptive_softmax = False
        self._learns_spans = False

    @classmethod
    def setup_task(
        cls, cfg: SegmentLanguageModelingConfig, **options: object
    ) -> "SegmentLanguageModelingTask":
        """Build the task around the dictionary of DATA."""
        path = find_dictionary(cfg)
        kind = RunningTextDictionary if cfg.continue_past_eos else Dictionary
        try:
            dictionary = kind.load(path)
        # fairseq raises plain exceptions for a wrong encoding or a repeated symbol
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"DATA is {cfg.data}: {path} is not a dictionary of fairseq ({reason}); replace "
                "it, or binarize the text again"
            ) from None
        logger.info("dictionary: %d symbols", len(dictionary))
        return cls(cfg, dictionary)

    def build_model(
        self, cfg: SegmentLanguageModelConfig, from_checkpoint: bool = False
    ) -> SegmentLanguageModel:
        """Build the model, and check the task's options against it."""
        model = super().build_model(cfg, from_checkpoint)
        if from_checkpoint and not isinstance(model, SegmentLanguageModel):
            raise ValueError(
                f"--path holds a model of --arch {cfg._name}, which is not a segment language "
                "model: give the --task of its training (a translation model: fairseq-generate)"
            )
        if not isinstance(model, SegmentLanguageModel):
            raise ValueError(
                f"--arch is {cfg._name}, which is not a segment language model: choose "
                "transformer_xl, all_attention_lm or a preset of theirs, or another --task"
            )
        self._adaptive_softmax = model.decoder.adaptive_softmax is not None
        self._learns_spans = bool(model.learned_spans())
        mem_len = model.decoder.network.mem_len
        if self.cfg.extended_context > 0 and mem_len > 0:
            raise ValueError(
                f"--extended-context is {self.cfg.extended_context} for a model with a recurrence "
                f"of {mem_len} tokens, which would hold them twice: leave it out, or give "
                "--mem-len 0 (in evaluation: --model-overrides \"{'mem_len': 0}\")"
            )
        if from_checkpoint:
            self._warn_of_other_lengths(cfg.tokens_per_sample, mem_len)
            return model  # which logs its summary before it is used
        if self.cfg.batch_split > (streams := self.cfg.batch_size or 1):
            raise ValueError(
                f"--batch-split is {self.cfg.batch_split} and --batch-size {streams}: a part has "
                f"at least one stream, so give --batch-split {streams} or less, or a larger "
                "--batch-size"
            )
        if self.cfg.batch_split > 1 and cfg.memory_layers and cfg.memory_query_batch_norm:
            raise ValueError(
                f"--batch-split is {self.cfg.batch_split} with --memory-query-batch-norm, which "
                "measures the whole batch: leave one of the two out"
            )
        # evaluation may do without the recurrence that a model was trained with
        if model.decoder.zero_past and model.decoder.network.mem_len == 0:
            raise ValueError(
                "--zero-past with --mem-len 0: there is no past to start with zero vectors; give a "
                "larger --mem-len, or leave --zero-past out"
            )
        logger.info(model.summary)
        return model

    def _warn_of_other_lengths(self, trained: int, mem_len: int) -> None:
        """Warn if a model reads other segments than in training, or a far longer past."""
        segment = self.cfg.tokens_per_sample
        if trained and segment != trained:
            logger.warning(
                "--tokens-per-sample is %d (default: 512), and the model was trained with %d: "
                "losses differ; give --tokens-per-sample %d for the same segments",
                *(segment, trained, trained),
            )
        if trained and mem_len > MAX_PAST_IN_SEGMENTS * trained:
            logger.warning(
                "mem_len is %d, far beyond the model's training in segments of %d: losses often "
                "get worse there; compare with a shorter one",
                *(mem_len, trained),
            )

    def build_criterion(self, cfg: FairseqDataclass, *options: object) -> FairseqCriterion:
        """Build the loss, and check it against the model's softmax and spans."""
        name, span_loss = cfg._name, getattr(cfg, "span_loss", 0)
        if name == "adaptive_loss":
            raise ValueError(
                "--criterion adaptive_loss leaves out a part of the loss of the second symbol of "
                "each cluster but the first: use --criterion segment_loss"
            )
        if self._adaptive_softmax and name != "segment_loss":
            raise ValueError(
                f"--criterion {name} is for plain softmaxes, and the model has "
                "--adaptive-softmax-cutoff: use --criterion segment_loss"
            )
        if span_loss and not self._learns_spans:
            raise ValueError(
                f"--span-loss is {span_loss} for a model without --adaptive-span: give both, or "
                "leave --span-loss out"
            )
        if self._learns_spans and not span_loss:
            logger.warning(
                "--criterion %s without --span-loss has no penalty for long attention spans, which "
                "--adaptive-span learns: they will hardly shrink; give --criterion segment_loss "
                "--span-loss 5e-7",
                name,
            )
        return super().build_criterion(cfg, *options)

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **options: object
    ) -> None:
        """Load a split."""
        paths = utils.split_paths(self.cfg.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        tokens = load_tokens(path, self.dictionary, self.cfg.dataset_impl, combine)
        shuffled = self.cfg.shuffle_sentences and split == self.cfg.train_subset
        self.datasets[split] = RunningText(tokens, shuffled)

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        **options: Any,
    ) -> EpochBatchIterating:
        """Return an iterator over a split as parallel streams, or over separate prompts.

        ``max_sentences`` is the number of streams of each worker, 1 if None. Streams ignore
        ``num_workers``, because cutting a few slices of a memory-mapped file is cheap.
        """
        if not isinstance(dataset, RunningText):
            return super().get_batch_iterator(
                dataset,
                max_tokens,
                max_sentences,
                num_shards=num_shards,
                shard_id=shard_id,
                **options,
            )
        if max_tokens is not None:
            raise ValueError(
                f"--max-tokens is {max_tokens} (fairseq-generate sets it without --batch-size): "
                "the text is read as parallel streams, so give their number, --batch-size, and the "
                "segment length, --tokens-per-sample, instead"
            )
        count = 1 if max_sentences is None else max_sentences
        if not 1 <= count <= len(dataset) // num_shards:
            raise ValueError(
                f"--batch-size is {count}: {num_shards} worker(s) read {count * num_shards} "
                f"parallel streams of a split with {len(dataset)} tokens; give 1 to "
                f"{len(dataset) // num_shards} (for validation: --batch-size-valid)"
            )
        seed, epoch = options.get("seed", 1), options.get("epoch", 1)
        streams = TokenStreams(
            dataset.ordered(self.dictionary.eos(), seed, epoch),
            self.dictionary,
            count * num_shards,
            self.cfg.tokens_per_sample,
            self.cfg.extended_context,
            shuffled_with=seed if dataset.shuffled else None,
        )
        return StreamIterator(
            streams,
            num_shards,
            shard_id,
            save_pasts=self._saves_pasts,
            epoch=epoch,
            buffer_size=options.get("data_buffer_size", 0),
            skip_remainder_batch=options.get("skip_remainder_batch", False),
        )

    def train_step(
        self,
        sample: dict[str, Any],
        model: nn.Module,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Train on a batch, and keep its streams' pasts for :meth:`begin_valid_epoch`."""
        pasts = sample["net_input"].get("pasts")
        if pasts is not None:
            self._training_pasts = pasts.first
            self._training_pasts.start_update(update_num)
        step, options = super().train_step, (criterion, optimizer, update_num, ignore_grad)
        if self.cfg.batch_split == 1:
            return step(sample, model, *options)
        parts = split_batch(sample, self.cfg.batch_split)
        return train_in_parts(parts, model, lambda part: step(part, model, *options))

    def optimizer_step(
        self, optimizer: FairseqOptimizer, model: nn.Module, update_num: int
    ) -> None:
        """Update the parameters, and project constrained ones back."""
        super().optimizer_step(optimizer, model, update_num)
        apply_constraints(optimizer, model)

    def begin_valid_epoch(self, epoch: int, model: nn.Module) -> None:
        """Gather the workers' pasts, because fairseq validates before it saves."""
        workers = distributed_utils.get_global_world_size()
        if workers > 1 and self._training_pasts is not None and self._saves_pasts:
            self._training_pasts.gather(distributed_utils.get_data_parallel_group())

    @property
    def _saves_pasts(self) -> bool:
        return not (self.cfg.no_save_past or self.cfg.no_save_memory)

    @property
    def source_dictionary(self) -> Dictionary:
        """Return the symbols."""
        return self.dictionary

    target_dictionary = source_dictionary
