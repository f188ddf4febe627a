#!/usr/bin/env bash
# Transformer-XL, 24 layers, on enwik8.
# 277M parameters. Published: 0.99 bits per character. Not run here.
#
#   python -m scripts.prepare.enwik8 --newlines drop --output DATA
#   bash examples/transformer_xl/enwik8_large.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/enwik8_large.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: those of the published run. fairseq's cosine begins after the warm-up, the published
#   code's with it. The published code trains on segments of 768, as here; the paper says 784.
# Batch: 64 parallel streams; with N GPUs add --batch-size 64/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 4.1 GiB for weights, gradients and Adam's state; activations 3.0 GiB a
#   stream (194 GiB for 64); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
task=(--user-dir fairseq_plugins --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_enwik8_large --tokens-per-sample 768 --batch-size 64 \
        --optimizer adam --clip-norm 0.25 --lr 0.00025 --lr-scheduler cosine --warmup-updates 4000 \
        --max-update 400000 --save-interval-updates 4000 --keep-interval-updates 1 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 128 \
        --model-overrides "{'mem_len': 3800, 'clamp_len': 1000, 'same_length': True}" \
        --batch-size 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
