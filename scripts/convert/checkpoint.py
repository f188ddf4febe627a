r"""Models of the original code as fairseq checkpoints that this package evaluates and trains.

    python -m scripts.convert.checkpoint --source transformer-xl --checkpoint weights.pt \
        --config config.json --vocab vocab.txt --output OUTPUT

--source transformer-xl: a state dict of the PyTorch code, n_layer and so on as --config.
--source transformer-xl-tensorflow: the TensorFlow code's model.ckpt-…, its flags as --config, and
    its cache.pkl as --vocab.
--source adaptive-span: what the adaptive-span code saves, for all-attention too.
--source huggingface-transfo-xl: pytorch_model.bin or model.safetensors, and config.json.

The vocabulary is a text file, a symbol a line, in the order of the model's numbers, or a cache.pkl;
<eos> becomes fairseq's </s>. Writes OUTPUT/checkpoint.pt, OUTPUT/dict.txt, OUTPUT/units.json, which
says what a symbol is, and OUTPUT/options.txt with the model's options for fairseq-train
--finetune-from-model. No file is executed. If anything does not fit, all problems are listed and
nothing is written.
"""

import functools
import sys
from pathlib import Path

from scripts._shared.command_line import command_parser, exit_status
from scripts.convert import SOURCES

UNITS = ("characters", "bytes", "words", "subwords")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = functools.partial(parser.add_argument, required=True)
    add("--source", choices=SOURCES, help="the code that the model is from")
    add("--checkpoint", type=Path, help="the model's weights")
    add("--config", type=Path, help="the model's options, JSON")
    add("--vocab", type=Path, help="the model's symbols, a line each")
    add("--output", type=Path, help="folder to write")
    help_text = "what a symbol is (by the vocabulary: bytes, characters or words)"
    parser.add_argument("--unit", choices=UNITS, help=help_text)
    parsed = parser.parse_args(arguments)

    def work() -> None:
        # it imports fairseq, which takes seconds
        from scripts.convert._conversion import convert

        convert(parsed)

    return exit_status(work, output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
