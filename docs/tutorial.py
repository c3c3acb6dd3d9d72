# %% [markdown]
# # From a folder of images to a trained model
#
# Draws some pictures, converts them into TFRecord shards, looks at them, trains a small network on them, and measures
# what feeds it. It takes two minutes on two cores, and needs no account and no download.
#
# [The README](../README.md) says what imageshards is for. This notebook is made from [tutorial.py](tutorial.py), and
# its outputs are those of a machine with two cores and no accelerator.
#
# ## Set up
#
# | where | what to do |
# |---|---|
# | your own machine | clone the repository, open this notebook in its folder `docs`, and run the cells |
# | Colab | clone the repository in a cell (`!git clone …`), and set `SOURCE` below to its folder |
# | Vertex AI Workbench | clone the repository in a terminal, and open this notebook there |
#
# Is imageshards installed? If not, this cell installs it. If Colab then asks for a restart, restart and run it again.

# %%
import subprocess
import sys
from importlib.util import find_spec

SOURCE = ".."  # folder of the clone, or a wheel
EXTRAS = "pipeline,reader,tensorflow,train"

if find_spec("imageshards") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{SOURCE}[{EXTRAS}]"], check=True)

# %% [markdown]
# Where is the data to be? In the current folder, or in a bucket: `ROOT = "gs://BUCKET/tutorial"`. A bucket belongs in
# the region of the machine that trains: from another region each byte is slower, and billed as traffic between
# regions.
#
#     gcloud storage buckets create gs://BUCKET --location=us-central1
#
# Colab asks for your permission to use the bucket. Workbench uses its machine's service account, and your own machine
# `gcloud auth application-default login`.

# %%
ROOT = "."

if ROOT.startswith("gs://") and "google.colab" in sys.modules:
    from google.colab import auth

    auth.authenticate_user()

# %% [markdown]
# ## The images
#
# What does the input look like? Images in a folder for each class. These 400 are drawn, and two files among them are
# broken, as in any real bucket. For your own images, replace the cell by `PHOTOS = "gs://BUCKET/photos"` or a local
# folder.

# %%
from pathlib import Path

from beam_pipeline.sample_data import draw_folder

PHOTOS = "photos"
draw_folder(Path(PHOTOS), images=400)
for folder in sorted(Path(PHOTOS).iterdir()):
    files = sorted(path.name for path in folder.iterdir())
    print(f"{folder}: {len(files)} files: {', '.join(files[:3])} …")

# %% [markdown]
# ## Shards
#
# How do they become a dataset? One call runs a Beam job on this machine. Each image is decoded, resized to 96×96
# pixels and stored as a record of a few large files. A hash of its path says whether it is in `train` or in
# `validation`. Run the cell again, and it finds that all is done.

# %%
import imageshards

config = imageshards.Config(
    input=PHOTOS, output=f"{ROOT}/datasets", name="photos", image_size=96, splits="train=0.8,validation=0.2"
)
manifest = imageshards.write(config)
manifest

# %% [markdown]
# Which images were left out, and why? Every image that was listed is a record, or is named here.

# %%
for group in imageshards.tools.rejects(manifest.url):
    print(f"{group.reason}: {group.what}: {', '.join(group.paths)}")

# %% [markdown]
# What is in the dataset? `info` is what all readers begin with.

# %%
info = imageshards.load_info(f"{ROOT}/datasets/photos")
info

# %% [markdown]
# Is every byte as it was published? `verify` reads all files and decodes all images.

# %%
print(imageshards.tools.verify(info))

# %% [markdown]
# ## Look
#
# What do the stored images look like, and are their labels correct? `show` draws some of them.

# %%
imageshards.tools.show(info, count=10)

# %% [markdown]
# ## A batch
#
# What does a trainer get? Arrays of pixels and class ids, shuffled over all of the split; and in each epoch another
# order.

# %%
train = imageshards.train_batches(info, "train", global_batch_size=32, augment=imageshards.augment.flip)
images, labels = next(iter(train))
print(train)
print(images.shape, images.dtype, "labels", *labels[:8], "…")

# %% [markdown]
# What does augmentation do to an image? To the right of each image is what training gets of it in its first epochs:
# the same decoder and the same seeds make it. Small crops may miss what the label names: look before you train.

# %%
imageshards.tools.show(info, count=4, augment=imageshards.augment.random_resized_crop(scale=(0.2, 1)))

