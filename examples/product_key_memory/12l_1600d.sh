#!/usr/bin/env bash
# Transformer of 12 layers and width 1600 on English news, with 0 to 3 memories of 512² slots:
# 466M, 869M, 1,272M or 1,676M parameters. Not run here.
#
#   python -m scripts.prepare.news --input NEWS --output DATA
#   bash examples/product_key_memory/12l_1600d.sh train DATA CHECKPOINTS MEMORIES [options]
#   bash examples/product_key_memory/12l_1600d.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: the paper's and the published code's; our choice where we know of neither: batch, block
#   length, warm-up, clipping, updates, dropout, activation, batch norm of the queries.
# MEMORIES is 0, 1 (instead of the feed-forward sublayer of layer 6), 2 (layers 4 and 8) or 3
#   (layers 3, 6 and 9).
# Batch: 256 blocks of 512 tokens (--batch-size 8, --update-freq 32); with N GPUs add
#   --update-freq 32/N, or another --batch-size.
# Memory (computed, fp16): 8.7, 13.8, 19.0 or 24.2 GiB for weights, gradients and the optimizers'
#   state, the same on each GPU; activations come on top.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task language_modeling --tokens-per-sample 512)
training=(
    --arch pkm_transformer_lm_12l_1600d
    --memory-query-dim 512 --memory-query-batch-norm
    --optimizer adam_with_memory --adam-betas '(0.9, 0.98)' --lr 0.00025 --memory-lr 0.001
    --lr-scheduler inverse_sqrt --warmup-updates 4000 --clip-norm 1
    --fp16 --fp16-no-flatten-grads --ddp-backend legacy_ddp
    --batch-size 8 --update-freq 32 --required-batch-size-multiple 1
    --max-update 250000 --save-interval-updates 5000 --keep-interval-updates 1
    --no-epoch-checkpoints
)
# layers with a memory, by the number of memories
layers=("" 6 4,8 3,6,9)
action=usage data=${2:-} checkpoints=${3:-} memories=${4:-}
[ $# -lt 3 ] || action=$1
[ "$action" != train ] || [[ $memories =~ ^[0-3]$ ]] || action=usage

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --memory-layers "${layers[memories]}" --save-dir "$checkpoints" "${@:5}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --batch-size 8 --required-batch-size-multiple 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
