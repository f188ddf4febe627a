"""The task: language modelling over continuous text, read as parallel streams of segments."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary, NestedDictionaryDataset
from fairseq.distributed import utils as distributed_utils
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask, register_task

from fairseq_plugins.fairseq_integration.options import flag
from fairseq_plugins.fairseq_integration.parameters import apply_constraints
from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
from fairseq_plugins.segment_language_model.evaluation import (
    BITS,
    TalliedBatches,
    loss_unit,
    read_units,
)
from fairseq_plugins.segment_language_model.generation import (
    RunningTextDictionary,
    allow_unlikely_prompts,
    block_repeats,
    choose_prefix,
    end_by_length,
    enforce_min_length,
    prompt_targets,
    prompts,
)
from fairseq_plugins.segment_language_model.options import (
    SegmentLanguageModelingConfig,
    check_segment,
    check_streams,
    find_dictionary,
)
from fairseq_plugins.segment_language_model.recurrence import (
    StreamIterator,
    check_parts,
    split_batch,
    train_in_parts,
)
from fairseq_plugins.segment_language_model.streams import (
    Jitter,
    RunningText,
    TokenStreams,
    load_tokens,
    longest_segment,
)

logger = logging.getLogger(__name__)

# why options of fairseq-generate and fairseq-interactive are refused
REFUSED = {
    "match_source_len": "the source is the prompt, and says nothing about the length of what "
    "follows; give --min-len and --max-len-b",
    "constraints": "a language model has no constrained decoding",
    "print_alignment": "a language model has no source to align its text with",
    "replace_unk": "a language model has no source to copy words from",
    "retain_dropout": "fairseq retains only dropout of its own modules",
    "print_step": "decoding is not iterative",
}


@register_task("segment_language_modeling", dataclass=SegmentLanguageModelingConfig)
class SegmentLanguageModelingTask(FairseqTask):
    """Train and evaluate segment language models (Transformer-XL, section 3.2).

    ``--batch-size`` is the number of parallel streams of a worker. Each batch carries the streams'
    recurrence, which the model reads and extends, and the segment's place in the streams, as
    ``net_input["recurrence"]`` and ``["start"]``.
    """

    # models check it: some need streams and their recurrence, others must not get them
    reads_streams = True

    def __init__(self, cfg: SegmentLanguageModelingConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary
        self._training_recurrence = None
        self._has_recurrence = True
        self._adaptive_softmax = False
        self._missed_penalties: dict[str, str] = {}

    @classmethod
    def setup_task(
        cls, cfg: SegmentLanguageModelingConfig, **kwargs: Any
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
            ) from error
        logger.info("dictionary: %d symbols", len(dictionary))
        return cls(cfg, dictionary)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, and check the task's options against it."""
        temperature = self.cfg.softmax_temperature
        if temperature != 1 and not from_checkpoint:
            raise ValueError(
                f"--softmax-temperature is {temperature}: leave it out of fairseq-train, and give "
                "it to fairseq-eval-lm"
            )
        if not from_checkpoint:
            # an earlier training in this process, as in Hydra's sweeps, left its best loss there
            vars(checkpoint_utils.save_checkpoint).pop("best", None)
        if self.cfg.batch_split != 1 and not from_checkpoint:
            check_parts(self.cfg.batch_split, self.cfg.batch_size or 1)
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(getattr(model, "decoder", None), SegmentDecoder):
            raise ValueError(
                f"--arch is {cfg._name}, which is not a segment language model: choose "
                "transformer_xl, all_attention_lm or a preset of theirs, or another --task"
            )
        model.softmax_temperature = temperature
        self._adaptive_softmax = model.decoder.adaptive_softmax is not None
        self._missed_penalties = model.decoder.without_penalty
        mem_len = model.decoder.context.mem_len
        self._has_recurrence = mem_len > 0
        if self.cfg.extended_context > 0 and mem_len > 0:
            raise ValueError(
                f"--extended-context is {self.cfg.extended_context} for a model with a recurrence "
                f"of {mem_len} tokens, which would hold them twice: leave it out, or give "
                "--mem-len 0 (in evaluation: --model-overrides \"{'mem_len': 0}\")"
            )
        # evaluation may do without the recurrence that a model was trained with
        if model.decoder.context.from_zeros and mem_len == 0 and not from_checkpoint:
            raise ValueError(
                "--zero-memory with --mem-len 0: there is no recurrence to start with zero "
                "vectors; give a larger --mem-len, or leave --zero-memory out"
            )
        if self.cfg.segment_jitter and not from_checkpoint:
            self._train_on_longer_segments(model.decoder)
        if not from_checkpoint:
            logger.info(model.summary)  # loaded models log it before they are used
        return model

    def _train_on_longer_segments(self, decoder: SegmentDecoder) -> None:
        jitter = self.cfg.segment_jitter
        if getattr(decoder.absolute_positions, "max_positions", None) is not None:
            raise ValueError(
                f"--segment-jitter is {jitter} with --positions learned-absolute, which has "
                "vectors only for the places of --tokens-per-sample: leave one of the two out"
            )
        most = longest_segment(decoder.context.segment, jitter)
        decoder.context = decoder.context._replace(segment=most)

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the loss, and check it against the model's softmax and penalties."""
        name = cfg._name
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
        for penalty, effect in self._missed_penalties.items():
            if not getattr(cfg, penalty, 0):
                logger.warning("--criterion %s without %s %s", name, flag(penalty), effect)
        return super().build_criterion(cfg, *args, **kwargs)

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any
    ) -> None:
        """Load a split."""
        paths = utils.split_paths(self.cfg.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        tokens = load_tokens(path, self.dictionary, self.cfg.dataset_impl, combine)
        training = split == self.cfg.train_subset
        shuffled = self.cfg.shuffle_sentences and training
        jitter = self.cfg.segment_jitter if training else 0
        self.datasets[split] = RunningText(tokens, shuffled, jitter)

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        **options: Any,
    ) -> Any:
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
                f"--max-tokens is {max_tokens}: the text is read as parallel streams, so give "
                "their number, --batch-size, and the segment length, --tokens-per-sample, instead"
            )
        option, segment = "--tokens-per-sample", self.cfg.tokens_per_sample
        valid = self.cfg.tokens_per_sample_valid
        if valid is not None and dataset is not self.datasets.get(self.cfg.train_subset):
            option, segment = "--tokens-per-sample-valid", valid
        count = 1 if max_sentences is None else max_sentences
        check_segment(option, segment, len(dataset), max(1, count) * num_shards)
        # shorter segments in validation leave room for more tokens before them
        longer = self.cfg.tokens_per_sample - segment
        check_streams(count, num_shards, len(dataset))
        seed, epoch = options.get("seed", 1), options.get("epoch", 1)
        streams = TokenStreams(
            dataset.ordered(self.dictionary.eos(), seed, epoch),
            self.dictionary,
            count * num_shards,
            segment,
            self.cfg.extended_context + (0 if self._has_recurrence else longer),
            shuffled_with=seed if dataset.shuffled else None,
            jitter=Jitter(dataset.jitter, seed, epoch) if dataset.jitter else None,
        )
        return StreamIterator(
            streams,
            num_shards,
            shard_id,
            save_recurrence=not self.cfg.no_save_memory,
            longer_recurrence=longer if self._has_recurrence else 0,
            epoch=epoch,
            buffer_size=options.get("data_buffer_size", 0),
            skip_remainder_batch=options.get("skip_remainder_batch", False),
        )

    def eval_lm_dataloader(
        self,
        dataset: RunningText,
        batch_size: int | None = None,
        context_window: int = 0,
        **options: Any,
    ) -> Any:
        """Return the batches for fairseq-eval-lm, in ``batch_size`` streams, 1 if None."""
        workers = distributed_utils.get_global_world_size()
        if workers > 1:
            raise ValueError(
                f"--distributed-world-size is {workers}: fairseq-eval-lm would print the loss of "
                "only one worker's part of the text; give --distributed-world-size 1, the default"
            )
        if context_window > 0:
            raise ValueError(
                f"--context-window is {context_window}: the recurrence is the context here; leave "
                "the option out, and give --model-overrides \"{'mem_len': ...}\", or "
                "--extended-context for a model without recurrence"
            )
        if self.cfg.post_process:
            raise ValueError(
                f"--post-process (--remove-bpe) is {self.cfg.post_process!r}: it would join the "
                "parts of a word only within a segment, and the loss would depend on "
                "--tokens-per-sample; leave it out"
            )
        folder = utils.split_paths(self.cfg.data)[0]
        characters = loss_unit(read_units(Path(folder)).unit) == BITS
        if characters:
            logger.info("each token is a character: Loss (base 2) is in bits per character")
        given = ("num_shards", "shard_id", "data_buffer_size")
        streams = self.get_batch_iterator(
            dataset,
            max_sentences=batch_size,
            **{name: options[name] for name in given if name in options},
        )
        walk = streams.next_epoch_itr(shuffle=False)
        return TalliedBatches(walk, self.dictionary, characters)

    def train_step(self, sample: dict[str, Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, and keep its streams' recurrence for :meth:`begin_valid_epoch`."""
        recurrence = sample["net_input"].get("recurrence")
        if recurrence is not None:
            self._training_recurrence = recurrence
        step = super().train_step
        if self.cfg.batch_split == 1:
            return step(sample, model, *args, **kwargs)
        parts = split_batch(sample, self.cfg.batch_split)
        return train_in_parts(parts, model, lambda part: step(part, model, *args, **kwargs))

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Update the parameters, and project constrained ones back."""
        super().optimizer_step(optimizer, model, update_num)
        apply_constraints(optimizer, model)

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Gather the workers' recurrences, because fairseq validates before it saves."""
        workers = distributed_utils.get_global_world_size()
        if workers > 1 and self._training_recurrence is not None and not self.cfg.no_save_memory:
            self._training_recurrence.gather(distributed_utils.get_data_parallel_group())

    def build_dataset_for_inference(
        self, src_tokens: list[torch.Tensor], src_lengths: list[int], **kwargs: Any
    ) -> NestedDictionaryDataset:
        """Return prompts, which begin with ``</s>`` instead of ending with it."""
        unknown = sum(int(tokens.eq(self.dictionary.unk()).sum()) for tokens in src_tokens)
        if unknown:
            logger.warning(
                "%d of %d symbols of the prompts are <unk>: write prompts in the symbols of "
                "dict.txt, or give the --bpe of the data (docs/evaluation.md)",
                unknown,
                sum(len(tokens) - 1 for tokens in src_tokens),  # without </s>
            )
        return prompts(self.dictionary, src_tokens, src_lengths)

    def build_generator(self, models: Any, args: Any, **kwargs: Any) -> Any:
        """Return fairseq's generator; with ``--continue-past-eos`` only length ends a text."""
        for name, reason in REFUSED.items():
            if getattr(args, name, None):
                raise ValueError(f"{flag(name)}: {reason}; leave it out")
        if self.cfg.continue_past_eos:
            # no text has <pad>, so a generator that waits for it does not stop
            extra = dict(kwargs.pop("extra_gen_cls_kwargs", None) or {})
            kwargs["extra_gen_cls_kwargs"] = {**extra, "eos": self.dictionary.pad()}
        generator = super().build_generator(models, args, **kwargs)
        if isinstance(generator, SequenceScorer):
            return generator
        if self.cfg.continue_past_eos:
            end_by_length(generator)
        if getattr(args, "sampling", False):
            allow_unlikely_prompts(generator)
        return enforce_min_length(block_repeats(generator))

    def inference_step(
        self,
        generator: Any,
        models: Any,
        sample: dict[str, Any],
        prefix_tokens: torch.Tensor | None = None,
        constraints: Any = None,
    ) -> Any:
        """Continue prompts; with ``--score-reference`` score sentences or segments instead.

        A split's segments are prompts, too, cut to ``--prefix-size`` tokens, (B, P).
        """
        scoring = isinstance(generator, SequenceScorer)
        if self.cfg.extended_context > 0 and not scoring:
            raise ValueError(
                f"--extended-context is {self.cfg.extended_context}: nothing precedes a prompt; "
                "leave it out"
            )
        if scoring and "target" not in sample:
            sample = {**sample, "target": prompt_targets(self.dictionary, **sample["net_input"])}
        if not scoring:
            prefix_tokens = choose_prefix(
                sample, prefix_tokens, generator, self.dictionary, self.cfg.continue_past_eos
            )
            generator.prompt_lengths = prefix_tokens.ne(self.dictionary.pad()).sum(1)
            # without ids fairseq numbers the rows of the batch
            sample = {name: value for name, value in sample.items() if name != "id"}
        with torch.no_grad():
            return generator.generate(
                models, sample, prefix_tokens=prefix_tokens, bos_token=self.dictionary.eos()
            )

    @property
    def source_dictionary(self) -> Dictionary:
        """Return the symbols."""
        return self.dictionary

    target_dictionary = source_dictionary
