r"""Convert models of the original code to fairseq checkpoints that this package can use.

    python -m scripts.convert.checkpoint --source transformer-xl --checkpoint weights.pt \
        --config config.json --vocab vocab.txt --output OUTPUT

--source transformer-xl: a state dict of the PyTorch code, with n_layer and so on as --config.
--source transformer-xl-tensorflow: the TensorFlow code's model.ckpt-…, its flags as --config, and
    its cache.pkl as --vocab.
--source adaptive-span: a checkpoint of the adaptive-span code, with or without all-attention.
--source huggingface-transfo-xl: pytorch_model.bin or model.safetensors, and config.json.

The vocabulary is a cache.pkl, or a text file with one symbol per line in the order of the model's
numbers; <eos> becomes fairseq's </s>. OUTPUT gets checkpoint.pt, dict.txt, units.json, which says
what a symbol is, and options.txt with the model's options for fairseq-train
--finetune-from-model. Nothing in a file is executed. If anything does not fit, nothing is written.
"""

import functools
import sys
from pathlib import Path

from scripts._shared.command_line import command_parser, exit_status
from scripts.convert import SOURCES

UNITS = ("characters", "bytes", "words", "subwords")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add = functools.partial(parser.add_argument, required=True)
    add("--source", choices=SOURCES, help="the code that saved the model")
    add("--checkpoint", type=Path, help="the model's weights")
    add("--config", type=Path, help="the model's options, JSON")
    add("--vocab", type=Path, help="the model's symbols, one per line")
    add("--output", type=Path, help="folder to write")
    help_text = "what a symbol is (guessed from the vocabulary: bytes, characters or words)"
    parser.add_argument("--unit", choices=UNITS, help=help_text)
    parsed = parser.parse_args(arguments)

    def work() -> None:
        # imports fairseq, which takes seconds
        from scripts.convert._conversion import convert

        convert(parsed)

    return exit_status(work, output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
