#!/usr/bin/env bash
# Transformer-XL large on One Billion Word.
# 838M parameters (0.8B in the paper). Published perplexity: 21.8. Not run here.
#
#   python -m scripts.prepare.lm1b --output DATA
#   bash examples/transformer_xl/lm1b_large.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/lm1b_large.sh evaluate DATA CHECKPOINTS [options]
#
# Source: tf/scripts/lm1b_large_tpu.sh, "exactly the commands we used", and for evaluation
#   tf/sota/lm1b.sh of kimiyoung/transformer-xl; README.md sets its flags beside these.
# Different:
# - one </s> stands between sentences, there two <S>; the second, predicted from the first, is
#   counted in the published perplexity and lowers it
# - sentences are shuffled every epoch, there four times within each shard
# - heldout-00001 validates, there heldout-00000, which also tests
# - every token is read, there only what fills whole segments (in evaluation: all streams)
# - layer norms add 1e-5 to the variance, there 1e-12
# - the gradient is clipped as a whole, there the part of each TPU core before they are summed
# - same_length shows 128 tokens, there one more
# - the checkpoint of the lowest validation loss is evaluated, with a memory of 32; there that
#   of the lowest test loss, with 128
# Batch: 512 parallel streams; with N GPUs add --batch-size 512/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 12.5 GiB for weights, gradients and Adam's state; activations 0.14 GiB a
#   stream (72 GiB for 512); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_lm1b_large --untie-r --no-adaptive-head-proj \
        --tokens-per-sample 32 --batch-size 512 --shuffle-sentences \
        --initial-values tensorflow --init-std 0.005 --zero-memory \
        --criterion exact_adaptive_loss --ddp-backend legacy_ddp \
        --optimizer adam --clip-norm 0.25 --lr 0.0001 --lr-scheduler cosine --min-lr 0.000001 \
        --warmup-updates 30000 --warmup-init-lr 0 --max-update 1200000 \
        --save-interval-updates 10000 --keep-interval-updates 1 --validate-interval 1000000 \
        --batch-size-valid 8 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 32 \
        --model-overrides "{'mem_len': 128, 'same_length': True}" \
        --batch-size 16 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
