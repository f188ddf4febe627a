#!/usr/bin/env bash
# Recipes of Transformer-XL (Dai et al. 2019, arXiv:1901.02860). Without arguments they are listed.
. "$(dirname "$0")/../recipes.sh"

list() {
    cat <<'END'
name                symbols  parameters         published       GiB               source
enwik8_base         205      41M                1.06 bits       0.6 + 22 x 0.55   pytorch/run_enwik8_base.sh
enwik8_18l          205      88M                1.03            1.3 + 22 x 1.0    not public; our widths, flags of enwik8_base
enwik8_large        205      277M               0.99            4.1 + 64 x 3.0    tf/scripts/enwik8_large_tpu.sh, tf/sota
text8_base          28       41M                none            0.6 + 22 x 0.55   pytorch/run_text8_base.sh
text8_large         28       277M               1.08 bits       4.1 + 64 x 3.0    tf/scripts/text8_large_tpu.sh, tf/sota
wt103_base          267,735  151M               perplexity 24.0 2.3 + 60 x 0.15   pytorch/run_wt103_base.sh
wt103_large         267,735  285M (paper 257M)  18.3            4.2 + 128 x 1.2   tf/scripts/wt103_large_tpu.sh, tf/sota
wt103_ablation      267,735  128M               26.77           1.9 + 60 x 0.06   not public; our 7 layers, flags of wt103_base
lm1b_base           793,471  358M               none            5.3 + 224 x 0.05  pytorch/run_lm1b_base.sh
lm1b_20l            793,471  469M (paper 460M)  23.5            7.0 + 224 x 0.06  not public; sizes by the author, flags of lm1b_base
lm1b_large          793,471  838M (paper 800M)  21.8            12.5 + 512 x 0.14 tf/scripts/lm1b_large_tpu.sh, tf/sota
lm1b_ablation       793,471  301M (paper 300M)  25.2            4.5 + 224 x 0.05  not public; our inner size, flags of lm1b_base
ptb                 10,000   24M                54.5                              the author's; finish
english_characters  100      0.9M                                                 SOURCE: any text
english_words       38,333   1.6M                                                 SOURCE: any text
english_ptb         10,000   2.1M                                                 SOURCE: any text; finish

Sources are files of kimiyoung/transformer-xl; details.md sets their flags beside these.
GiB (computed, fp32): weights, gradients and Adam's state + streams x activations. --batch-split,
  --checkpoint-activations and --bf16 take less. With N GPUs divide --batch-size by N. Do not use
  --update-freq instead: it puts consecutive segments into one update.
SOURCE: a folder with train.txt, valid.txt and test.txt. english_words needs more than 8,000 words
  that occur 3 times, or smaller cutoffs; english_ptb needs as many words as Penn Treebank has
  (887,521, 70,390 and 78,669). Both run on a CPU. To train without recurrence, add --mem-len 0.
Differences from the sources:
- We read and score every token. The sources drop the tokens that do not fill all streams
  (TensorFlow: that do not fill a segment).
- lm1b: fairseq's cosine starts after the warm-up, the source's with it. Sentences are shuffled over
  all shards. We validate on heldout-00001; the source validates and tests on heldout-00000.
  lm1b_large: one </s> separates sentences. The source has two <S> and scores the second, which
  lowers its figure.
- *_large: an epoch is one pass from the beginning; the source's is ten passes from random places
  (lm1b: four shuffled passes). Layer norms add 1e-5, the source's 1e-12. We clip the whole
  gradient, the source clips parts. With same_length a token sees as many tokens as the memory has,
  in the source one more. We score the checkpoint with the lowest validation loss, the source the
  one with the lowest test loss.
- ptb: variational dropout and averaging, as in the paper's text. The author's run also had segments
  of random lengths, AWD-LSTM's penalties and a softmax temperature. Weight decay is not part of the
  gradient. train runs 125 epochs of 1,328 segments. finish continues to 175 at the last learning
  rate and averages the weights at the ends of those 50 epochs (15 GB). The constant rate and the
  choice of weights are our reading.
END
}

