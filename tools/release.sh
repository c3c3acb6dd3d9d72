#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/, checks them, and tries these very files in empty environments, away from the
# checkout: write, verify, show, report, read, train; from the sdist write. Uploads nothing: the last line says how.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

version=$(python -c 'import beam_pipeline; print(beam_pipeline.__version__)')
if [[ -n $(git status --porcelain) ]]; then
    echo "error: there are changes that aren't committed: commit or stash them, so that the release is a commit" >&2
    exit 1
fi
rm -rf dist
tools/wheel.sh
twine check --strict dist/*
sdist=(dist/*.tar.gz)
if [[ ${sdist[*]} != "dist/imageshards-$version.tar.gz" ]]; then
    echo "error: ${sdist[*]} isn't version $version" >&2
    exit 1
fi
python -m tools.extras dist/*.whl pipeline,reader,tensorflow,train
python -m tools.extras "${sdist[0]}" pipeline

if ! grep -q "^## $version (20[0-9-]*)$" CHANGELOG.md; then
    echo "not yet: CHANGELOG.md has no line '## $version (YYYY-MM-DD)'; set the date, commit, and run this again" >&2
    exit 1
fi
echo "ready, and nothing is uploaded: git tag v$version && twine upload dist/*"
