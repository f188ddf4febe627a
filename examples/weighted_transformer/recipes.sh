#!/usr/bin/env bash
# Recipes of the Weighted Transformer (Ahmed et al. 2017, arXiv:1711.02132). Without arguments they
# are listed.
. "$(dirname "$0")/../recipes.sh"

list() {
    cat <<'END'
name                symbols  parameters        _plain  published            plain       row        GiB
wmt14_en_de_2l      37,000   34M (paper 36M)   34M     BLEU 24.8            23.7        (C)        0.5
wmt14_en_de_4l      37,000   48M (paper 50M)   48M     26.2                 25.3        N = 4      0.7
wmt14_en_de_base    37,000   63M (paper 65M)   63M     26.5, 28.4           25.8, 27.3  (A)        0.9
wmt14_en_de_8l      37,000   78M (paper 80M)   78M     25.6                 25.5        N = 8      1.2
wmt14_en_de_big     37,000   214M (paper 213M) 214M    27.2, 28.9           26.4, 28.4  (B)        3.2
wmt14_en_fr_base    32,000   61M               61M     38.9                 38.1        (A)        0.9
wmt14_en_fr_big     32,000   209M              209M    41.4                 41.0        (B)        3.1
table3              37,000   34M                       24.8, 21.1, 23.4                 table 3    0.5
gating_K            37,000                             worse by far                     4.5        0.5
multi30k_en_de      7,927    7.6M              7.6M                                     SOURCE: Multi30k
multi30k_en_fr      7,927    7.6M              7.6M                                     the same
multi30k_en_de_fr   7,927    7.6M              7.6M                                     both in one model

NAME_plain trains fairseq's plain transformer as the paper does: 100,000 updates (big 300,000), with
  8 layers a dropout of 0.1, everything else the same.
Published: BLEU of newstest2013 (French: 2014), then 2014. evaluate translates 2013 (test1) and 2014
  (test) with the last checkpoint, into CHECKPOINTS/test1 and test. Its options are those of
  scripts.evaluate.translation.
table3 trains like wmt14_en_de_2l, and you can use its checkpoints. evaluate translates with the
  learned branch weights, with random weights and with 1/M, into CHECKPOINTS/learned, random and
  uniform. Random weights are drawn uniformly from the simplex; "-- --seed 2" at the end draws others.
gating_K is wmt14_en_de_2l where only the K of 8 branches with the largest weights contribute.
SOURCE: a folder with train, val and test_2016_flickr, each with .en and .de or .fr. en_de_fr: English
  sentences begin with <2de> or <2fr>; the joined texts are in DATA.joined. evaluate writes into
  CHECKPOINTS/learned; with --branch-weights random or uniform, give another --output.
Flags are the paper's. We chose the BPE merges, beam, length penalty and the dropout for French
  (Vaswani et al. 2017 used 0.1 in the large model).
Batch: up to 25,000 tokens of the longer side; with N GPUs add --update-freq 8/N. --fp16 needs
  --fp16-no-flatten-grads. GiB (computed, fp32): weights, gradients and Adam's state.
Branch weights are frozen for the last 10,000 updates: with another --max-update, give another
  --freeze-branch-weights-after.
END
}

recipe() {
    local model=$name target=de
    [[ $name != wmt14_* && $name != multi30k_* ]] || model=${name%_plain}
    local adam=(--adam-betas '(0.9, 0.98)' --lr-scheduler inverse_sqrt)
    [[ $name != *_fr && $name != *_fr_* ]] || target=fr
    log=1 outputs=(test1 test)
    training=(--criterion label_smoothed_cross_entropy --label-smoothing 0.1 "${adam[@]}"
        --required-batch-size-multiple 1 --no-epoch-checkpoints --log-format json)
    case $model in
    multi30k_en_de | multi30k_en_fr | multi30k_en_de_fr) small "${model#multi30k_}" ;;
    wmt14_en_de_2l | wmt14_en_de_4l | wmt14_en_de_8l) published "${model#*_de_}" 0.1 ;;
    wmt14_en_de_base | wmt14_en_fr_base) published base 0.1 ;;
    wmt14_en_de_big | wmt14_en_fr_big) published big 0.3 ;;
    table3)
        published 2l 0.1
        outputs=(learned random uniform)
        ;;
    gating_[1-8])
        published 2l 0.1
        weighted+=(--branch-top-k "${name#gating_}")
        ;;
    *) return 1 ;;
    esac
    task=(--task translation --source-lang en --target-lang $target)
    evaluation=(--source-lang en --target-lang $target --beam 4 --lenpen 0.6)
    [[ $target == fr || $name == *_de_fr* ]] || evaluation+=(--compound-split)
    if [ "$name" = "$model" ]; then
        training+=("${weighted[@]}" --optimizer adam_with_branch_weights)
    else
        training+=("${plain[@]}" --optimizer adam)
    fi
}

