#!/usr/bin/env bash
# Prints the Python to build the environment with: $PYTHON where it is set, else the first of python3, python3.13,
# python3.12, python3.11 that is 3.11 to 3.13 (TensorFlow has no wheels for others) and runs.
set -euo pipefail

suits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

if [[ -n ${PYTHON:-} ]]; then
    if ! command -v "$PYTHON" >/dev/null || ! "$PYTHON" -c "$suits" 2>/dev/null; then
        echo "error: PYTHON=$PYTHON is no Python of 3.11 to 3.13; name one that is, or leave PYTHON unset" >&2
        exit 2
    fi
    command -v "$PYTHON"
    exit
fi
for candidate in python3 python3.13 python3.12 python3.11; do
    # Each is run, not only looked up: pyenv leaves shims of versions that aren't chosen.
    if "$candidate" -c "$suits" 2>/dev/null; then
        command -v "$candidate"
        exit
    fi
done
echo "error: no Python of 3.11 to 3.13 on the PATH; install one (Debian: apt-get install python3.11-venv) or run make with PYTHON=/path/to/python3" >&2
exit 2
