#!/usr/bin/env bash
# Transformer-XL on Penn Treebank.
# 24M parameters. Published perplexity: 54.5. Not run here.
#
#   python -m scripts.prepare.ptb --output DATA
#   bash examples/transformer_xl/ptb.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/ptb.sh finish DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/ptb.sh average DATA CHECKPOINTS
#   bash examples/transformer_xl/ptb.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: those of the published run, whose weight decay is part of the gradient; fairseq's is not.
# No memory, but 70 tokens of extended context (130 in evaluation), variational dropout, activation
#   regularisation, segments of random lengths, and softmax temperature 1.08 in evaluation.
# Epochs: train makes 125, of 1,372 segments each; finish goes on to 175 at the last learning rate,
#   and average takes the mean of the weights at the ends of those 50, which need 15 GB. That the
#   learning rate stays, and which weights are averaged, is our reading.
# Batch: 10 parallel streams; with N GPUs add --batch-size 10/N.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling)
training=(
    --arch transformer_xl_ptb --tokens-per-sample 70 --segment-jitter 5 --extended-context 70
    --batch-size 10 --optimizer adam --weight-decay 1.2e-6 --clip-norm 0.25
    --criterion penalized_cross_entropy --activation-penalty 0.2 --temporal-penalty 0.1
)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --lr 0.0003 --min-lr 0.0001 --lr-scheduler cosine --warmup-updates 3000 \
        --max-epoch 125 --max-update 171500 \
        --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
finish)
    [ -e "$checkpoints/checkpoint_last.pt" ] || {
        echo "there is no checkpoint_last.pt in $checkpoints to go on from: train first" >&2
        exit 1
    }
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --lr 0.0001 --lr-scheduler fixed --max-epoch 175 \
        --save-dir "$checkpoints" --keep-last-epochs 50 "${@:4}"
    ;;
average)
    PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.convert.average "$checkpoints"/checkpoint[0-9]*.pt \
        --output "$checkpoints/checkpoint_average.pt"
    ;;
evaluate)
    fairseq-eval-lm "$data/bin" "${task[@]}" --distributed-world-size 1 \
        --path "$checkpoints/checkpoint_average.pt" --gen-subset test \
        --tokens-per-sample 10 --extended-context 130 --softmax-temperature 1.08 \
        --batch-size 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
