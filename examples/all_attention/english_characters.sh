#!/usr/bin/env bash
# Small character models of any English text: persistent vectors or feed-forward sublayers,
# adaptive or fixed spans. Two CPU cores are enough.
#
#   bash examples/all_attention/english_characters.sh prepare TEXT DATA
#   bash examples/all_attention/english_characters.sh train DATA CHECKPOINTS [options]
#   bash examples/all_attention/english_characters.sh train-fixed DATA CHECKPOINTS [options]
#   bash examples/all_attention/english_characters.sh evaluate DATA CHECKPOINTS [options]
#
# TEXT holds train.txt, valid.txt and test.txt.
# train: each head learns its span, up to 256 tokens. train-fixed: all heads see 256.
# The default is the all-attention network, 6 layers with 256 persistent vectors. Others, as in the
#   paper's figure 2, are options:
# --persistent-variant attn-split, single-head or head-split (half of the persistent vectors)
# --persistent-vectors 0
# --decoder-layers 4 --persistent-vectors 0 --decoder-ffn-embed-dim 512: the transformer, with as
#   many parameters
# --decoder-layers 4 --persistent-vectors 384 --persistent-variant ff-attn: with fewer, as in the
#   paper
# Every 250 updates 102,400 characters of the validation part are scored, into
#   CHECKPOINTS/train.log.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
task=(--user-dir "$plugin" --task segment_language_modeling --distributed-world-size 1)
action=usage
[ $# -lt 3 ] || action=$1

case $action in
prepare)
    bash "$(dirname "$0")/../transformer_xl/english_characters.sh" prepare "$2" "$3"
    ;;
train | train-fixed)
    data=$2 checkpoints=$3
    span=(--adaptive-span --criterion span_cross_entropy --span-loss 1e-5)
    [ "$action" = train ] || span=(--criterion cross_entropy)
    # fairseq does not make the folder of --log-file, and validates one batch more than it is told
    mkdir -p "$checkpoints"
    fairseq-train "$data/bin" "${task[@]}" --arch all_attention_lm \
        --decoder-layers 6 --decoder-embed-dim 128 --decoder-attention-heads 4 --output-bias \
        --persistent-vectors 256 --attention-span 256 "${span[@]}" \
        --tokens-per-sample 64 --batch-size 16 --batch-size-valid 64 \
        --optimizer adam --clip-norm 0.25 --lr 0.002 --lr-scheduler cosine --warmup-updates 200 \
        --max-update 5000 --validate-interval-updates 250 --max-valid-steps 24 \
        --save-interval-updates 250 --keep-interval-updates 1 \
        --log-format json --log-interval 50 --log-file "$checkpoints/train.log" \
        --seed 1 --save-dir "$checkpoints" --no-epoch-checkpoints "${@:4}"
    ;;
evaluate)
    data=$2 checkpoints=$3
    fairseq-eval-lm "$data/bin" "${task[@]}" --path "$checkpoints/checkpoint_best.pt" \
        --gen-subset test --tokens-per-sample 64 --batch-size 8 "${@:4}"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
