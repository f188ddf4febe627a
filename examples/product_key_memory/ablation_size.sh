#!/usr/bin/env bash
# Ablation of product-key memory: its size, with and without batch norm of the queries (Lample et
# al. 2019, section 4.5, table 2). Not run here.
#
#   python -m scripts.prepare.news --input NEWS --output DATA
#   bash examples/product_key_memory/ablation_size.sh train DATA CHECKPOINTS SLOTS [options]
#   bash examples/product_key_memory/ablation_size.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: the paper's and the published code's; our choice where we know of neither: width (1024),
#   batch, block length, warm-up, clipping, updates, dropout, activation.
# SLOTS is 16k, 65k, 147k, 262k, 590k or 1M (128², 256², 384², 512², 768² or 1024²), or none for
#   the transformer without a memory. Batch norm: train with --memory-query-batch-norm.
# Model: 6 layers, 8 heads.
# Batch: 256 blocks of 512 tokens (--batch-size 8, --update-freq 32); with N GPUs add
#   --update-freq 32/N, or another --batch-size.
# Memory (computed, fp16): 2.6 GiB without a memory, 2.7 to 16.5 with one, for weights, gradients
#   and the optimizers' state; activations come on top.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task language_modeling --tokens-per-sample 512)
training=(
    --arch pkm_transformer_lm_ablation
    --memory-query-dim 512
    --optimizer adam_with_memory --adam-betas '(0.9, 0.98)' --lr 0.00025 --memory-lr 0.001
    --lr-scheduler inverse_sqrt --warmup-updates 4000 --clip-norm 1
    --fp16 --fp16-no-flatten-grads --ddp-backend legacy_ddp
    --batch-size 8 --update-freq 32 --required-batch-size-multiple 1
    --max-update 250000 --save-interval-updates 5000 --keep-interval-updates 1
    --no-epoch-checkpoints
)
layers=5
case ${4:-} in
none) slots=262144 layers= ;;
16k) slots=16384 ;;
65k) slots=65536 ;;
147k) slots=147456 ;;
262k) slots=262144 ;;
590k) slots=589824 ;;
1M) slots=1048576 ;;
*) slots= ;;
esac
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1
[ "$action" != train ] || [ -n "$slots" ] || action=usage

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --memory-layers "$layers" --memory-slots "$slots" --save-dir "$checkpoints" "${@:5}"
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
