#!/usr/bin/env bash
# Gating in the Weighted Transformer (section 4.5): of each branched attention only the K heads with
# the largest κ contribute, and of each feed-forward network the K slices with the largest α, in
# training as well. With another --branch-residual it is the K branches with the largest α.
# Published: worse by a large margin, without figures. Not run here.
#
#   python -m scripts.prepare.wmt14 --pair en-de --bpe-size 37000 --output DATA
#   bash examples/weighted_transformer/gating.sh train DATA CHECKPOINTS K [options]
#   bash examples/weighted_transformer/gating.sh evaluate DATA CHECKPOINTS [options]
#
# K is from 1 to the number of branches, 8, which is the ungated model.
# The rest is that of wmt14_en_de_2l.sh: the paper does not say which configuration it was. It
#   varied the number of branches M too: --encoder-attention-heads M --decoder-attention-heads M.
# The weight of what does not contribute gets no gradient. Adam's momentum and the projection may
#   bring it back.
set -euo pipefail
recipe=$(dirname "$0")/wmt14_en_de_2l.sh
action=usage data=${2:-} checkpoints=${3:-} k=${4:-}
[ $# -lt 3 ] || action=$1
[ "$action" != train ] || [[ $k =~ ^[1-9][0-9]*$ ]] || action=usage

case $action in
train)
    exec bash "$recipe" train "$data" "$checkpoints" --branch-top-k "$k" "${@:5}"
    ;;
evaluate)
    exec bash "$recipe" "$@"
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
