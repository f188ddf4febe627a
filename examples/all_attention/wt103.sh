#!/usr/bin/env bash
# All-attention network, 36 layers, on WikiText-103.
# 132M parameters (133M in the paper). Published perplexity: 20.6, or 19.7 with line ends counted;
# evaluation prints both. Not run here.
#
#   python -m scripts.prepare.wikitext103 --output DATA
#   bash examples/all_attention/wt103.sh train DATA CHECKPOINTS [options]
#   bash examples/all_attention/wt103.sh finish DATA CHECKPOINTS [options]
#   bash examples/all_attention/wt103.sh evaluate DATA CHECKPOINTS [options]
#
# Source: experiments/wiki103_pers.sh of facebookresearch/adaptive-span; README.md sets its flags
#   beside these. Different: a pass over the data starts at its beginning, not at a random token
#   of the first segment; a stream starts without context, not with zeros that are attended to;
#   evaluation scores every token, not whole segments only; embeddings start as fairseq's adaptive
#   input does, with variance 1 after their scale, not 170.
# Updates: train makes 800,000; finish goes on to 850,000 at a tenth of the learning rate.
# Batch: 64 parallel streams; with N GPUs add --batch-size 64/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 2.0 GiB for weights, gradients and Adam's state; activations 1.2 GiB a
#   stream at the start (77 GiB for 64), 1.7 where every head sees 1,024 tokens (111 GiB); less
#   with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
training=(
    --arch all_attention_lm_wt103 --tokens-per-sample 256 --batch-size 64
    --criterion span_exact_adaptive_loss --span-loss 5e-7 --ddp-backend legacy_ddp
    --optimizer adam --clip-norm 1
    --lr-scheduler fixed --warmup-updates 8000
    --save-interval-updates 4000 --keep-interval-updates 1 --no-epoch-checkpoints
)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" --lr 0.00025 --max-update 800000 \
        --save-dir "$checkpoints" "${@:4}"
    ;;
finish)
    [ -e "$checkpoints/checkpoint_last.pt" ] || {
        echo "there is no checkpoint_last.pt in $checkpoints to go on from: train first" >&2
        exit 1
    }
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" --lr 0.000025 --max-update 850000 \
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
