#!/usr/bin/env bash
# Runs tests with another fairseq than the pinned one:
# bash scripts/test_with_fairseq.sh 'REQUIREMENT ...' [options of pytest]
set -euo pipefail
cd -P "${BASH_SOURCE[0]%/*}/.."

# An environment whose packages, installed without what they need, come before those of .venv.
other=.venv/other
site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
.venv/bin/python -m venv --clear "$other"
# shellcheck disable=SC2086 # several requirements
.venv/bin/python -m pip --python "$other" install --no-deps --no-build-isolation $1
site_packages .venv > "$(site_packages "$other")/pinned.pth"
"$other/bin/python" -c 'import fairseq; print(fairseq.__version__, fairseq.__file__)'
exec "$other/bin/python" -m pytest "${@:2}"
