#!/usr/bin/env bash
# Transformer-XL standard on WikiText-103.
# 151M parameters. Published perplexity: 24.0. Not run here.
#
#   python -m scripts.prepare.wikitext103 --output DATA
#   bash examples/transformer_xl/wt103_base.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/wt103_base.sh evaluate DATA CHECKPOINTS [options]
#
# Source: pytorch/run_wt103_base.sh of kimiyoung/transformer-xl; README.md sets its flags beside
#   these.
# Different:
# - every token is read and scored, there as many as fill all streams
# Batch: 60 parallel streams; with N GPUs add --batch-size 60/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 2.3 GiB for weights, gradients and Adam's state; activations 0.15 GiB a
#   stream (9 GiB for 60); less with --batch-split, --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_wt103_base --tokens-per-sample 150 --batch-size 60 \
        --criterion exact_adaptive_loss --ddp-backend legacy_ddp \
        --optimizer adam --clip-norm 0.25 --lr 0.00025 --lr-scheduler cosine \
        --max-update 200000 \
        --save-interval-updates 4000 --keep-interval-updates 1 --validate-interval 1000000 \
        --batch-size-valid 10 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 64 \
        --model-overrides "{'mem_len': 640, 'clamp_len': 400, 'same_length': True}" \
        --batch-size 10 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
