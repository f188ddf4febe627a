#!/usr/bin/env bash
# Transformer-XL large on One Billion Word.
# 841M parameters. Published perplexity: 21.8. Not run here.
#
#   python -m scripts.prepare.lm1b --output DATA
#   bash examples/transformer_xl/lm1b_large.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/lm1b_large.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: those of the published run. fairseq's cosine begins after the warm-up, the published
#   code's with it. --init-std 0.005 is that of the published weights. The learning rate was 0.0001
#   on TPUs, as here, 0.00025 elsewhere.
# Batch: 512 parallel streams; with N GPUs add --batch-size 512/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 12.5 GiB for weights, gradients and Adam's state; activations 0.14 GiB a
#   stream (72 GiB for 512); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
task=(--user-dir fairseq_plugins --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_lm1b_large --tokens-per-sample 32 --batch-size 512 \
        --criterion exact_adaptive_loss --ddp-backend legacy_ddp --init-std 0.005 \
        --optimizer adam --clip-norm 0.25 --lr 0.0001 --lr-scheduler cosine --warmup-updates 30000 \
        --max-update 1200000 --save-interval-updates 4000 --keep-interval-updates 1 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 32 \
        --model-overrides "{'mem_len': 128, 'same_length': True}" \
        --batch-size 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
