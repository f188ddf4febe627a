#!/usr/bin/env bash
# Weighted Transformer (A), or small, on WMT14 English-French.
# 6 layers, width 512, 8 branches, 61M parameters. Not run here.
# Published BLEU: 38.9 on newstest2014, where the plain transformer has 38.1.
#
#   python -m scripts.prepare.wmt14 --pair en-fr --bpe-size 32000 --output DATA
#   bash examples/weighted_transformer/wmt14_en_fr_base.sh train DATA CHECKPOINTS [options]
#   bash examples/weighted_transformer/wmt14_en_fr_base.sh train-plain DATA CHECKPOINTS [options]
#   bash examples/weighted_transformer/wmt14_en_fr_base.sh evaluate DATA CHECKPOINTS [options]
#
# Flags: the paper's; merges of BPE, beam and length penalty are our choice.
# Batch: up to 25,000 tokens of the longer side (--max-tokens 3125, --update-freq 8); with N GPUs
#   add --update-freq 8/N.
# κ and α stay as they are in the last 10,000 of 60,000 updates: with another --max-update add
#   another --freeze-branch-weights-after.
# train-plain: the paper's plain transformer, fairseq's, with 100,000 updates and all else the same.
# Options of train are fairseq's (--fp16 needs --fp16-no-flatten-grads), those of evaluate are
#   scripts.evaluate.translation's.
# evaluate translates newstest2013 (the part test1) and newstest2014 (test) with the last
#   checkpoint, as published, into CHECKPOINTS/test1 and test.
# Memory (computed, fp32): 0.9 GiB for weights, gradients and Adam's state; activations come on
#   top.
set -euo pipefail
plugin=$(dirname "$0")/../../fairseq_plugins
training=(
    --user-dir "$plugin" --task translation --source-lang en --target-lang fr
    --adam-betas '(0.9, 0.98)' --adam-eps 1e-9
    --lr 0.000698771 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1.74693e-7
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --max-tokens 3125 --update-freq 8 --required-batch-size-multiple 1
    --save-interval-updates 1000 --keep-interval-updates 1 --no-epoch-checkpoints
    --log-format json
)
model=(
    --arch weighted_transformer_wmt_base --optimizer adam_with_branch_weights
    --max-update 60000 --freeze-branch-weights-after 50000
)
plain=(
    --arch transformer_wmt_en_de
    --dropout 0.1 --attention-dropout 0.1 --share-all-embeddings
    --optimizer adam --max-update 100000
)
action=usage data=${2:-} checkpoints=${3:-}
[ $# -lt 3 ] || action=$1

case $action in
train | train-plain)
    [ "$action" = train ] || model=("${plain[@]}")
    # fairseq does not make the folder of --log-file
    mkdir -p "$checkpoints"
    fairseq-train "$data/bin" "${training[@]}" "${model[@]}" \
        --log-file "$checkpoints/train.log" --save-dir "$checkpoints" "${@:4}"
    ;;
evaluate)
    for part in test1 test; do
        PYTHONPATH="$(dirname "$0")/../..:${PYTHONPATH-}" python -m scripts.evaluate.translation "$data/bin" \
            --path "$checkpoints/checkpoint_last.pt" --source-lang en --target-lang fr \
            --split "$part" --beam 4 --lenpen 0.6 \
            --output "$checkpoints/$part" "${@:4}"
    done
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
