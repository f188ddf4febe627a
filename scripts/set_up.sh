#!/usr/bin/env bash
# Builds .venv as requirements/development.txt says, where it is missing or does not fit.
set -euo pipefail
cd -P "${BASH_SOURCE[0]%/*}/.."
python=$1 pins=requirements/development.txt log=.venv/set_up.log stamp=.venv/set_up.stamp job=
unset PYTHONPATH PYTHONHOME CUDA_HOME # with CUDA_HOME, fairseq would compile CUDA kernels

stop() { printf '%s\n' "$1" >&2 && exit "${2:-1}"; }
# uv ends, and ninja ends its compilers; a second later, so does what is left.
trap 'trap "" INT TERM HUP
    { kill -INT -- "-$job" && sleep 1; kill -KILL -- "-$job"; wait "$job"; } 2> /dev/null || true
    echo >&2 && stop "interrupted; the same command goes on from here" 130' INT TERM HUP

step() { # TITLE DURATION COMMAND...: a process group of its own holds all that the command starts
    echo "$1: about $2"
    set -m && { "${@:3}" > "$log" 2>&1 < /dev/null & } && job=$! && set +m
    wait "$job" && return
    ! grep -qE 'No (matching|solution)|Max retries|Failed to (fetch|download `)' "$log" ||
        stop "The packages of '$1' could not be downloaded: check the network connection and pip's \
settings (index, certificates, proxy), then run the same command again (log: $log)."
    stop "'$1' failed; the last lines of $log:"$'\n'"$(tail -n 15 "$log")"
}

facts=$("$python" -c 'import os, sys, sysconfig
print("%d.%d %s" % (sys.version_info[:2] + (sysconfig.get_config_var("SOABI"),)))
print(os.path.realpath(sys.executable)) # not that of .venv, which may be about to go
print(sysconfig.get_paths()["include"])' 2> /dev/null) || facts="'$python'"
{ read -r version abi; read -r python; read -r include; } <<< "$facts" || true
[[ $version == 3.1[0-3] ]] || stop "Python 3.10 to 3.13 is needed and $version is not one of them: \
install one and name it, for example \`make test PYTHON=python3.11\`."

# One set-up at a time. Commands inherit the lock: should this script be killed, the next one waits.
exec 9>> "$pins"
flock -n 9 || { echo "Another set-up of this .venv is running; waiting for it to end." && flock 9; }
# The scripts in .venv/bin hold its path; the ABI tag tells Python's version and the architecture.
identity=$PWD$'\n'$abi$'\n'$(< "$pins")$'\n'$(< scripts/set_up.sh)
! { [ "$(cat "$stamp")" = "$identity" ] && .venv/bin/python -c ''; } 2> /dev/null || exit 0

{ command -v cc gcc && command -v c++ g++; } > /dev/null || stop "A C and a C++ compiler are \
needed and not both on PATH (cc or gcc, c++ or g++): install them (Debian/Ubuntu: apt install g++)."
[ -f "$include/Python.h" ] || stop "Python's headers are needed and $include/Python.h is missing: \
install them (Debian/Ubuntu: apt install python$version-dev)."
"$python" -c 'import ensurepip, venv' 2> /dev/null || stop "Python's modules venv and ensurepip \
are needed and one is missing: install them (Debian/Ubuntu: apt install python$version-venv)."

# An unfinished .venv is not to be trusted; what it had got done is in uv's cache. The stamp goes
# first, lest half a .venv pass for a whole one; of a link, only the link goes.
{ [ -L .venv ] || rm -f "$stamp"; } && rm -rf .venv && mkdir .venv
step "[1/4] .venv" "5 seconds" "$python" -m venv .venv
step "[2/4] uv" "5 seconds" .venv/bin/python -m pip install "$(grep -o '^uv==[^ ]*' "$pins")"

# uv does not read pip's settings: they become its variables, where those are not set.
pip=$(.venv/bin/python -m pip config list | sed "s/^:env:/z/; s/\\\\n/ /g" | sort)
said() { sed -nE "s/^(global|install|z)\.(default-)?$1='(.*)'/\3/p" <<< "$pip" | tail -n1 | xargs; }
for names in index-url:UV_INDEX_URL extra-index-url:UV_EXTRA_INDEX_URL find-links:UV_FIND_LINKS \
    cert:SSL_CERT_FILE trusted-host:UV_INSECURE_HOST proxy:ALL_PROXY timeout:UV_HTTP_TIMEOUT; do
    value=$(said "${names%:*}") variable=${names#*:}
    [ "$variable" != UV_FIND_LINKS ] || value=${value// /,}
    [ -z "$value" ] || [ -n "${!variable-}" ] || export "$variable=$value"
done
# Certificates as pip has them: the file that is named, or the system's.
[ -z "${REQUESTS_CA_BUNDLE-}" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$REQUESTS_CA_BUNDLE}"
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
export UV_LOCK_TIMEOUT="${UV_LOCK_TIMEOUT:-3600}" # of a clone that waits for another's build
uv=(.venv/bin/uv pip install --python .venv/bin/python --index-strategy unsafe-best-match) # as pip
[[ ! $(said no-index) =~ ^(1|true|yes|on)$ ]] || uv+=(--no-index)
# The cache first: behind a mirror that forbids caching, uv would compile fairseq for every clone.
install() { "${uv[@]}" --offline "$@" || "${uv[@]}" "$@"; }
# torch comes with what its wheel names: on Linux CUDA's libraries, but for a build for the CPU.
step "[3/4] torch" "1 minute, more with CUDA's libraries; seconds from uv's cache" \
    install --constraint "$pins" torch Cython ninja numpy setuptools wheel
# Half of the time goes into three extensions that our models do not call. They alone have no -O of
# their own. (Setuptools' parallel builds fail: with ninja, extensions share one build.ninja.)
export CFLAGS="${CFLAGS--O0}"
# fairseq has to fit that torch: compiled here, and kept in a cache of this Python and this build of
# torch, whose version.py tells it from another of the same number.
torch=$({ find .venv/lib -name 'torch-*.dist-info'
    find .venv/lib -path '*/torch/version.py' -exec cat {} +; } | cksum)
step "[4/4] fairseq and the other packages" "3 minutes; seconds from uv's cache" install \
    --no-deps --no-build-isolation --no-binary fairseq-fixed --requirements "$pins" \
    --cache-dir "$(.venv/bin/uv cache dir)/$abi-torch-${torch%% *}"
# `import fairseq_plugins` from any folder
site=(.venv/lib/python*/site-packages) && echo "$PWD" > "${site[0]}/fairseq_plugins.pth"
printf '%s' "$identity" > "$stamp"
echo "Set up .venv in $((SECONDS / 60)) min $((SECONDS % 60)) s."
