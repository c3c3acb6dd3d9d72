#!/usr/bin/env bash
# Makes environments of other libraries; nothing of this package is in them.
#
#   benchmarks/peers_env.sh          # build/peers/.venv: the readers of benchmarks/peers_read.py and docs/howto/moving.md
#   benchmarks/peers_env.sh write    # build/peers/write/.venv: img2dataset, for benchmarks/write_peers.py
#
# FFCV is compiled against Debian's OpenCV and libjpeg-turbo, which root installs here. What can't be installed is
# named in build/peers/missing.txt, and in the benchmark's table.
set -euo pipefail
cd "$(dirname "$0")/.."

export UV_COMPILE_BYTECODE=1
uv=$(command -v uv || echo .venv/bin/uv)

if [[ ${1:-} == write ]]; then # whose versions contradict the readers'
    venv=build/peers/write/.venv
    [[ -x $venv/bin/python ]] || "$uv" venv --quiet --python .venv/bin/python "$venv"
    exec "$uv" pip install --quiet --python "$venv/bin/python" --requirement benchmarks/peers_write.txt
fi

venv=build/peers/.venv
missing=build/peers/missing.txt
mkdir -p build/peers
: >"$missing"
[[ -x $venv/bin/python ]] || "$uv" venv --quiet --python .venv/bin/python "$venv"
install=("$uv" pip install --quiet --python "$venv/bin/python" --constraint benchmarks/peers.txt)

peer() { # name, packages and options
    local name=$1 said
    shift
    echo "installing $name"
    said=$("${install[@]}" "$@" 2>&1) || echo "$name: $(tail -n 1 <<<"$said")" >>"$missing"
}

if ! pkg-config --exists opencv4 libturbojpeg 2>/dev/null && [[ $(id -u) == 0 ]]; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends \
        g++ libopencv-dev libturbojpeg0-dev pkg-config >/dev/null || echo "no OpenCV from apt: FFCV won't build"
fi

"${install[@]}" torch torchvision numpy pillow psutil simplejpeg setuptools wheel
peer webdataset webdataset
peer tfrecord tfrecord
peer streaming mosaicml-streaming
peer grain grain array-record
peer ffcv numba opencv-python
peer ffcv --no-build-isolation ffcv
cat "$missing"
