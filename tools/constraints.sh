#!/usr/bin/env bash
# Writes constraints.txt: the newest versions that pyproject.toml allows, for every Python and platform at once,
# and from it deploy/requirements-worker.txt, and the same with HEIC.
#
#   tools/constraints.sh          # keeps what is pinned, adds and drops what pyproject.toml asks for
#   tools/constraints.sh --upgrade
set -euo pipefail
cd "$(dirname "$0")/.."

uv=$(command -v uv || echo .venv/bin/uv)
compile=("$uv" pip compile --quiet --python-version 3.11 --no-header --no-annotate)

# write FILE WHAT UV_ARGS...: compiles into FILE, with WHAT and how it is made at its head.
write() {
    local file=$1 what=$2
    shift 2
    local made
    made=$(mktemp)
    if [[ -f $file ]]; then
        cp "$file" "$made"
    fi
    "${compile[@]}" "$@" --output-file "$made" >/dev/null
    printf '# %s\n# Made by tools/constraints.sh; edit pyproject.toml instead.\n' "$what" | cat - "$made" >"$file"
    rm "$made"
}

write constraints.txt "The versions that imageshards with all its extras is installed at, on Python 3.11 to 3.13." \
    pyproject.toml --universal --extra all --extra tpu "$@"

# Apache Beam and what it brings are in the image that workers start from.
# write_worker FILE EXTRA...: what a worker needs besides Beam, with these extras.
write_worker() {
    local file=$1 needs
    shift
    needs=$(mktemp --suffix=.in)
    "${PYTHON:-python3}" - "$@" >"$needs" <<'PYTHON'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
needs = sum((extras[name] for name in sys.argv[1:]), project["dependencies"])
print(*(need for need in needs if not need.startswith("apache-beam")), sep="\n")
PYTHON
    write "$file" "What a Beam worker needs besides Apache Beam, at the versions of constraints.txt." \
        "$needs" --constraint constraints.txt --python-platform x86_64-manylinux_2_28
    rm "$needs"
}
write_worker deploy/requirements-worker.txt pipeline
write_worker deploy/requirements-worker-heic.txt pipeline heic