# %% [markdown]
# ## Train
#
# Does a network learn from it? `train_dataset` makes the same batches a `tf.data.Dataset`, which has a length and
# goes on where the last epoch ended. `eval_dataset` has each record once.

# %%
import keras

keras.utils.set_random_seed(0)
options = {"global_batch_size": 32, "image_size": 64}
train = imageshards.train_dataset(info, "train", augment=imageshards.augment.flip, **options)
evals = imageshards.eval_dataset(info, "validation", **options)

layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((64, 64, 3)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Conv2D(64, 3, strides=2, activation="relu"),
        layers.GlobalMaxPooling2D(),
        layers.Dense(info.num_classes),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(2e-3), loss, weighted_metrics=["accuracy"])
history = model.fit(train, epochs=15, validation_data=evals, verbose=0).history

# %% [markdown]
# How fast does it learn?

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(5, 2.5))
axes.plot(history["accuracy"], label="train")
axes.plot(history["val_accuracy"], label="validation")
axes.set(xlabel="epoch", ylabel="accuracy", ylim=(0, 1))
axes.legend()
plt.show()

# %% [markdown]
# Which classes does it confuse? A row is a class, a column is what the network says.

# %%
import numpy as np

confusion = np.zeros((info.num_classes, info.num_classes), int)
for images, labels, weights in imageshards.eval_batches(info, "validation", **options):
    predicted = model.predict_on_batch(images).argmax(axis=1)
    np.add.at(confusion, (labels, predicted), weights.astype(int))  # padding of the last batch has weight 0
for name, row in zip(info.classes, confusion, strict=True):
    print(f"{name:9}", *(f"{count:4}" for count in row))

# %% [markdown]
# ## What does training wait for?
#
# If the trainer waits for its next batch, the input is the limit: more cores, smaller images or a cache help. If it
# doesn't, the device is the limit, and a faster input changes nothing.

# %%
from time import perf_counter

batches = imageshards.train_batches(info, "train", augment=imageshards.augment.flip, **options).repeat()
next(batches)  # the first one takes longer: threads begin
began, waited_s = perf_counter(), 0.0
for _ in range(50):
    asked = perf_counter()
    images, labels = next(batches)
    waited_s += perf_counter() - asked
    model.train_on_batch(images, labels)
print(f"{waited_s / (perf_counter() - began):.0%} of the time was spent waiting for batches")

# %% [markdown]
# ## Individual files or shards?
#
# How fast does each adapter feed a trainer from this machine's disk, and how fast are the original images, read as
# individual files? `bench` reads them in turns.


# %%
def draw_rates(result, where):
    """Bars of images/s."""
    rates = {row.name: np.median(row.rates) for row in result.rows if row.passes}
    _, axes = plt.subplots(figsize=(6, 2))
    axes.bar_label(axes.barh(rates.keys(), rates.values()), fmt="{:,.0f}", padding=4)
    axes.invert_yaxis()
    axes.set(xlabel=f"images/s {where}", xlim=(0, 1.25 * max(rates.values())))
    plt.show()


result = imageshards.tools.bench(info, images=640, batch_size=32, image_size=96, against=PHOTOS)
draw_rates(result, "from the local disk")

# %% [markdown]
# And from a bucket? There each request waits, here 50 ms, and a file is a request. With `latency_ms`, `bench` makes
# every request wait so long. A loop reads one file at a time; many at once are better; and a shard gives many images
# for one request. These shards are so small that two or three requests are most of their time: [why.md](why.md) has the
# figures of a larger dataset.

# %%
settings = {"images": 640, "batch_size": 32, "image_size": 96, "repeats": 1}
result = imageshards.tools.bench(info, **settings, against=PHOTOS, latency_ms=50)
draw_rates(result, "with 50 ms a request")

# %% [markdown]
# ## Next
#
# - [why.md](why.md): why files in a bucket are slow, and what each remedy brings
# - [Several hosts, resuming](howto/hosts.md), [JAX](howto/jax.md), [PyTorch](howto/pytorch.md)
# - [moving](howto/moving.md): from Keras' `image_dataset_from_directory`, TFDS, WebDataset, `ImageFolder` and others
# - [train](howto/train.md): `imageshards train`, which needs no code, on a TPU, GPUs or the CPU
# - [Dataflow](howto/dataflow.md): the same job over a bucket of millions of images
