"""A binarized text and checkpoints of tiny models, written without fairseq's commands."""

import dataclasses
import os

import numpy as np
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.segment_language_model.split import load_tokens
from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from tests import tiny

CONFIGS = {"all_attention_lm": AllAttentionConfig, "transformer_xl": TransformerXLConfig}
BUILDERS = {"all_attention_lm": tiny.tiny_model, "transformer_xl": tiny.tiny_transformer_xl}


class UnsafePickle:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_text(folder, length=97, split="test"):
    """Write dict.txt and a split of random letters in lines of 10; return its tokens."""
    folder.mkdir(exist_ok=True)
    (folder / "units.json").write_text('{"unit": "characters"}', encoding="utf-8")
    dictionary = tiny.dictionary()
    dictionary.save(str(folder / "dict.txt"))
    text = tiny.tokens(1, length)[0]
    text[9::10] = dictionary.eos()
    builder = MMapIndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=np.uint16)
    for line in text.split(10):
        builder.add_item(line)
    builder.finalize(str(folder / f"{split}.idx"))
    return text.numpy()


def task_options(name, **changes):
    """Return a task's options as in a checkpoint: references to other options are resolved."""
    others = {"seed": 1, "tpu": False, "use_plasma_view": False, "required_seq_len_multiple": 1}
    others |= {"data_buffer_size": 10, "plasma_path": "", "train_subset": "train"}
    options = {}
    for option in dataclasses.fields(TASK_DATACLASS_REGISTRY[name]):
        from_others = str(option.default).startswith("$")
        options[option.name] = others.get(option.name) if from_others else option.default
    return {**options, "_name": name, "data": "where it was trained", **changes}


def write_state(path, model, options, task, **others):
    """Write a checkpoint as fairseq-train does after an update, with these options."""
    update = {"num_updates": 1, "criterion_name": "", "optimizer_name": ""}
    state = {
        "args": None,
        "cfg": {"model": options, "task": task},
        "model": model.state_dict(),
        "optimizer_history": [{**update, "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        **others,
    }
    torch.save(state, path)


def write_checkpoint(path, name, seed=1, **options):
    """Write a checkpoint with random weights as fairseq-train does; return the model."""
    model = BUILDERS[name](seed=seed, **options)
    shape = {field.name: field.default for field in dataclasses.fields(CONFIGS[name])}
    sizes = {
        "all_attention_lm": {"persistent_vectors": 5, "attention_span": 6},
        "transformer_xl": {"decoder_ffn_embed_dim": 24},
    }
    trained = {**tiny.SIZES, **sizes[name], **tiny.SEGMENTS, **options}
    cfg = {**shape, **trained, "_name": name}
    if name == "transformer_xl":
        cfg["positions"] = str(options.get("positions", "transformer-xl"))
    segments = {option: trained[option] for option in tiny.SEGMENTS}
    task = task_options("segment_language_modeling", **segments)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, model, cfg, task)
    return model.eval()


@torch.no_grad()
def token_losses(model, inputs, targets):
    """Return losses in nats of targets (T,) after inputs (T,), in one segment without a past."""
    output = model(torch.from_numpy(np.asarray(inputs, dtype=np.int64))[None])
    target = torch.from_numpy(np.asarray(targets, dtype=np.int64))[None]
    probs = model.get_normalized_probs(output, log_probs=True, sample={"target": target})
    return -probs.gather(-1, target.unsqueeze(-1)).view(-1).numpy()


def read_split(model, split="test"):
    """Return the tokens (N,) of a split in the folder that a model was loaded with."""
    task = model.task
    return load_tokens(f"{(task.cfg or task.args).data}/{split}", model.text.dictionary)
