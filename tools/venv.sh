#!/usr/bin/env bash
# Makes .venv and installs this package, editable, with the given extras at the versions of constraints.txt.
#
#   tools/venv.sh pipeline,reader,test
#
# uv does the installing, ten times as fast as pip: the one on the PATH, else one that pip puts into .venv, else pip.
set -euo pipefail
cd "$(dirname "$0")/.."

# As pip does. Where PYTHONDONTWRITEBYTECODE is set, each import of TensorFlow takes 7 s more else.
export UV_COMPILE_BYTECODE=1

extras=${1:?extras, separated by commas}
venv_python=.venv/bin/python

if ! "$venv_python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    python=$(tools/find_python.sh)
    echo "making .venv with $("$python" --version)"
    rm -rf .venv
    if command -v uv >/dev/null; then
        uv venv --quiet --seed --python "$python" .venv
    elif ! "$python" -m venv .venv 2>/dev/null; then
        rm -rf .venv
        echo "error: $python can't make virtual environments; install its venv module (Debian: apt-get install python3-venv) or uv" >&2
        exit 2
    fi
fi

if ! command -v uv >/dev/null && ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    "$venv_python" -m ensurepip >/dev/null # an environment that uv made has no pip
fi
if command -v uv >/dev/null; then
    install=(uv pip install --quiet --python "$venv_python")
elif [[ -x .venv/bin/uv ]] || "$venv_python" -m pip install --quiet --disable-pip-version-check 'uv<1' 2>/dev/null; then
    install=(.venv/bin/uv pip install --quiet --python "$venv_python")
else
    echo "no uv to be had: pip installs instead, which takes some minutes"
    install=("$venv_python" -m pip install --quiet --disable-pip-version-check)
fi
rm -f beam_pipeline/images/*.so # the install compiles it again; one of an older source would be worse than none
echo "installing imageshards[$extras] into .venv"
"${install[@]}" --editable ".[$extras]" --constraint constraints.txt
.venv/bin/imageshards --version
