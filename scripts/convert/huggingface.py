r"""Convert a language model to Hugging Face's format, or back to a checkpoint of fairseq.

    python -m scripts.convert.huggingface CHECKPOINT OUTPUT --data DATA

CHECKPOINT is a checkpoint of transformer_xl or all_attention_lm, or the folder of a training.
OUTPUT gets the model (config.json, model.safetensors) and its tokenizer, by the dict.txt and
units.json of DATA (default: the folder of the checkpoint, or the data of the training). After
`import fairseq_plugins.huggingface`, AutoModelForCausalLM and AutoTokenizer load both.

If CHECKPOINT is a folder in Hugging Face's format, OUTPUT gets checkpoint.pt and the folder's
dict.txt and units.json, for fairseq_plugins.load and fairseq-eval-lm.

Models with product-key memories are refused. Nothing in a file is executed. If anything does not
fit, nothing is written.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from fairseq_plugins.units import read_units
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import write_json

SUBWORDS = "subwords.model"
# former names of options, in older checkpoints
FORMER = {
    "zero_memory": "zero_past",
    "same_length_besides_itself": "same_length_excludes_self",
}
# by fairseq's names of the models
CLASSES = {"transformer_xl": "TransformerXL", "all_attention_lm": "AllAttention"}


def to_hugging_face(checkpoint: Path, output: Path, data: Path | None) -> str:
    """Write the model and the tokenizer of a checkpoint; return what they are."""
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

    import fairseq_plugins.huggingface as plugin
    from fairseq_plugins import load
    from fairseq_plugins.python_interface import loading
    from scripts._shared.checkpoints import read_checkpoint
    from scripts.convert._conversion import new_folder

    file = loading.find_checkpoint(checkpoint)
    state = read_checkpoint(file, "CHECKPOINT")
    options = loading.saved_options(state, "model")
    preset, memories = options.get("_name"), options.get("memory_layers")
    kind = ARCH_MODEL_REGISTRY.get(preset)
    arch = next((arch for arch in CLASSES if MODEL_REGISTRY[arch] is kind), None)
    if arch is None or memories:
        raise ValueError(
            f"CHECKPOINT {short(checkpoint)} is a {preset} model"
            f"{' with product-key memories' * bool(memories)}: only {' and '.join(CLASSES)} "
            "models without memories can be converted"
        )
    loaded = load(checkpoint, data)
    folder = loading.find_data(file, data, loading.saved_options(state, "task"), False)
    name, decoder = CLASSES[arch], loaded.model.decoder
    # an option that came after the training has its default
    options = {**vars(MODEL_DATACLASS_REGISTRY[arch]()), **options}
    for former, option in FORMER.items():
        options[option] = options.get(option) or options.get(former)
    config = getattr(plugin, f"{name}Config")(
        **{
            **{option: _plain(options[option]) for option in sorted(model_options(arch))},
            "vocab_size": len(decoder.dictionary),
            "mem_len": decoder.network.mem_len,
            "architectures": [f"{name}ForCausalLM"],
        }
    )
    model = getattr(plugin, f"{name}ForCausalLM")(config)
    weights = {
        key.removeprefix("decoder."): value for key, value in loaded.model.state_dict().items()
    }
    model.load_state_dict({key: weights[key] for key in model.state_dict()})

    with new_folder(output) as part:
        model.save_pretrained(part)
        copy_data(folder, part)
        tokenizer = plugin.DictionaryTokenizer.from_pretrained(part)
        check_tokenizer(tokenizer, loaded.text)
        tokenizer.save_pretrained(part)
    return f"{model.num_parameters():,} parameters, {len(tokenizer):,} symbols"


def model_options(arch: str) -> set[str]:
    """Return the options that a model without memories is built with."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    names = MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__.keys()
    of_training = {"_name", "checkpoint_activations", "compile_layers", *FORMER}
    return {name for name in names - of_training if not name.startswith("memory_")}


def copy_data(folder: Path, target: Path) -> None:
    """Copy what a tokenizer needs from a data folder: dict.txt, units.json and subword units."""
    units = read_units(folder)
    shutil.copyfile(folder / "dict.txt", target / "dict.txt")
    if units.model:
        shutil.copyfile(units.model, target / SUBWORDS)
    content = {**units._asdict(), "model": SUBWORDS if units.model else None}
    write_json(target / "units.json", {**content, "symbols": dict(units.symbols)})


def check_tokenizer(tokenizer: Any, text: Any) -> None:
    """Refuse a tokenizer that does not give a text the indices that the loaded model gives it."""
    symbols = text.dictionary.symbols
    # units that were only steps to others are in no dictionary
    text.allow_unknown = True
    sample = text.decode(text.encode(text.lines.decode(symbols[text.dictionary.nspecial :])))
    expected = text.encode(sample).tolist()
    if tokenizer.get_vocab() != text.dictionary.indices or expected != tokenizer.encode(
        sample, add_special_tokens=False
    ):
        raise ValueError(
            "the tokenizer that units.json describes differs from the --tokenizer and --bpe of the "
            "training: give --data with a units.json that names them"
        )


def _plain(value: Any) -> Any:
    """Return an option as a value for JSON; choices of fairseq's options are a kind of str."""
    return str(value) if isinstance(value, str) else value


def to_fairseq(folder: Path, output: Path) -> str:
    """Write a checkpoint of a model in Hugging Face's format; return what it is."""
    from fairseq.data import Dictionary
    from transformers import AutoModelForCausalLM

    from fairseq_plugins import register
    from fairseq_plugins.huggingface.vocabulary import Tied
    from scripts.convert._conversion import build, flags, new_folder, save_imported

    register()
    model = AutoModelForCausalLM.from_pretrained(folder)
    arches = {f"{name}ForCausalLM": arch for arch, name in CLASSES.items()}
    arch = arches[type(model).__name__]
    names = model_options(arch) & vars(model.config).keys()
    options = {option: getattr(model.config, option) for option in sorted(names)}
    weights = model.state_dict()
    weights |= {f"{k}.weight": m.weight for k, m in model.named_modules() if isinstance(m, Tied)}
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    weights = {f"decoder.{key}": value for key, value in weights.items()}
    built, cfg = build(["--arch", arch, *flags(options)], weights, dictionary)
    with new_folder(output) as part:
        save_imported(built, cfg, part / "checkpoint.pt")
        copy_data(folder, part)
    return f"{sum(each.numel() for each in built.parameters()):,} parameters"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="model to convert")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to write")
    parser.add_argument("--data", type=Path, help="folder with dict.txt and units.json")
    parsed = parser.parse_args(arguments)

    def work() -> None:
        from transformers.utils.logging import disable_progress_bar

        from scripts.convert._conversion import check_new

        output = parsed.output.resolve()
        check_new(output, "OUTPUT ")
        disable_progress_bar()
        if (parsed.checkpoint / "config.json").is_file():
            summary = to_fairseq(parsed.checkpoint, output)
        else:
            summary = to_hugging_face(parsed.checkpoint, output, parsed.data)
        print(f"{summary}\nwritten to {short(output)}")

    return exit_status(work, output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
