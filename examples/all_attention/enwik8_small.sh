#!/usr/bin/env bash
# All-attention network, 18 layers, on enwik8.
# 39M parameters. Published: 1.01 bits per character. Not run here.
#
#   python -m scripts.prepare.enwik8 --newlines eos --output DATA
#   bash examples/all_attention/enwik8_small.sh train DATA CHECKPOINTS [options]
#   bash examples/all_attention/enwik8_small.sh finish DATA CHECKPOINTS [options]
#   bash examples/all_attention/enwik8_small.sh evaluate DATA CHECKPOINTS [options]
#
# Source: experiments/enwik8_pers_small.sh of facebookresearch/adaptive-span; README.md sets its
#   flags beside these. Different: a pass over the data starts at its beginning, not at a random
#   token of the first segment; a stream starts without context, not with zeros that are attended
#   to; evaluation scores every token, not whole segments only.
# Updates: train makes 450,000; finish goes on to 480,000 at a tenth of the learning rate.
# Batch: 64 parallel streams; with N GPUs add --batch-size 64/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 0.4 GiB for weights, gradients and Adagrad's state; activations 0.6 GiB
#   a stream at the start (39 GiB for 64), 1.0 where every head sees 1,024 tokens (67 GiB); less
#   with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
training=(
    --arch all_attention_lm_enwik8_small --tokens-per-sample 512 --batch-size 64
    --criterion span_cross_entropy --span-loss 1e-7
    --optimizer adagrad_with_clip --adagrad-clip 0.03 --clip-norm 0
    --lr-scheduler fixed --warmup-updates 32000
    --save-interval-updates 4000 --keep-interval-updates 1 --no-epoch-checkpoints
)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" --lr 0.07 --max-update 450000 \
        --save-dir "$checkpoints" "${@:4}"
    ;;
finish)
    [ -e "$checkpoints/checkpoint_last.pt" ] || {
        echo "there is no checkpoint_last.pt in $checkpoints to go on from: train first" >&2
        exit 1
    }
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" --lr 0.007 --max-update 480000 \
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