recipe() {
    task=(--task segment_language_modeling)
    local saving=(--keep-interval-updates 1 --validate-interval 1000000 --no-epoch-checkpoints)
    local adam=(--optimizer adam --clip-norm 0.25 --lr-scheduler cosine)
    local pytorch=("${adam[@]}" "${saving[@]}" --lr 0.00025 --save-interval-updates 4000
        --batch-size-valid 10)
    local tensorflow=("${adam[@]}" "${saving[@]}" --initial-values tensorflow --zero-memory
        --warmup-init-lr 0 --save-interval-updates 10000)
    local rate=(--lr 0.00025 --min-lr 0.0000025)
    local words=(--criterion segment_loss --ddp-backend legacy_ddp)
    local lm1b=(--tokens-per-sample 32 --shuffle-sentences "${words[@]}")
    local small=(--optimizer adam --clip-norm 0.25 --seed 1 --no-epoch-checkpoints
        --distributed-world-size 1)
    local short=("${small[@]}" --lr 0.002 --lr-scheduler cosine --warmup-updates 200
        --batch-size-valid 64)

    case $name in
    enwik8_*) preparation=(enwik8 --newlines drop) ;;
    wt103_*) preparation=(wikitext103) ;;
    english_*) source=--input ;;
    *) preparation=("${name%%_*}") ;;
    esac
    case $name in
    enwik8_base | enwik8_18l | text8_base)
        training=("${pytorch[@]}" --tokens-per-sample 512 --batch-size 22 --max-update 400000)
        evaluation=(--tokens-per-sample 80 --batch-size 10
            --model-overrides "{'mem_len': 2100, 'clamp_len': 820, 'same_length': True}")
        ;;
    enwik8_large | text8_large)
        training=("${tensorflow[@]}" "${rate[@]}" --tokens-per-sample 768 --batch-size 64
            --warmup-updates 4000 --max-update 400000
            --batch-size-valid 16)
        evaluation=(--tokens-per-sample 128 --batch-size 16
            --model-overrides "{'mem_len': 3800, 'clamp_len': 1000, 'same_length': True}")
        ;;
    wt103_base)
        training=("${pytorch[@]}" "${words[@]}" --tokens-per-sample 150 --batch-size 60
            --max-update 200000)
        evaluation=(--tokens-per-sample 64 --batch-size 10
            --model-overrides "{'mem_len': 640, 'clamp_len': 400, 'same_length': True}")
        ;;
    wt103_ablation)
        training=("${pytorch[@]}" "${words[@]}" --tokens-per-sample 128 --batch-size 60
            --max-update 200000)
        evaluation=(--tokens-per-sample 64 --batch-size 10
            --model-overrides "{'mem_len': 500, 'same_length': True}")
        ;;
    wt103_large)
        training=("${tensorflow[@]}" "${rate[@]}" "${words[@]}" --untie-r --init-std 0.005
            --tokens-per-sample 384 --batch-size 128 --warmup-updates 16000 --max-update 4000000
            --batch-size-valid 8)
        evaluation=(--tokens-per-sample 128 --batch-size 16
            --model-overrides "{'mem_len': 1600, 'clamp_len': 1000, 'same_length': True}")
        ;;
    lm1b_base | lm1b_20l | lm1b_ablation)
        local updates=500000
        [ "$name" != lm1b_ablation ] || updates=400000
        training=("${pytorch[@]}" "${lm1b[@]}" --batch-size 224 --warmup-updates 20000
            --max-update $updates)
        evaluation=(--tokens-per-sample 32 --batch-size 64
            --model-overrides "{'mem_len': 128, 'same_length': True}")
        ;;
    lm1b_large)
        training=("${tensorflow[@]}" "${lm1b[@]}" --untie-r --no-adaptive-head-proj
            --init-std 0.005 --batch-size 512 --lr 0.0001 --min-lr 0.000001
            --warmup-updates 30000 --max-update 1200000 --batch-size-valid 8)
        evaluation=(--tokens-per-sample 32 --batch-size 16
            --model-overrides "{'mem_len': 128, 'same_length': True}")
        ;;
    ptb)
        training=(--tokens-per-sample 70 --extended-context 70 --batch-size 10
            --optimizer adam --weight-decay 1.2e-6 --clip-norm 0.25)
        first=(--lr 0.0003 --min-lr 0.0001 --lr-scheduler cosine --warmup-updates 3000
            --max-epoch 125 --max-update 166000 --no-epoch-checkpoints)
        last=(--lr 0.0001 --lr-scheduler fixed --max-epoch 175 --keep-last-epochs 50)
        averaged=50 scored=checkpoint_average.pt
        evaluation=(--tokens-per-sample 10 --extended-context 130 --batch-size 1)
        ;;
    english_characters)
        preparation=(text --unit characters)
        training=(--arch transformer_xl_tiny "${short[@]}" --tokens-per-sample 64 --batch-size 16
            --max-update 4000)
        evaluation=(--tokens-per-sample 64 --batch-size 1)
        ;;
    english_words)
        preparation=(text --unit words --threshold 3)
        training=(--arch transformer_xl "${short[@]}" --decoder-layers 4 --decoder-embed-dim 128
            --decoder-attention-heads 4 --decoder-ffn-embed-dim 512
            --dropout 0.1 --embed-dropout 0.1 --output-dropout 0.1
            --adaptive-input --adaptive-input-cutoff 2000,8000 --adaptive-softmax-cutoff 2000,8000
            --tie-adaptive-weights --tie-adaptive-proj --output-bias "${words[@]}"
            --tokens-per-sample 32 --batch-size 32 --max-update 6000)
        evaluation=(--tokens-per-sample 32 --batch-size 1)
        ;;
    english_ptb)
        preparation=(own)
        training=(--arch transformer_xl "${small[@]}" --decoder-layers 4 --decoder-embed-dim 128
            --decoder-attention-heads 4 --decoder-ffn-embed-dim 512
            --positions sinusoidal-absolute --share-decoder-input-output-embed --output-bias
            --locked-dropout --word-dropout 0.1 --embed-dropout 0.2 --dropout 0.1
            --activation-dropout 0.1 --output-dropout 0.2 --weight-decay 1.2e-6
            --tokens-per-sample 70 --extended-context 70 --batch-size 10)
        # with a learning rate of 0.002 the model learns how frequent words are, and no more
        first=(--lr 0.001 --min-lr 0.00025 --lr-scheduler cosine --warmup-updates 200
            --max-epoch 3 --max-update 4120)
        last=(--lr 0.00025 --lr-scheduler fixed --max-epoch 5 --save-interval-updates 250
            --keep-interval-updates 10 --disable-validation)
        averaged=10 scored=checkpoint_last.pt
        evaluation=(--tokens-per-sample 70 --extended-context 70 --batch-size 8)
        ;;
    *) return 1 ;;
    esac
    [[ $name == english_* ]] || training=(--arch "transformer_xl_$name" "${training[@]}")
}

