#!/usr/bin/env bash
# Recipes of the all-attention network (Sukhbaatar et al. 2019, arXiv:1907.01470) and of adaptive
# spans (arXiv:1905.07799). Without arguments they are listed.
. "$(dirname "$0")/../recipes.sh"

list() {
    cat <<'END'
name                        symbols  parameters         published  GiB                    source
enwik8_small                205      39M                1.01 bits  0.4 + 64 x 0.6 (1.0)   enwik8_pers_small.sh; finish
enwik8_large                205      114M               0.98       1.3 + 64 x 2.1 (2.9)   enwik8_pers.sh; finish
text8_small                 28       38M                1.11       0.4 + 64 x 0.6 (1.0)   none for text8: enwik8_pers_small.sh; finish
text8_large                 28       114M               1.08       1.3 + 64 x 2.1 (2.9)   none for text8: enwik8_pers.sh; finish
wt103                       267,735  132M (paper 133M)  20.6       2.0 + 64 x 1.2 (1.7)   wiki103_pers.sh; finish
adaptive_span_enwik8_8l     205      6M                 1.3 bits   0.1 + 64 x 0.03 (0.09) enwik8_small.sh, for one GPU
adaptive_span_enwik8_small  205      39M                1.02       0.4 + 64 x 0.3 (0.6)   enwik8.sh
adaptive_span_enwik8_large  205      209M               0.98       2.3 + 64 x 0.9 (1.6)   enwik8_large.sh; finish
adaptive_span_text8_small   28       38M                1.11       0.4 + 64 x 0.3 (0.6)   text8.sh
adaptive_span_text8_large   28       209M               1.07       2.3 + 64 x 0.9 (1.6)   text8_large.sh; finish
english_characters          100      0.8M                                                 SOURCE: any text
english_characters_fixed    100      0.8M                                                 SOURCE: any text; all heads see 256 characters

Sources are files in experiments/ of facebookresearch/adaptive-span; details.md sets their flags
  beside these. finish: 10,000 to 50,000 updates more at a tenth of the learning rate. The
  published figure of wt103 leaves line ends out (19.7 with them); evaluate prints both.
GiB (computed, fp32): weights, gradients and the optimizer's state + streams x activations at the
  start (where every head sees 1,024 tokens). --batch-split, --checkpoint-activations and --bf16
  take less. With N GPUs add --batch-size 64/N. Do not use --update-freq instead: it puts
  consecutive segments into one update.
SOURCE: a folder with train.txt, valid.txt and test.txt. Options of english_characters:
  --persistent-variant attn-split, single-head or head-split; --persistent-vectors 0;
  --decoder-layers 4 --persistent-vectors 0 --decoder-ffn-embed-dim 512, the transformer with as
  many parameters; --decoder-layers 4 --persistent-vectors 384 --persistent-variant ff-attn.
  Every 250 updates, 102,400 characters are validated; results go to CHECKPOINTS/train.log.
Differences from the sources: a pass over the data starts at its beginning, not at a random token of
  the first segment. A stream starts without context; in the source it attends to zeros. We score
  every token, the source whole segments only. Embeddings of wt103 start with variance 1 after
  scaling, the source's with 170. enwik8_large ends after 210,000 updates as its script does (its
  comment and the paper say 220,000).
END
}

recipe() {
    task=(--task segment_language_modeling)
    local segment=512 penalty=5e-7 rate=0.07 warmup=32000 updates='' all=''
    case $name in
    enwik8_small | text8_small) penalty=1e-7 updates=450000 all=480000 ;;
    enwik8_large | text8_large) penalty=1e-7 updates=200000 all=210000 ;;
    wt103) segment=256 rate=0.00025 warmup=8000 updates=800000 all=850000 ;;
    adaptive_span_enwik8_8l) segment=256 penalty=2e-6 warmup=8000 updates=150000 ;;
    adaptive_span_enwik8_small) updates=600000 ;;
    adaptive_span_enwik8_large) updates=150000 all=170000 ;;
    adaptive_span_text8_small) updates=900000 ;;
    adaptive_span_text8_large) updates=250000 all=270000 ;;
    english_characters) small --adaptive-span --criterion segment_loss --span-loss 1e-5 ;;
    english_characters_fixed) small --criterion cross_entropy ;;
    *) return 1 ;;
    esac
    [[ $name != english_* ]] || return 0

    local preset=all_attention_lm_$name
    [[ $name != adaptive_span_* ]] || preset=adaptive_span_lm_${name#adaptive_span_}
    training=(--arch "$preset" --tokens-per-sample $segment --batch-size 64
        --criterion segment_loss --span-loss $penalty
        --lr-scheduler fixed --warmup-updates $warmup
        --save-interval-updates 4000 --keep-interval-updates 1 --no-epoch-checkpoints)
    case $name in
    wt103)
        preparation=(wikitext103)
        training+=(--ddp-backend legacy_ddp --optimizer adam --clip-norm 1)
        ;;
    *)
        preparation=(text8)
        [[ $name != *enwik8* ]] || preparation=(enwik8 --newlines eos)
        training+=(--optimizer adagrad_with_clip --adagrad-clip 0.03 --clip-norm 0)
        ;;
    esac
    first=(--lr $rate --max-update $updates)
    # a tenth of the learning rate
    [ -z "$all" ] || last=(--lr "${rate/0./0.0}" --max-update "$all")
    scored=checkpoint_last.pt # as the published scripts do
    evaluation=(--tokens-per-sample $segment --batch-size 8)
}

# A model for a CPU, with these options of its spans.
small() {
    preparation=(text --unit characters) source=--input log=1
    # fairseq validates one batch more than --max-valid-steps
    training=(--arch all_attention_lm --decoder-layers 6 --decoder-embed-dim 128
        --decoder-attention-heads 4 --output-bias --persistent-vectors 256 --attention-span 256
        "$@" --tokens-per-sample 64 --batch-size 16 --batch-size-valid 64
        --optimizer adam --clip-norm 0.25 --lr 0.002 --lr-scheduler cosine --warmup-updates 200
        --max-update 5000 --validate-interval-updates 250 --max-valid-steps 24
        --save-interval-updates 250 --keep-interval-updates 1 --no-epoch-checkpoints
        --log-format json --log-interval 50 --seed 1 --distributed-world-size 1)
    evaluation=(--tokens-per-sample 64 --batch-size 8)
}

main "$@"
