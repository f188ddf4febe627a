#!/usr/bin/env bash
# Small word model of any English text, with and without memory. Two CPU cores are enough.
#
#   bash examples/transformer_xl/english_words.sh prepare TEXT DATA
#   bash examples/transformer_xl/english_words.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/english_words.sh evaluate DATA CHECKPOINTS [options]
#
# TEXT holds train.txt, valid.txt and test.txt, with more than 8,000 words that are seen 3 times;
#   for less text add smaller --adaptive-input-cutoff and --adaptive-softmax-cutoff. Without
#   memory: train with --mem-len 0.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling --distributed-world-size 1)
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
    for split in train valid test; do
        # punctuation marks are words; the end of a line becomes </s>
        LC_ALL=C.UTF-8 sed -E 's/([^[:alnum:][:space:]])/ \1 /g' "$text/$split.txt" \
            >"$partial/text/$split.words"
    done
    # words seen fewer than 3 times become <unk>
    fairseq-preprocess --only-source --trainpref "$partial/text/train.words" \
        --validpref "$partial/text/valid.words" --testpref "$partial/text/test.words" \
        --thresholdsrc 3 --destdir "$partial/bin" --padding-factor 1 --workers 3
    mv "$partial" "$data"
    ;;
train)
    data=$2 checkpoints=$3
    fairseq-train "$data/bin" "${task[@]}" --arch transformer_xl \
        --decoder-layers 4 --decoder-embed-dim 128 --decoder-attention-heads 4 \
        --decoder-ffn-embed-dim 512 --dropout 0.1 --embed-dropout 0.1 --output-dropout 0.1 \
        --adaptive-input --adaptive-input-cutoff 2000,8000 --adaptive-softmax-cutoff 2000,8000 \
        --tie-adaptive-weights --tie-adaptive-proj --output-bias \
        --criterion exact_adaptive_loss --ddp-backend legacy_ddp \
        --tokens-per-sample 32 --batch-size 32 --batch-size-valid 64 \
        --optimizer adam --clip-norm 0.25 --lr 0.002 --lr-scheduler cosine --warmup-updates 200 \
        --max-update 6000 --seed 1 --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    data=$2 checkpoints=$3
    fairseq-eval-lm "$data/bin" "${task[@]}" --path "$checkpoints/checkpoint_best.pt" \
        --gen-subset test --tokens-per-sample 32 --batch-size 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
