#!/usr/bin/env bash
# Table 3 of the Weighted Transformer: configuration (C) with the κ and α that it has learned, with
# random ones and with 1/M, on newstest2013.
# Published BLEU: 24.8, 21.1, 23.4. Not run here.
#
#   python -m scripts.prepare.wmt14 --pair en-de --bpe-size 37000 --output DATA
#   bash examples/weighted_transformer/table3.sh train DATA CHECKPOINTS [options]
#   bash examples/weighted_transformer/table3.sh evaluate DATA CHECKPOINTS [options]
#
# train is that of wmt14_en_de_2l.sh, whose checkpoints will do.
# evaluate writes CHECKPOINTS/learned, random and uniform. Its options are those of
#   scripts.evaluate.translation.
# Random weights: the paper does not say how they are drawn. Here uniformly from the simplex, once
#   for all sentences and by the seed: "-- --seed 2" at the end gives others.
set -euo pipefail
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train)
    exec bash "$(dirname "$0")/wmt14_en_de_2l.sh" "$@"
    ;;
evaluate)
    for weights in learned random uniform; do
        PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.evaluate.translation "$data/bin" \
            --path "$checkpoints/checkpoint_last.pt" --source-lang en --target-lang de \
            --split test1 --compound-split --beam 4 --lenpen 0.6 --branch-weights "$weights" \
            --output "$checkpoints/$weights" "${@:4}"
    done
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
