#!/usr/bin/env bash
# Transformer-XL on Penn Treebank.
# 24M parameters. Published perplexity: 54.5. Not run here.
#
#   python -m scripts.prepare.ptb --output DATA
#   bash examples/transformer_xl/ptb.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/ptb.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: those of the published run, which also has jittered segment lengths, activation
#   regularisation (0.2 and 0.1), the average of the weights of 50 more epochs, and softmax
#   temperature 1.08 in evaluation; its weight decay is part of the gradient, fairseq's is not.
# No memory, but 70 tokens of extended context (130 in evaluation), and variational dropout.
# Batch: 10 parallel streams; with N GPUs add --batch-size 10/N.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" \
        --arch transformer_xl_ptb --tokens-per-sample 70 --extended-context 70 \
        --batch-size 10 --optimizer adam --weight-decay 1.2e-6 --clip-norm 0.25 \
        --lr 0.0003 --min-lr 0.0001 --lr-scheduler cosine --warmup-updates 3000 \
        --max-epoch 125 --max-update 166000 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
        --tokens-per-sample 10 --extended-context 130 \
        --batch-size 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
