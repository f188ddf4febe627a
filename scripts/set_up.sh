#!/usr/bin/env bash
# Builds .venv through uv, with exactly the versions of requirements/development.txt, where it is
# missing, unfinished or outdated. Usage: bash scripts/set_up.sh PYTHON
set -euo pipefail
cd -P "${BASH_SOURCE[0]%/*}/.."
pins=requirements/development.txt
log=.venv/set_up.log
stamp=.venv/set_up.stamp
# These would mix in other packages, or CUDA: with CUDA_HOME, fairseq compiles CUDA kernels, which
# takes nvcc of torch's CUDA version.
unset PYTHONPATH PYTHONHOME CUDA_HOME

job=

stop() {
    printf '%s\n' "$1" >&2
    exit 1
}

interrupted() {
    trap '' INT TERM HUP
    # uv ends, and ninja ends its compilers; a second later, so does what is left.
    { kill -INT -- "-$job" && sleep 1 && kill -KILL -- "-$job"; } 2> /dev/null
    printf '\ninterrupted; the same command goes on from here\n' >&2
    exit 130
}
trap interrupted INT TERM HUP

# Runs a command with its output in the log: step TITLE DURATION COMMAND...
step() {
    echo "$1: about $2"
    # In a process group of its own, all that the command starts can be ended with it.
    set -m
    "${@:3}" >> "$log" 2>&1 < /dev/null &
    job=$!
    set +m
    wait "$job" && return
    # pip warns of each connection that it tries again, perhaps with success.
    if grep -v '^WARNING' "$log" | grep -E 'No matching distribution|Max retries exceeded|timed out|'\
'Request failed after|No solution found|Failed to fetch|Failed to download `' > /dev/null; then
        stop "Packages of '$1' can't be had: check the network connection and pip's settings (index, \
certificates, proxy), then run the same command again (what was said: $log)."
    fi
    stop "'$1' failed; the last lines of $log:"$'\n'"$(tail -n 15 "$log")"
}

# What Python this is. The one to build with is never .venv's own, which is about to be removed.
facts=$("$1" -c '
import os, sys, sysconfig
in_venv = sys.prefix != getattr(sys, "base_prefix", sys.prefix)
print("%d.%d" % sys.version_info[:2])
print(os.path.realpath(sys.executable) if in_venv else sys.executable)
print(sysconfig.get_config_var("SOABI"))
print(sysconfig.get_paths()["include"])') || stop "Python 3.10 to 3.13 is needed and '$1' does not \
start: install one of those and name it, for example \`make test PYTHON=python3.11\`."
{ read -r version && read -r python && read -r abi && read -r include; } <<< "$facts"
[[ $version == 3.1[0-3] ]] || stop "Python 3.10 to 3.13 is needed and this is Python $version: \
install one of those and name it, for example \`make test PYTHON=python3.11\`."

# One set-up at a time. Commands inherit the lock: should this script be killed, the next one waits.
exec 9>> "$pins"
lock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]) * fcntl.LOCK_NB)'
if ! "$python" -c "$lock" 1 2> /dev/null; then
    echo "Another set-up of this .venv is running; waiting for it to end."
    "$python" -c "$lock" 0 2> /dev/null
fi

# The scripts in .venv/bin hold its path; the ABI tag tells Python's version and the architecture.
identity=$PWD$'\n'$abi$'\n'$(< "$pins")$'\n'$(< scripts/set_up.sh)
if [ -f "$stamp" ] && [ "$(< "$stamp")" = "$identity" ] && .venv/bin/python -c '' 2> /dev/null; then
    exit
fi

for compiler in 'C cc gcc' 'C++ c++ g++'; do
    read -r language one other <<< "$compiler"
    command -v "$one" "$other" > /dev/null || stop "A $language compiler is needed and neither $one \
nor $other is on PATH: install one (Debian/Ubuntu: apt install g++; macOS: xcode-select --install)."
done
[ -f "$include/Python.h" ] || stop "Python's headers are needed and $include/Python.h is not there: \
install them (Debian/Ubuntu: apt install python$version-dev)."
"$python" -c 'import ensurepip, venv' 2> /dev/null || stop "Python's modules venv and ensurepip are \
needed and one is missing: install them (Debian/Ubuntu: apt install python$version-venv)."

# What an interrupted set-up has left is not to be trusted; uv's cache keeps what it had got done.
if [ -e .venv ] || [ -L .venv ]; then
    echo "Removing the unfinished or outdated .venv."
    # The stamp first: half a .venv must not pass for a whole one. Of a link, only the link.
    [ -L .venv ] || rm -f "$stamp"
    rm -rf .venv
fi
mkdir .venv
SECONDS=0
step "[1/4] .venv" "5 seconds" "$python" -m venv .venv
step "[2/4] uv" "5 seconds" .venv/bin/python -m pip install --disable-pip-version-check --no-input \
    --progress-bar off --retries 2 --constraint "$pins" uv

# uv does not read pip's settings: they become its variables, where the user has not set these.
# (Where uv has two names, the older: UV_INDEX_URL gives way to the user's UV_DEFAULT_INDEX.)
settings=$(.venv/bin/python -m pip config list |
    sed "s/^:env:/last/; s/\\\\n/ /g; s#\([ ']\)~/#\1$HOME/#g" | sort)
pip_option() {
    sed -nE "s/^(global|install|last)\.$1='(.*)'$/\2/p" <<< "$settings" | tail -n 1
}
hand_on() { # OPTION VARIABLE SEPARATOR
    local words
    read -ra words <<< "$(pip_option "$1")"
    [ ${#words[@]} = 0 ] || [ -n "${!2:-}" ] || export "$2=$(IFS=$3 && echo "${words[*]}")"
}
hand_on index-url UV_INDEX_URL ' '
hand_on extra-index-url UV_EXTRA_INDEX_URL ' '
hand_on find-links UV_FIND_LINKS ,
hand_on trusted-host UV_INSECURE_HOST ' '
hand_on cert SSL_CERT_FILE ' '
hand_on proxy ALL_PROXY ' '
hand_on timeout UV_HTTP_TIMEOUT ' '
hand_on default-timeout UV_HTTP_TIMEOUT ' '
export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # pip looks into all indexes, too
uv=(.venv/bin/uv pip install --python .venv/bin/python --no-progress)
[[ ! $(pip_option no-index) =~ ^(1|true|yes|on)$ ]] || uv+=(--no-index)

# torch comes with what it needs: on Linux, the CUDA libraries that its wheel names, if any.
step "[3/4] torch" "1 minute, more where CUDA libraries are downloaded; seconds from uv's cache" \
    "${uv[@]}" --constraint "$pins" torch Cython ninja numpy setuptools wheel
# fairseq has to fit that torch: no ready-made wheel will do, nor a build in uv's cache that was
# made against another one. uv looks a build up by its settings, here torch's version.
torch=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')
step "[4/4] fairseq and fastBPE, compiled here, and the ready-made packages" \
    "3 minutes; seconds from uv's cache" "${uv[@]}" --no-deps --requirements "$pins" \
    --no-build-isolation --no-binary fairseq-fixed --config-settings-package "fairseq-fixed:torch=$torch"
printf '%s' "$identity" > "$stamp"
echo "Set up .venv in $((SECONDS / 60)) min $((SECONDS % 60)) s."
