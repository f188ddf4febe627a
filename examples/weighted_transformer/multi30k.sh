#!/usr/bin/env bash
# Small models of Multi30k: the Weighted Transformer beside fairseq's transformer.
# Two CPU cores are enough.
#
#   export TARGET=fr (default: de), or both: one model of English-German and English-French
#   bash examples/weighted_transformer/multi30k.sh prepare RAW DATA
#   bash examples/weighted_transformer/multi30k.sh train DATA CHECKPOINTS [options]
#   bash examples/weighted_transformer/multi30k.sh train-plain DATA CHECKPOINTS [options]
#   bash examples/weighted_transformer/multi30k.sh evaluate DATA CHECKPOINTS [options]
#
# RAW holds train, val and test_2016_flickr, each with .en and .de or .fr.
# TARGET both: English sentences begin with <2de> or <2fr>, German comes before French; the texts are
#   in DATA.joined.
# train: the Weighted Transformer, 3 layers, width 256, 4 branches. train-plain: fairseq's
#   transformer, with all else the same. Every 100 updates the validation loss, and κ and α of each
#   layer, go into CHECKPOINTS/train.log.
# evaluate: test 2016 with the last checkpoint, into CHECKPOINTS/learned. With --branch-weights
#   random or uniform give another --output.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
action=usage target=${TARGET:-de}
[ $# -lt 3 ] || action=$1
# to fairseq and Moses a model of both is one of German
case $target in
de) language=de scores=(--compound-split) ;;
fr) language=fr scores=() ;;
both) language=de scores=() ;;
*) action=usage ;;
esac

case $action in
prepare)
    raw=$2
    if [ "$target" = both ]; then
        raw=${3%/}.joined
        mkdir -p "$raw"
        for part in train val test_2016_flickr; do
            sed 's/^/<2de> /' "$2/$part.en" >"$raw/$part.en"
            sed 's/^/<2fr> /' "$2/$part.en" >>"$raw/$part.en"
            cat "$2/$part.de" "$2/$part.fr" >"$raw/$part.de"
        done
    fi
    PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.prepare.translation \
        --source-lang en --target-lang "$language" --train "$raw/train" --valid "$raw/val" \
        --test "$raw/test_2016_flickr" --bpe-size 8000 --output "$3"
    ;;
train | train-plain)
    data=$2 checkpoints=$3
    model=(--arch weighted_transformer --optimizer adam_with_branch_weights
        --freeze-branch-weights-after 1200)
    [ "$action" = train ] || model=(--arch transformer --optimizer adam)
    # fairseq does not make the folder of --log-file
    mkdir -p "$checkpoints"
    fairseq-train "$data/bin" --user-dir "$plugin" --task translation \
        --source-lang en --target-lang "$language" "${model[@]}" --share-all-embeddings \
        --encoder-layers 3 --encoder-embed-dim 256 --encoder-ffn-embed-dim 1024 \
        --decoder-layers 3 --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024 \
        --encoder-attention-heads 4 --decoder-attention-heads 4 --dropout 0.2 \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
        --adam-betas '(0.9, 0.98)' --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 600 \
        --max-tokens 3000 --required-batch-size-multiple 1 --max-update 1400 \
        --validate-interval-updates 100 \
        --no-epoch-checkpoints --log-format json --log-interval 50 \
        --log-file "$checkpoints/train.log" --seed 1 --save-dir "$checkpoints" "${@:4}"
    ;;
evaluate)
    data=$2 checkpoints=$3
    PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.evaluate.translation "$data/bin" \
        --path "$checkpoints/checkpoint_last.pt" --source-lang en --target-lang "$language" \
        "${scores[@]}" --beam 4 --lenpen 0.6 --output "$checkpoints/learned" "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