# Models of WMT14: their size, and the dropout of the plain transformer.
published() {
    local rate=0.000698771 first_rate=1.74693e-7 updates=60000 plain_updates=100000
    local arch=transformer_wmt_en_de merges=37000
    [ $target = de ] || merges=32000
    [ "$1" != big ] || {
        rate=0.000494106 first_rate=1.23526e-7 updates=250000 plain_updates=300000
        arch=transformer_vaswani_wmt_en_de_big
    }
    preparation=(wmt14 --pair en-$target --bpe-size $merges)
    training+=(--adam-eps 1e-9 --lr $rate --warmup-updates 4000 --warmup-init-lr $first_rate
        --max-tokens 3125 --update-freq 8 --save-interval-updates 1000 --keep-interval-updates 1)
    weighted=(--arch "weighted_transformer_wmt_$1" --max-update $updates
        --freeze-branch-weights-after $((updates - 10000)))
    plain=(--arch $arch --dropout "$2" --attention-dropout "$2" --share-all-embeddings
        --max-update $plain_updates)
    [[ $1 != [248]l ]] || plain+=(--encoder-layers "${1%l}" --decoder-layers "${1%l}")
}

# Models for a CPU: their languages.
small() {
    outputs=(learned) source=--train
    # to fairseq and Moses a model of both languages is one of German
    [ "$1" = en_fr ] || target=de
    preparation=(translation --source-lang en --target-lang $target --bpe-size 8000)
    training+=(--share-all-embeddings --encoder-layers 3 --encoder-embed-dim 256
        --encoder-ffn-embed-dim 1024 --encoder-attention-heads 4 --decoder-layers 3
        --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024 --decoder-attention-heads 4
        --dropout 0.2 --lr 0.002 --warmup-updates 600 --max-tokens 3000 --max-update 1400
        --validate-interval-updates 100 --log-interval 50 --seed 1)
    weighted=(--arch weighted_transformer --freeze-branch-weights-after 1200)
    plain=(--arch transformer)
}

prepare() {
    case $name in
    multi30k_en_de_fr*)
        run bash -c 'mkdir -p "$2" && for part in train val test_2016_flickr; do
    { sed "s/^/<2de> /" "$1/$part.en"; sed "s/^/<2fr> /" "$1/$part.en"; } >"$2/$part.en" &&
        cat "$1/$part.de" "$1/$part.fr" >"$2/$part.de" || exit 1
done' join "$text" "${data%/}.joined"
        text=${data%/}.joined
        ;;
    esac
    case $name in
    multi30k_*)
        preparation+=(--valid "$text/val" --test "$text/test_2016_flickr")
        text=$text/train
        ;;
    esac
    scripts_prepare
}

evaluate() {
    local output chosen
    for output in "${outputs[@]}"; do
        chosen=(--split "$output")
        [ "$name" != table3 ] || chosen=(--split test1 --branch-weights "$output")
        [[ $name != multi30k_* ]] || chosen=(--split test)
        run "${python[@]}" -m scripts.evaluate.translation "$data/bin" \
            --path "$checkpoints/checkpoint_last.pt" "${evaluation[@]}" "${chosen[@]}" \
            --output "$checkpoints/$output" "${more[@]}"
    done
}

main "$@"
