#!/usr/bin/env bash
# Transformer-XL, 128M parameters, on WikiText-103: the model of tables 6 and 10.
# Published perplexity: 26.77; README.md has the options of the other rows. Not run here.
#
#   python -m scripts.prepare.wikitext103 --output DATA
#   bash examples/transformer_xl/wt103_ablation.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/wt103_ablation.sh evaluate DATA CHECKPOINTS [options]
#
# Source: none is public. The paper gives the number of parameters and the segments of 128 tokens.
#   7 layers are our choice, to meet that number with the widths of wt103_base.sh, from which the
#   other flags are taken.
# Batch: 60 parallel streams; with N GPUs add --batch-size 60/N. Not --update-freq: it puts
#   consecutive segments into one update.
# Memory (computed, fp32): 1.9 GiB for weights, gradients and Adam's state; activations 0.06 GiB a
#   stream (4 GiB for 60); less with --checkpoint-activations or --bf16.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_wt103_ablation --tokens-per-sample 128 --batch-size 60 \
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
        --model-overrides "{'mem_len': 500, 'same_length': True}" \
        --batch-size 10 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
