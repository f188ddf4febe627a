#!/usr/bin/env bash
# Small models of any English text: without a memory, or with one of 16,384 or 262,144 slots. A CPU
# and 4 GB of memory are enough.
#
#   bash examples/product_key_memory/english.sh prepare TEXT DATA
#   bash examples/product_key_memory/english.sh train DATA CHECKPOINTS SLOTS [options]
#   bash examples/product_key_memory/english.sh evaluate DATA CHECKPOINTS [options]
#
# TEXT holds train.txt, valid.txt and test.txt (or .txt.gz): a paragraph a line, empty lines
#   between articles, enough text for 8,000 merges of BPE.
# SLOTS is none, 16k or 262k. Batch norm of the queries: train with --memory-query-batch-norm.
# Model: 6 layers, width 128, 4 heads, feed-forward sublayers of 512; in layer 5 the memory
#   instead.
# Twice as many layers without a memory:
#   train DATA CHECKPOINTS none --decoder-layers 12 --decoder-normalize-before
# Two passes over the text. Others: --max-epoch N, or --max-epoch 0 --max-update N. --bf16 is faster
#   where a CPU has it.
# The validation part is scored after each pass, into CHECKPOINTS/train.log. A checkpoint has 0.4 GB
#   with 262k slots. The same command again goes on from the last one.
# evaluate needs the options of train that say how long a block is.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task language_modeling --tokens-per-sample 256)
task+=(--distributed-world-size 1 --cpu --required-batch-size-multiple 1)
layers=5
case ${4:-} in
none) slots=16384 layers= ;;
16k) slots=16384 ;;
262k) slots=262144 ;;
*) slots= ;;
esac
action=usage
[ $# -lt 3 ] || action=$1
[ "$action" != train ] || [ -n "$slots" ] || action=usage

case $action in
prepare)
    PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.prepare.news --input "$2" --output "$3" \
        --bpe-size 8000 --bpe-tool subword-nmt "${@:4}"
    ;;
train)
    data=$2 checkpoints=$3
    # fairseq does not make the folder of --log-file
    mkdir -p "$checkpoints"
    fairseq-train "$data/bin" "${task[@]}" --arch pkm_transformer_lm \
        --decoder-layers 6 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 \
        --decoder-attention-heads 4 --share-decoder-input-output-embed \
        --memory-layers "$layers" --memory-slots "$slots" \
        --optimizer adam_with_memory --adam-betas '(0.9, 0.98)' --lr 0.004 --memory-lr 0.004 \
        --lr-scheduler inverse_sqrt --warmup-updates 200 --warmup-init-lr 1e-7 \
        --dropout 0 --clip-norm 1 --batch-size 16 --max-epoch 2 --seed 1 \
        --log-format json --log-interval 50 --log-file "$checkpoints/train.log" \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:5}"
    ;;
evaluate)
    data=$2 checkpoints=$3
    fairseq-eval-lm "$data/bin" "${task[@]}" --path "$checkpoints/checkpoint_best.pt" \
        --gen-subset test --batch-size 16 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
