"""The options of fairseq's translation transformer as a flat dataclass, for models built on it.

fairseq's own dataclass is nested, so neither its command line nor Hydra can fill it by the names of
the options.
"""

import dataclasses
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any, Optional, TypeVar

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from omegaconf import II, DictConfig, OmegaConf

_Options = TypeVar("_Options", bound=FairseqDataclass)
# the defaults that fairseq's model gives to missing parsed options
_DERIVED: dict[str, tuple[Any, str | None]] = {
    "decoder_embed_dim": (int, II(".encoder_embed_dim")),
    "decoder_ffn_embed_dim": (int, II(".encoder_ffn_embed_dim")),
    # fairseq's parser leaves these as text
    "decoder_input_dim": (Any, II(".decoder_embed_dim")),
    "decoder_output_dim": (Any, II(".decoder_embed_dim")),
    # tasks other than translation may lack these
    "max_source_positions": (Optional[int], II("oc.select:task.max_source_positions,1024")),
    "max_target_positions": (Optional[int], II("oc.select:task.max_target_positions,1024")),
    # fairseq's parser makes lists of these, its model expects text such as "0,2"
    "encoder_layers_to_keep": (Any, None),
    "decoder_layers_to_keep": (Any, None),
}


def _flatten(config: type[FairseqDataclass], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and field of each option of a dataclass, nested ones included."""
    for option in dataclasses.fields(config):
        if inspect.isclass(option.type) and issubclass(option.type, FairseqDataclass):
            yield from _flatten(option.type, f"{option.name}_")
        elif option.name != "_name":
            name = prefix + option.name
            kind, default = _DERIVED.get(name, (option.type, option.default))
            yield name, kind, dataclasses.field(default=default, metadata=option.metadata)


TransformerOptions = dataclasses.make_dataclass(
    "TransformerOptions", _flatten(TransformerConfig), bases=(FairseqDataclass,)
)
TransformerOptions.__doc__ = "Options of fairseq's ``transformer``, with defaults."


def parsed(cfg: DictConfig | Namespace) -> Namespace:
    """Return a configuration of :class:`TransformerOptions` as fairseq's ``transformer`` takes it.

    Parsed options are returned as they are.
    """
    if isinstance(cfg, Namespace):
        return cfg
    return Namespace(**OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


class BuiltOnTransformer:
    """Base class of models that add ``added_options`` to fairseq's; list it before fairseq's."""

    added_options: type[FairseqDataclass]

    @classmethod
    def hub_models(cls) -> dict[str, str]:
        """Return no models to download: the parent's downloads are other models."""
        return {}

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add fairseq's options and this model's to ``parser``, without defaults."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, cls.added_options(), delete_default=True)


def options_from(kind: type[_Options], args: Namespace) -> _Options:
    """Return a dataclass of options from parsed options, with its defaults for missing ones."""
    names = [option.name for option in dataclasses.fields(kind)]
    return kind(**{name: getattr(args, name) for name in names if hasattr(args, name)})
