#!/usr/bin/env bash
# Recipes of product-key memory (Lample et al. 2019, arXiv:1907.05242). Without arguments they are
# listed.
. "$(dirname "$0")/../recipes.sh"

list() {
    cat <<'END'
name                      symbols  parameters  _1_memory  _2_memories  _3_memories  GiB
12l_1024d                 60,000   213M        476M       740M         1,003M       4.0, 7.4, 10.8, 14.2
16l_1024d                 60,000   264M        527M       790M         1,053M       4.9, 8.3, 11.7, 15.1
24l_1024d                 60,000   364M        627M       891M         1,154M       6.8, 10.2, 13.6, 17.0
12l_1600d                 60,000   466M        869M       1,272M       1,676M       8.7, 13.8, 19.0, 24.2
16l_1600d                 60,000   589M        992M       1,395M       1,798M       11.0, 16.1, 21.3, 26.5
24l_1600d                 60,000   835M        1,238M     1,641M       2,044M       15.5, 20.7, 25.9, 31.0

name                      symbols  parameters  GiB        what
ablation_size_none        60,000   138M        2.6        table 2, without a memory: as with 16k slots
ablation_size_SLOTS       60,000               2.7-16.5   table 2; 1M: perplexity 19.8, --memory-query-batch-norm 18.0
ablation_position_LAYER   60,000               6.0        table 3, layers 1 to 6; 1: 21.5, the worst; 5: the best
ablation_heads_HEADS_KNN  60,000               6.0        figure 5, 1_64, 2_32, 4_16, 8_8: about 20.5; 4_8, 4_64, 1_32, 8_32
ablation_keys_SLOTS_KEYS  60,000               2.7-16.5   table 4, figure 6; KEYS: product, or flat (16k: 0.6 GiB more)
english_none              8,100    2.26M                  SOURCE: any text
english_16k               8,100    4.49M                  the same with 16,384 slots
english_262k              8,100    36.3M                  the same with 262,144 slots
python_none               8,000    2.25M                  source text of 25 packages of PyPI, each token once
python_12l                8,000    3.44M                  the same with twelve layers
python_SLOTS              8,000    10.9M                  the same with a memory, 65k: batch-normalised queries
facts_memory              340      1.16M                  16,384 slots, 2 heads of 16, queries batch-normalised; SOURCE: 16384
facts_memory_no_norm      340      1.16M                  the same, queries as they are
facts_feed_forward        340      0.22M                  sublayers of 640, which take as long as the memory
facts_wide                340      1.18M                  sublayers of 4,352, as many parameters as the memory

N_memories: N memories of 512x512 slots in place of feed-forward sublayers, at regular intervals.
  We do not have the perplexities of the paper's table 1; those of its ablations are above.
SLOTS: 16k, 65k, 147k, 262k, 590k or 1M. Ablations: 6 layers, 8 heads, 262k slots in layer 5, and
  batch norm of the queries but for size. Flat keys above 147k are too slow to be trained to the end.
SOURCE: for 12l_1024d to ablation_*, articles (see scripts.prepare.text); for english_*, a folder
  with train.txt, valid.txt and test.txt, a paragraph a line, an empty line between articles; for
  facts_*, the number of facts: 16 times a square number.
GiB (computed, fp16): weights, gradients and the optimizers' state, the same on each GPU. With N
  GPUs add --update-freq 32/N.
Flags come from the paper and the published code. They do not give these, which we chose: batch (256
  blocks of 512 tokens), warm-up, clipping, updates, dropout, activation, width of the ablations.
english_* reads the text twice; --bf16 is faster if the CPU has bf16 units. For twice the layers,
  add --decoder-layers 12 --decoder-normalize-before to english_none. evaluate needs the
  --tokens-per-sample of train.
facts_*: each training runs for 0.08 hours on a CPU; more facts or a slower machine need a larger
  --stop-time-hours. Every 100 updates all facts are scored; results go to CHECKPOINTS/train.log.
END
}

