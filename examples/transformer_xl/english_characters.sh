#!/usr/bin/env bash
# Small character model of any English text, with and without memory. Two CPU cores are enough.
#
#   bash examples/transformer_xl/english_characters.sh prepare TEXT DATA
#   bash examples/transformer_xl/english_characters.sh train DATA CHECKPOINTS [options]
#   bash examples/transformer_xl/english_characters.sh evaluate DATA CHECKPOINTS [options]
#
# TEXT holds train.txt, valid.txt and test.txt. Without memory: train with --mem-len 0.
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
        # one symbol a character, the space written as U+2581 and what fairseq takes for one too as
        # U+2409 (tab) or U+2423; the end of a line becomes </s>
        LC_ALL=C.UTF-8 sed 's/ /▁/g; s/\t/␉/g; s/\xC2\xA0\|[[:space:]]/␣/g; s/./& /g' \
            "$text/$split.txt" >"$partial/text/$split.chars"
    done
    fairseq-preprocess --only-source --trainpref "$partial/text/train.chars" \
        --validpref "$partial/text/valid.chars" --testpref "$partial/text/test.chars" \
        --destdir "$partial/bin" --padding-factor 1 --workers 3
    mv "$partial" "$data"
    ;;
train)
    data=$2 checkpoints=$3
    fairseq-train "$data/bin" "${task[@]}" --arch transformer_xl_tiny \
        --tokens-per-sample 64 --batch-size 16 --batch-size-valid 64 \
        --optimizer adam --clip-norm 0.25 --lr 0.002 --lr-scheduler cosine --warmup-updates 200 \
        --max-update 4000 --seed 1 --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    data=$2 checkpoints=$3
    fairseq-eval-lm "$data/bin" "${task[@]}" --path "$checkpoints/checkpoint_best.pt" \
        --gen-subset test --tokens-per-sample 64 --batch-size 1 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