prepare() {
    local written=${data%/}.text
    case $name in
    english_words) # punctuation marks are words
        run bash -euc 'export LC_ALL=C.UTF-8
mkdir -p "$2"
for part in train valid test; do
    sed -E "s/([^[:alnum:][:space:]])/ \1 /g" "$1/$part.txt" >"$2/$part.txt"
done' words "$text" "$written"
        text=$written
        ;;
    english_ptb) # as many words, in lower case, without punctuation; numbers are N
        run bash -euc 'export LC_ALL=C.UTF-8
mkdir -p "$2"
for part in train:887521 valid:70390 test:78669; do
    sed -E "s/.*/\L&/; s/[^[:alnum:][:space:]'"'.,"']+/ /g
        s/[0-9]+([.,][0-9]+)*/N/g; s/[.,]/ /g" "$1/${part%:*}.txt" |
        awk -v most="${part#*:}" "(words += NF) <= most && NF" >"$2/${part%:*}.txt"
done' words "$text" "$written"
        run fairseq-preprocess --only-source --trainpref "$written/train.txt" \
            --validpref "$written/valid.txt" --testpref "$written/test.txt" \
            --nwordssrc 9998 --destdir "${data%/}.partial/bin" --padding-factor 1 --workers 1 \
            "${more[@]}"
        run mv -T "${data%/}.partial" "$data"
        return
        ;;
    esac
    scripts_prepare
}

main "$@"
