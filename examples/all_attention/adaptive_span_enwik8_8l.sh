#!/usr/bin/env bash
# Transformer with adaptive spans, 8 layers, on enwik8 (Sukhbaatar et al. 2019, arXiv:1905.07799):
# for one GPU. 6M parameters. Published: about 1.3 bits per character (dev). Not run here.
#
#   python -m scripts.prepare.enwik8 --newlines eos --output DATA
#   bash examples/all_attention/adaptive_span_enwik8_8l.sh train DATA CHECKPOINTS [options]
#   bash examples/all_attention/adaptive_span_enwik8_8l.sh evaluate DATA CHECKPOINTS [options]
#
# Source: experiments/enwik8_small.sh of facebookresearch/adaptive-span; README.md sets its flags
#   beside these. Different: a pass over the data starts at its beginning, not at a random token
#   of the first segment; a stream starts without context, not with zeros that are attended to;
#   evaluation scores every token, not whole segments only.
# Updates: 150,000, without a final phase.
# Batch: 64 parallel streams; with N GPUs add --batch-size 64/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 0.1 GiB for weights, gradients and Adagrad's state; activations 0.03 GiB
#   a stream at the start (2 GiB for 64), 0.09 where every head sees 1,024 tokens (6 GiB).
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
training=(
    --arch adaptive_span_lm_enwik8_8l --tokens-per-sample 256 --batch-size 64
    --criterion span_cross_entropy --span-loss 2e-6
    --optimizer adagrad_with_clip --adagrad-clip 0.03 --clip-norm 0
    --lr-scheduler fixed --warmup-updates 8000
    --save-interval-updates 4000 --keep-interval-updates 1 --no-epoch-checkpoints
)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" --lr 0.07 --max-update 150000 \
        --save-dir "$checkpoints" "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_last.pt" --gen-subset test \
        --tokens-per-sample 256 --batch-size 8 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
