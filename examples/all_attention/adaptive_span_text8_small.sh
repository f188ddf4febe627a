#!/usr/bin/env bash
# Transformer with adaptive spans, 12 layers, on text8 (Sukhbaatar et al. 2019, arXiv:1905.07799).
# 38M parameters. Published: 1.11 bits per character. Not run here.
#
#   python -m scripts.prepare.text8 --output DATA
#   bash examples/all_attention/adaptive_span_text8_small.sh train DATA CHECKPOINTS [options]
#   bash examples/all_attention/adaptive_span_text8_small.sh evaluate DATA CHECKPOINTS [options]
#
# Source: experiments/text8.sh of facebookresearch/adaptive-span; README.md sets its flags beside
#   these. Different: a pass over the data starts at its beginning, not at a random token of the
#   first segment; a stream starts without context, not with zeros that are attended to;
#   evaluation scores every token, not whole segments only.
# Updates: the published run has no final phase.
# Batch: 64 parallel streams; with N GPUs add --batch-size 64/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 0.4 GiB for weights, gradients and Adagrad's state; activations 0.3 GiB
#   a stream at the start (17 GiB for 64), 0.6 where every head sees 1,024 tokens (36 GiB); less
#   with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
training=(
    --arch adaptive_span_lm_text8_small --tokens-per-sample 512 --batch-size 64
    --criterion span_cross_entropy --span-loss 5e-7
    --optimizer adagrad_with_clip --adagrad-clip 0.03 --clip-norm 0
    --lr-scheduler fixed --warmup-updates 32000
    --save-interval-updates 4000 --keep-interval-updates 1 --no-epoch-checkpoints
)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" --lr 0.07 --max-update 900000 \
        --save-dir "$checkpoints" "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_last.pt" --gen-subset test \
        --tokens-per-sample 512 --batch-size 8 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
