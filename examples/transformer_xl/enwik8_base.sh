#!/usr/bin/env bash
# Transformer-XL, 12 layers, on enwik8.
# 41M parameters. Published: 1.06 bits per character. Not run here.
#
#   python -m scripts.prepare.enwik8 --newlines drop --output DATA
#   bash examples/transformer_xl/enwik8_base.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/enwik8_base.sh evaluate DATA CHECKPOINTS [options]
#
# Source: pytorch/run_enwik8_base.sh of kimiyoung/transformer-xl; README.md sets its flags beside
#   these.
# Different:
# - every token is read and scored, there as many as fill all streams
# Batch: 22 parallel streams; with N GPUs add --batch-size 22/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 0.6 GiB for weights, gradients and Adam's state; activations 0.55 GiB a
#   stream (12 GiB for 22); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_enwik8_base --tokens-per-sample 512 --batch-size 22 \
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