recipe() {
    task=(--task language_modeling)
    local adam=(--optimizer adam_with_memory --adam-betas '(0.9, 0.98)' --clip-norm 1
        --lr-scheduler inverse_sqrt --required-batch-size-multiple 1 --no-epoch-checkpoints)
    local published=("${adam[@]}" --memory-query-dim 512 --lr 0.00025 --memory-lr 0.001
        --warmup-updates 4000 --fp16 --fp16-no-flatten-grads --ddp-backend legacy_ddp
        --batch-size 8 --update-freq 32 --max-update 250000
        --save-interval-updates 5000 --keep-interval-updates 1)
    local small=(--distributed-world-size 1 --seed 1 --dropout 0 --warmup-init-lr 1e-7
        --log-format json --log-interval 50)
    local norm=(--memory-query-batch-norm) ablation=(--arch pkm_transformer_lm_ablation)
    local inner=256 layers=2 passes=2 rate memory_rate depth=(--decoder-layers 6)

    case $name in
    english_* | python_* | facts_*) log=1 ;;
    *)
        preparation=(text --unit subwords --moses en --bpe-size 60000) source=--input
        task+=(--tokens-per-sample 512)
        evaluation=(--batch-size 8 --required-batch-size-multiple 1)
        ;;
    esac
    if [[ $name =~ ^((12|16|24)l_(1024|1600)d)(_(1)_memory|_([23])_memories)?$ ]]; then
        local memories=${BASH_REMATCH[5]}${BASH_REMATCH[6]} places='' i
        # memory i of m is in layer i * ceil(layers / (m + 1))
        local every=$(((BASH_REMATCH[2] + memories) / (memories + 1)))
        for ((i = 1; i <= memories; i++)); do places+=${places:+,}$((i * every)); done
        training=(--arch "pkm_transformer_lm_${BASH_REMATCH[1]}" --memory-layers "$places"
            "${norm[@]}" "${published[@]}")
        return
    fi
    case $name in
    ablation_size_none)
        training=("${ablation[@]}" --memory-layers '' --memory-slots 262144 "${published[@]}")
        ;;
    ablation_size_*)
        slots_of "${name##*_}" || return 1
        training=("${ablation[@]}" --memory-layers 5 --memory-slots "$slots" "${published[@]}")
        ;;
    ablation_position_[1-6])
        training=("${ablation[@]}" --memory-layers "${name##*_}" "${norm[@]}" "${published[@]}")
        ;;
    ablation_heads_*_*)
        local numbers=${name#ablation_heads_}
        [[ $numbers =~ ^[1-9][0-9]*_[1-9][0-9]*$ ]] || return 1
        training=("${ablation[@]}" --memory-heads "${numbers%_*}" --memory-knn "${numbers#*_}"
            "${norm[@]}" "${published[@]}")
        ;;
    ablation_keys_*_product | ablation_keys_*_flat)
        local numbers=${name#ablation_keys_}
        slots_of "${numbers%_*}" || return 1
        training=("${ablation[@]}" --memory-slots "$slots" --memory-keys "${numbers#*_}"
            "${norm[@]}" "${published[@]}")
        ;;
    english_none | english_16k | english_262k | python_*)
        preparation=(text --unit subwords --moses en --bpe-size 8000) source=--input
        task+=(--tokens-per-sample 256)
        layers='' slots=16384 rate=0.004 memory_rate=0.004
        [[ $name == english_* ]] || {
            preparation=(python_source --subwords 8000
                --packages "$(dirname "$0")/python_packages.txt") source=''
            adam+=("${norm[@]}" --validate-interval-updates 500 --save-interval-updates 500
                --keep-interval-updates 1) passes=1 rate=0.008 memory_rate=0.016
            depth+=(--decoder-normalize-before)
        }
        case ${name#*_} in
        none) ;;
        12l) depth=(--decoder-layers 12 --decoder-normalize-before) rate=0.004 ;;
        *) slots_of "${name#*_}" && layers=5 || return 1 ;;
        esac
        training=(--arch pkm_transformer_lm "${depth[@]}" --decoder-embed-dim 128
            --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
            --share-decoder-input-output-embed --memory-layers "$layers" --memory-slots "$slots"
            "${adam[@]}" --lr $rate --memory-lr $memory_rate --warmup-updates 200
            --batch-size 16 --max-epoch "$passes" "${small[@]}")
        evaluation=(--batch-size 16 --required-batch-size-multiple 1)
        ;;
    facts_*)
        case ${name#facts_} in
        memory) ;;
        memory_no_norm) norm=() ;;
        feed_forward) layers='' inner=640 ;;
        wide) layers='' inner=4352 ;;
        *) return 1 ;;
        esac
        preparation=(facts) source=--facts
        training=(--sample-break-mode complete --tokens-per-sample 5 --batch-size 1024
            --num-workers 0 --arch pkm_transformer_lm --decoder-layers 2 --decoder-embed-dim 64
            --decoder-ffn-embed-dim "$inner" --decoder-attention-heads 4
            --share-decoder-input-output-embed --memory-layers "$layers" --memory-slots 16384
            --memory-query-dim 64 --memory-heads 2 --memory-knn 16 "${norm[@]}"
            "${adam[@]}" --lr 0.005 --memory-lr 0.02 --warmup-updates 100
            --stop-time-hours 0.08 --max-update 1000000
            --validate-interval-updates 100 --validate-interval 1000000
            --save-interval 1000000 --save-interval-updates 1000000 "${small[@]}" --cpu)
        ;;
    *) return 1 ;;
    esac
}

# Set slots to the number that a name such as 16k stands for.
slots_of() {
    case $1 in
    16k) slots=16384 ;;
    65k) slots=65536 ;;
    147k) slots=147456 ;;
    262k) slots=262144 ;;
    590k) slots=589824 ;;
    1M) slots=1048576 ;;
    *) return 1 ;;
    esac
}

main "$@"
