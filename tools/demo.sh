#!/usr/bin/env bash
# The complete product once, on drawn pictures: images -> shards -> checks -> a trained model -> predictions, all below build/demo.
set -euo pipefail
cd "$(dirname "$0")/.."

demo=build/demo
dataset=$demo/datasets/sample/1.0.0

# step WHAT COMMAND...: says what comes, shows the command as a user would type it, runs it.
step() {
    printf '\n== %s\n$' "$1"
    shift
    printf ' %s' "$@"
    printf '\n'
    "$@"
}

rm -rf "$demo"
mkdir -p "$demo"
PATH="$PWD/.venv/bin:$PATH"

step "600 pictures of five shapes, and three files that no decoder reads" \
    python -m beam_pipeline.sample_data "$demo/images"
step "pictures -> TFRecord shards, four fifths of them to train on" \
    imageshards write --input "$demo/images" --output "$demo/datasets" --name sample \
    --splits train=0.8,validation=0.2 --image_size 96 --num_shards train=4,validation=1
step "is every byte, record and picture as it should be?" \
    imageshards verify "$dataset"
step "what is in it" \
    imageshards info "$dataset"
step "what do the stored pictures look like?" \
    imageshards show "$dataset" --out "$demo/pictures.png"
step "which files got no record, and why?" \
    imageshards rejects "$dataset"
step "a small network learns the shapes" \
    imageshards train "$dataset" --out "$demo/model"
step "what does it get wrong?" \
    imageshards evaluate "$demo/model" "$dataset"
step "three new pictures" \
    python -m beam_pipeline.sample_data "$demo/new" --images 3 --classes 3 --seed 7 --broken 0
step "what are they?" \
    imageshards predict "$demo/model" "$demo/new" | tee "$demo/predictions.txt"
recognized=$(grep -cE '/([a-z]+)_[0-9]+\.[a-zA-Z]+: \1 ' "$demo/predictions.txt" || true)
[ "$recognized" -eq 3 ] || { echo "error: $recognized of 3 new pictures were recognized" >&2; exit 1; }

cat <<END

== Where everything is
$demo/images    the pictures and $(find "$demo/images" -name 'broken_*' | wc -l) broken files
$dataset    the shards with indexes and metadata; rejects.jsonl names the broken files
$demo/pictures.png    some of its pictures with their labels
$demo/model    the trained model, its metrics, and in evaluation/ its mistakes
END
