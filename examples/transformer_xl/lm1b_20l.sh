#!/usr/bin/env bash
# Transformer-XL base of the paper on One Billion Word, 20 layers.
# 469M parameters (0.46B in the paper). Published perplexity: 23.5. Not run here.
#
#   python -m scripts.prepare.lm1b --output DATA
#   bash examples/transformer_xl/lm1b_20l.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/lm1b_20l.sh evaluate DATA CHECKPOINTS [options]
#
# Source: no script is public. Layers, width and inner size are the author's
#   (kimiyoung/transformer-xl#69); heads and all flags are those of lm1b_base.sh, whose
#   differences hold here too.
# Batch: 224 parallel streams; with N GPUs add --batch-size 224/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 7.0 GiB for weights, gradients and Adam's state; activations 0.06 GiB a
#   stream (13 GiB for 224); less with --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_lm1b_20l --tokens-per-sample 32 --batch-size 224 \
        --shuffle-sentences --criterion exact_adaptive_loss --ddp-backend legacy_ddp \
        --optimizer adam --clip-norm 0.25 --lr 0.00025 --lr-scheduler cosine \
        --warmup-updates 20000 --max-update 500000 \
        --save-interval-updates 4000 --keep-interval-updates 1 --validate-interval 1000000 \
        --batch-size-valid 10 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 32 \
        --model-overrides "{'mem_len': 128, 'same_length': True}" \
        --batch-size 64 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
