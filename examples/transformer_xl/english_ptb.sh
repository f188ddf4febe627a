#!/usr/bin/env bash
# What regularisation of ptb.sh does, on as much of any English text as Penn Treebank has. Small
# word models; one CPU core is enough.
#
#   bash examples/transformer_xl/english_ptb.sh prepare TEXT DATA
#   bash examples/transformer_xl/english_ptb.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/english_ptb.sh finish DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/english_ptb.sh average DATA CHECKPOINTS
#   bash examples/transformer_xl/english_ptb.sh evaluate DATA CHECKPOINTS [options]
#
# TEXT holds train.txt, valid.txt and test.txt, with as many words as Penn Treebank (887,521, 70,390
#   and 78,669) or more. Words are in lower case, without punctuation, numbers are N, and all but
#   the 9,998 most frequent ones <unk>.
# Options of train and finish, one by one or together: --segment-jitter 5, and --criterion
#   penalized_cross_entropy --activation-penalty 0.2 --temporal-penalty 0.1. Options of evaluate:
#   --path CHECKPOINTS/checkpoint_average.pt, and --softmax-temperature 1.08.
# With a learning rate of 0.002 the model learns how frequent words are, and no more.
# Epochs: train makes 3; finish goes on to 5 at the last learning rate, and average takes the mean
#   of the weights after every 250 of its last 2,500 updates.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling --distributed-world-size 1)
training=(
    --arch transformer_xl --decoder-layers 4 --decoder-embed-dim 128 --decoder-attention-heads 4
    --decoder-ffn-embed-dim 512 --positions sinusoidal-absolute
    --share-decoder-input-output-embed --output-bias --locked-dropout --word-dropout 0.1
    --embed-dropout 0.2 --dropout 0.1 --activation-dropout 0.1 --output-dropout 0.2
    --tokens-per-sample 70 --extended-context 70 --batch-size 10
    --optimizer adam --weight-decay 1.2e-6 --clip-norm 0.25 --seed 1 --no-epoch-checkpoints
)
action=usage
[ $# -lt 3 ] || action=$1

case $action in
prepare)
    text=$2 data=$3 partial=$3.partial
    [ ! -e "$data" ] || { echo "$data exists: remove it, or name another folder" >&2; exit 1; }
    for split in train valid test; do
        [ -s "$text/$split.txt" ] || { echo "there is no text in $text/$split.txt" >&2; exit 1; }
    done
    rm -rf "$partial"
    mkdir -p "$partial/text"
    for part in train:887521 valid:70390 test:78669; do
        split=${part%:*}
        LC_ALL=C.UTF-8 sed -E "s/.*/\L&/; s/[^[:alnum:][:space:]'.,]+/ /g
            s/[0-9]+([.,][0-9]+)*/N/g; s/[.,]/ /g" "$text/$split.txt" |
            LC_ALL=C.UTF-8 awk -v most="${part#*:}" '(words += NF) <= most && NF' \
                >"$partial/text/$split.words"
    done
    fairseq-preprocess --only-source --trainpref "$partial/text/train.words" \
        --validpref "$partial/text/valid.words" --testpref "$partial/text/test.words" \
        --nwordssrc 9998 --destdir "$partial/bin" --padding-factor 1 --workers 1
    mv "$partial" "$data"
    ;;
train)
    data=$2 checkpoints=$3
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --lr 0.001 --min-lr 0.00025 --lr-scheduler cosine --warmup-updates 200 \
        --max-epoch 3 --max-update 4120 --save-dir "$checkpoints" "${@:4}"
    ;;
finish)
    data=$2 checkpoints=$3
    [ -e "$checkpoints/checkpoint_last.pt" ] || {
        echo "there is no checkpoint_last.pt in $checkpoints to go on from: train first" >&2
        exit 1
    }
    fairseq-train "$data/bin" "${task[@]}" "${training[@]}" \
        --lr 0.00025 --lr-scheduler fixed --max-epoch 5 \
        --save-interval-updates 250 --keep-interval-updates 10 --disable-validation \
        --save-dir "$checkpoints" "${@:4}"
    ;;
average)
    checkpoints=$3
    PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.convert.average "$checkpoints"/checkpoint_[0-9]*_*.pt \
        --output "$checkpoints/checkpoint_average.pt"
    ;;
evaluate)
    data=$2 checkpoints=$3
    fairseq-eval-lm "$data/bin" "${task[@]}" --path "$checkpoints/checkpoint_last.pt" \
        --gen-subset test --tokens-per-sample 70 --extended-context 70 --batch-size 8 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
