#!/usr/bin/env bash
# How much small models learn by heart: random facts, with and without a product-key memory. Two CPU
# cores are enough.
#
#   bash examples/product_key_memory/capacity.sh prepare DATA FACTS
#   bash examples/product_key_memory/capacity.sh train DATA CHECKPOINTS MODEL [options]
#
# FACTS is 16 times a square number, such as 4096, 16384, 65536 or 262144.
# MODEL: 2 layers, width 64, 4 heads, feed-forward sublayers of 256; in layer 2
#   memory            a memory of 16,384 slots instead: 2 heads, each with queries of width 64 and 16
#                     slots, queries batch-normalised
#   memory-no-norm    the same, queries as they are
#   feed-forward      nothing else; both sublayers have 640, which takes as long as the memory
#   wide              nothing else; both sublayers have 4,352, as many parameters as with the memory
# An update has 1,024 facts. Each epoch has each fact once. Every 100 updates all of them are scored,
#   into CHECKPOINTS/train.log. Each training ends after 0.08 hours: give a slower machine, or more
#   facts, more --stop-time-hours.
# python -m scripts.plot.facts says how many bits the models of several logs know, with a plot.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
action=usage
[ $# -lt 3 ] || action=$1
layers=2 inner=256 norm=(--memory-query-batch-norm)
case $action:${4:-} in
prepare:* | train:memory) ;;
train:memory-no-norm) norm=() ;;
train:feed-forward) layers='' inner=640 ;;
train:wide) layers='' inner=4352 ;;
*) action=usage ;;
esac

case $action in
prepare)
    PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.prepare.facts --facts "$3" --output "$2"
    ;;
train)
    data=$2 checkpoints=$3
    # fairseq does not make the folder of --log-file
    mkdir -p "$checkpoints"
    fairseq-train "$data/bin" --user-dir "$plugin" --task language_modeling \
        --sample-break-mode complete --tokens-per-sample 5 --distributed-world-size 1 --cpu \
        --required-batch-size-multiple 1 --batch-size 1024 --num-workers 0 --seed 1 \
        --arch pkm_transformer_lm --decoder-layers 2 --decoder-embed-dim 64 \
        --decoder-ffn-embed-dim "$inner" --decoder-attention-heads 4 \
        --share-decoder-input-output-embed --memory-layers "$layers" --memory-slots 16384 \
        --memory-query-dim 64 --memory-heads 2 --memory-knn 16 "${norm[@]}" --dropout 0 \
        --optimizer adam_with_memory --adam-betas '(0.9, 0.98)' \
        --lr 0.005 --memory-lr 0.02 --lr-scheduler inverse_sqrt --warmup-updates 100 \
        --warmup-init-lr 1e-7 --clip-norm 1 --stop-time-hours 0.08 --max-update 1000000 \
        --validate-interval-updates 100 --validate-interval 1000000 \
        --save-interval 1000000 --save-interval-updates 1000000 \
        --log-format json --log-interval 50 --log-file "$checkpoints/train.log" \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:5}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
