#!/usr/bin/env bash
# Transformer-XL, 24 layers, on enwik8.
# 277M parameters. Published: 0.99 bits per character. Not run here.
#
#   python -m scripts.prepare.enwik8 --newlines drop --output DATA
#   bash examples/transformer_xl/enwik8_large.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/enwik8_large.sh evaluate DATA CHECKPOINTS [options]
#
# Source: tf/scripts/enwik8_large_tpu.sh, "exactly the commands we used", and for evaluation
#   tf/sota/enwik8.sh of kimiyoung/transformer-xl; README.md sets its flags beside these. The
#   paper says segments of 784.
# Different:
# - an epoch is one pass from the beginning of the text, there ten, each from a random place, one
#   after another
# - every token is read, there only what fills whole segments (in evaluation: all streams)
# - layer norms add 1e-5 to the variance, there 1e-12
# - the gradient is clipped as a whole, there the part of each TPU core before they are summed
# - same_length shows 3,800 tokens, there one more
# - the checkpoint of the lowest validation loss is evaluated, with a memory of 1,408; there that
#   of the lowest test loss, with 3,800
# Batch: 64 parallel streams; with N GPUs add --batch-size 64/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 4.1 GiB for weights, gradients and Adam's state; activations 3.0 GiB a
#   stream (194 GiB for 64); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_enwik8_large --tokens-per-sample 768 --batch-size 64 \
        --initial-values tensorflow --zero-memory \
        --optimizer adam --clip-norm 0.25 --lr 0.00025 --lr-scheduler cosine --min-lr 0.0000025 \
        --warmup-updates 4000 --warmup-init-lr 0 --max-update 400000 \
        --save-interval-updates 10000 --keep-interval-updates 1 --validate-interval 1000000 \
        --batch-size-valid 16 --tokens-per-sample-valid 128 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 128 \
        --model-overrides "{'mem_len': 3800, 'clamp_len': 1000, 'same_length': True}" \
        --batch-size 16 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
