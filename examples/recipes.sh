# What the recipes of all papers share. examples/PAPER/recipes.sh reads this file, has a function
# `list` that prints the table of its recipes, and a function `recipe` that sets for the recipe $name
#   preparation   module of scripts.prepare and its options; `source`: the option that takes SOURCE
#   task          options of training and evaluation
#   training      options of fairseq-train; `first`: of train alone; `last`: of finish alone
#   evaluation    options of fairseq-eval-lm; `scored`: the checkpoint that it reads
#   log           not empty: train writes CHECKPOINTS/train.log
#   averaged      how many checkpoints finish averages
# An action that a paper does in another way is a function of its file.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
plugin=$root/fairseq_plugins python=(env "PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}" python)
[ "$root" != "$PWD" ] || plugin=fairseq_plugins python=(python)
preparation=() source='' task=() training=() first=() last=() evaluation=()
scored=checkpoint_best.pt log='' averaged=''

# Run a command; with PRINT=1 print it instead, quoted, in lines of about 100 characters.
run() {
    [ -n "${PRINT:-}" ] || {
        "$@"
        return
    }
    local word piece='' line=''
    for word in "$@" --; do # the added word ends the last piece
        if [[ $word == --* ]]; then
            if [ -n "$line" ] && [ $((${#line} + ${#piece})) -gt 97 ]; then
                printf '%s \\\n' "$line"
                line='   '
            fi
            line+=${line:+ }$piece piece=''
        fi
        [[ $word =~ ^[-[:alnum:]_./:=,+@%]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        piece+=${piece:+ }$word
    done
    printf '%s\n' "$line"
}

fail() {
    printf '%s\n' "$2" >&2
    exit "$1"
}

scripts_prepare() {
    run "${python[@]}" -m "scripts.prepare.${preparation[0]}" "${preparation[@]:1}" \
        ${source:+"$source" "$text"} --output "$data" "${more[@]}"
}

prepare() {
    scripts_prepare
}

fairseq_train() {
    [ -z "$log" ] || {
        run mkdir -p "$checkpoints" # fairseq does not make the folder of --log-file
        training+=(--log-file "$checkpoints/train.log")
    }
    run fairseq-train "$data/bin" --user-dir "$plugin" "${task[@]}" "${training[@]}" "$@" \
        --save-dir "$checkpoints" "${more[@]}"
}

train() {
    fairseq_train "${first[@]}"
}

finish() {
    [ -n "${PRINT:-}" ] || [ -e "$checkpoints/checkpoint_last.pt" ] ||
        fail 1 "there is no checkpoint_last.pt in $checkpoints to go on from: train first"
    fairseq_train "${last[@]}"
    [ -z "$averaged" ] || run "${python[@]}" -m scripts.convert.average "$checkpoints" \
        --last "$averaged" --output "$checkpoints/checkpoint_average.pt"
}

evaluate() {
    run fairseq-eval-lm "$data/bin" --user-dir "$plugin" "${task[@]}" \
        --distributed-world-size 1 --path "$checkpoints/$scored" --gen-subset test \
        "${evaluation[@]}" "${more[@]}"
}

usage() {
    cat <<END
bash examples/$paper/recipes.sh NAME prepare DATA [SOURCE] [options of scripts.prepare]
bash examples/$paper/recipes.sh NAME train DATA CHECKPOINTS [options of fairseq-train]
bash examples/$paper/recipes.sh NAME finish DATA CHECKPOINTS [options of fairseq-train]
bash examples/$paper/recipes.sh NAME evaluate DATA CHECKPOINTS [options of evaluation]

PRINT=1 before it prints the commands and runs nothing. Options given here win.

END
    list
}

main() {
    paper=$(basename "$(dirname "$0")")
    [ $# -gt 0 ] || {
        usage
        exit
    }
    name=$1 action=${2:-} data=${3:-} checkpoints=${4:-} text=${4:-}
    local here="bash examples/$paper/recipes.sh"
    recipe || fail 2 "there is no recipe $name: \"$here\" lists them"
    case $action in
    prepare)
        [ ${#preparation[@]} -gt 0 ] || action=''
        if [ -n "$source" ]; then more=("${@:5}"); else more=("${@:4}") text=none; fi
        [ -n "$data" ] && [ -n "$text" ] || fail 2 "give $here $name prepare DATA ${source:+SOURCE}"
        ;;
    train | finish | evaluate)
        more=("${@:5}")
        [ "$action" != finish ] || [ ${#last[@]} -gt 0 ] || action=''
        [ "$action" != evaluate ] || [ ${#evaluation[@]} -gt 0 ] || action=''
        [ -n "$checkpoints" ] || fail 2 "give $here $name $2 DATA CHECKPOINTS"
        ;;
    *) action='' ;;
    esac
    [ -n "$action" ] || fail 2 "$name has no action ${2:-}: \"$here\" lists what there is"
    "$action"
}
