#!/usr/bin/env bash
# Transformer-XL, 18 layers, on enwik8.
# 88M parameters. Published: 1.03 bits per character. Not run here.
#
#   python -m scripts.prepare.enwik8 --newlines drop --output DATA
#   bash examples/transformer_xl/enwik8_18l.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/enwik8_18l.sh evaluate DATA CHECKPOINTS [options]
#
# Source: none is public. Flags are those of enwik8_base.sh; the widths are our choice, to meet
#   the paper's numbers of layers and parameters.
# Batch: 22 parallel streams; with N GPUs add --batch-size 22/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 1.3 GiB for weights, gradients and Adam's state; activations 1.0 GiB a
#   stream (22 GiB for 22); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_enwik8_18l --tokens-per-sample 512 --batch-size 22 \
        --optimizer adam --clip-norm 0.25 --lr 0.00025 --lr-scheduler cosine \
        --max-update 400000 \
        --save-interval-updates 4000 --keep-interval-updates 1 --validate-interval 1000000 \
        --batch-size-valid 10 --tokens-per-sample-valid 128 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 80 \
        --model-overrides "{'mem_len': 2100, 'clamp_len': 820, 'same_length': True}" \
        --batch-size 10 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
