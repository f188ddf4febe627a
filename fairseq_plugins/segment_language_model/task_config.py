"""Options of the task ``segment_language_modeling``."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II


@dataclass
class SegmentLanguageModelingConfig(FairseqDataclass):
    """Options of ``segment_language_modeling``."""

    data: Optional[str] = field(
        default=None,
        metadata={
            "help": "folder that fairseq-preprocess wrote; several, with : between them, are "
            "read in turn, one an epoch"
        },
    )
    tokens_per_sample: int = field(
        default=512, metadata={"help": "segment length: tokens that are computed at once"}
    )
    extended_context: int = field(
        default=0,
        metadata={
            "help": "tokens that are read anew before each segment's own and not scored: the "
            "context of models without a memory (--mem-len 0)"
        },
    )
    continue_past_eos: bool = field(
        default=False,
        metadata={
            "help": "generation goes on past </s>, to --max-len-b tokens, and prints it: for "
            "models of running text, where </s> is the end of a line"
        },
    )
    no_save_memory: bool = field(
        default=False,
        metadata={
            "help": "leave the streams' memory (layers x streams x memory length x width numbers) "
            "out of checkpoints in mid-epoch; a run resumed from one starts cold"
        },
    )
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II("dataset.dataset_impl")
