"""Other ways from class folders to shards of 224-pixel JPEGs of quality 90, each as a user would write it.

    python benchmarks/writers.py NAME IMAGES OUTPUT     # NAME is a function of this file

`write_peers.py` runs them. Where a library leaves decoding to its user, that is Pillow as this package uses it.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "NO_ALBUMENTATIONS_UPDATE": "1"}

SIZE, QUALITY, SHARDS, WORKERS = 224, 90, 8, 2


def paths(images: str) -> list[str]:
    """All files, sorted."""
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(images) for name in names)


def convert(path: str) -> bytes:
    """Decoded, resized and encoded by Pillow, with its cheap reductions before the filter."""
    from PIL import Image

    out = io.BytesIO()
    with Image.open(path) as image:
        image.draft("RGB", (2 * SIZE, 2 * SIZE))
        pixels = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    pixels.save(out, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return out.getvalue()


def example(encoded: bytes, label: str) -> bytes:
    """A serialized `tf.train.Example`."""
    import tensorflow as tf

    def feature(value: bytes) -> Any:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    features = {"image": feature(encoded), "label": feature(label.encode())}
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def label(path: str) -> str:
    """The class folder's name."""
    return os.path.basename(os.path.dirname(path))


def bare(images: str, output: str) -> None:
    """The codec of this package in two threads; nothing is written."""
    import write

    list(write.bare(images)())


def tutorial(images: str, output: str) -> None:
    """TensorFlow's tutorial: one loop around `tf.io`. Its resize has no antialiasing (which takes 0.6 × CPU more)."""
    import tensorflow as tf

    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(f"{output}/photos.tfrecord-{shard:05d}-of-{SHARDS:05d}") as writer:
            for path in paths(images)[shard::SHARDS]:
                pixels = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), (SIZE, SIZE))
                encoded = tf.io.encode_jpeg(tf.cast(pixels, tf.uint8), quality=QUALITY)
                writer.write(example(encoded.numpy(), label(path)))


def _beam_options() -> Any:
    from apache_beam.options.pipeline_options import PipelineOptions

    # Its workers are threads. More CPU and no faster: --direct_running_mode=multi_threading or multi_processing.
    return PipelineOptions(["--runner=FnApiRunner", f"--direct_num_workers={WORKERS}"])


def write_to_tfrecord(images: str, output: str) -> None:
    """Decode in a ParDo, `WriteToTFRecord` after it, on Beam's runner in memory with threads."""
    import apache_beam as beam

    with beam.Pipeline(options=_beam_options()) as pipeline:
        (
            pipeline
            | beam.Create(paths(images))
            | beam.Reshuffle()
            | beam.Map(lambda path: example(convert(path), label(path)))
            | beam.io.WriteToTFRecord(f"{output}/photos", file_name_suffix=".tfrecord", num_shards=SHARDS)
        )


def _tfds(images: str, output: str, is_beam: bool) -> None:
    import tensorflow_datasets as tfds

    files = paths(images)

    def generate(path: str) -> tuple[str, dict[str, Any]]:
        return os.path.relpath(path, images), {"image": io.BytesIO(convert(path)), "label": label(path)}

    class Photos(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
        """A user's builder."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            image = tfds.features.Image(shape=(SIZE, SIZE, 3), encoding_format="jpeg")
            classes = tfds.features.ClassLabel(names=sorted({label(path) for path in files}))
            features = tfds.features.FeaturesDict({"image": image, "label": classes})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            if not is_beam:
                return map(generate, files)
            import apache_beam as beam

            return beam.Create(files) | beam.Reshuffle() | beam.Map(generate)

    config = tfds.download.DownloadConfig(num_shards=SHARDS, try_download_gcs=False)
    if is_beam:
        config = config.replace(beam_options=_beam_options())
    Photos(data_dir=output).download_and_prepare(download_config=config)


def tfds_generator(images: str, output: str) -> None:
    """A `GeneratorBasedBuilder`."""
    _tfds(images, output, is_beam=False)


def tfds_beam(images: str, output: str) -> None:
    """The same with a Beam pipeline."""
    _tfds(images, output, is_beam=True)


def _img2dataset(images: str, output: str, form: str) -> None:
    import img2dataset

    files = paths(images)
    urls = Path(output, "urls.txt")
    urls.write_text("\n".join(Path(path).as_uri() for path in files))
    img2dataset.download(
        url_list=str(urls),
        output_folder=f"{output}/{form}",
        output_format=form,
        image_size=SIZE,
        resize_mode="center_crop",  # it can't stretch
        encode_quality=QUALITY,
        processes_count=WORKERS,
        thread_count=4,  # that read; its processes decode one image at a time
        number_sample_per_shard=-(-len(files) // SHARDS),
        compute_hash=None,
        extract_exif=False,
    )


def img2dataset_tfrecord(images: str, output: str) -> None:
    """img2dataset from file:// to TFRecords."""
    _img2dataset(images, output, "tfrecord")


def img2dataset_webdataset(images: str, output: str) -> None:
    """img2dataset from file:// to tars, which takes no TensorFlow."""
    _img2dataset(images, output, "webdataset")


if __name__ == "__main__":
    name, images, output = sys.argv[1:]
    os.makedirs(output)
    globals()[name](images, output)
