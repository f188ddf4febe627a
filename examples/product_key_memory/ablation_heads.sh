#!/usr/bin/env bash
# Ablation of product-key memory: heads, and slots that each reads (Lample et al. 2019, section
# 4.5, figure 5). Not run here.
#
#   python -m scripts.prepare.news --input NEWS --output DATA
#   bash examples/product_key_memory/ablation_heads.sh train DATA CHECKPOINTS HEADS KNN [options]
#   bash examples/product_key_memory/ablation_heads.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: the paper's and the published code's; our choice where we know of neither: width (1024),
#   batch, block length, warm-up, clipping, updates, dropout, activation.
# HEADS and KNN are numbers. 1 64, 2 32, 4 16 and 8 8 read 64 slots a token each.
# Model: 6 layers, 8 heads; 512² slots in layer 5, batch norm of the queries (our choice).
# Batch: 256 blocks of 512 tokens (--batch-size 8, --update-freq 32); with N GPUs add
#   --update-freq 32/N, or another --batch-size.
# Memory (computed, fp16): 6.0 GiB for weights, gradients and the optimizers' state with 4 heads;
#   activations come on top.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task language_modeling --tokens-per-sample 512)
training=(
    --arch pkm_transformer_lm_ablation
    --memory-query-dim 512 --memory-query-batch-norm
    --optimizer adam_with_memory --adam-betas '(0.9, 0.98)' --lr 0.00025 --memory-lr 0.001
    --lr-scheduler inverse_sqrt --warmup-updates 4000 --clip-norm 1
    --fp16 --fp16-no-flatten-grads --ddp-backend legacy_ddp
    --batch-size 8 --update-freq 32 --required-batch-size-multiple 1
    --max-update 250000 --save-interval-updates 5000 --keep-interval-updates 1
    --no-epoch-checkpoints
)
action=usage data=${2:-} checkpoints=${3:-} heads=${4:-} knn=${5:-}
[ $# -lt 3 ] || action=$1
[ "$action" != train ] || [[ $heads,$knn =~ ^[1-9][0-9]*,[1-9][0-9]*$ ]] || action=usage

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --memory-heads "$heads" --memory-knn "$knn" --save-dir "$checkpoints" "${@:6}"
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
