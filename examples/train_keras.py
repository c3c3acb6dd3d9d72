"""Trains a small network with Keras 3, on TensorFlow, JAX or PyTorch: KERAS_BACKEND says which.

python examples/train_keras.py datasets/photos/1.0.0     # after a kill, it continues at the exact batch
"""

import argparse
import os
import signal
from contextlib import nullcontext

os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")  # on TensorFlow a resumed run ends with the very same weights

import keras

import imageshards

IMAGE_SIZE, FILTERS, LEARNING_RATE = 96, (16, 32, 64, 128), 0.002

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("dataset", help="a folder or URL that `imageshards write` published")
parser.add_argument("--out", default="runs/keras", help="a folder of this run only")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=32, help="of all devices together")
parser.add_argument("--checkpoint_steps", type=int, default=100, help="steps from one checkpoint to the next")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: a checkpoint is complete or isn't there


# --- Devices: on TensorFlow a strategy shares each step among them.
def find_strategy():
    """A TPUStrategy, a MirroredStrategy or TensorFlow's default, which does nothing."""
    import tensorflow as tf

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")  # the TPU of this TPU VM
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError):  # there is none
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    names = [device.name for device in devices]
    return tf.distribute.MirroredStrategy(names) if len(names) > 1 else tf.distribute.get_strategy()


scope, found = nullcontext(), "1 device"
if keras.backend.backend() == "tensorflow":
    strategy = find_strategy()
    scope, found = strategy.scope(), f"{type(strategy).__name__} of {strategy.num_replicas_in_sync}"
elif keras.backend.backend() == "jax" and len(keras.distribution.list_devices()) > 1:
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    found = f"{len(keras.distribution.list_devices())} devices: DataParallel"
print(f"Keras on {keras.backend.backend()}, {found}")

# --- Input: every record once an epoch, and every one of the validation split once, at weight 1.
options = {"global_batch_size": args.batch_size, "image_size": IMAGE_SIZE}
try:
    info = imageshards.load_info(args.dataset)
    train = imageshards.train_batches(info, "train", seed=args.seed, **options)
    evals = imageshards.eval_batches(info, "validation", **options)
    resume = imageshards.keras.Resume(args.out, train, every_steps=args.checkpoint_steps)
except imageshards.ImageShardsError as error:
    parser.error(str(error))

# --- Model: its first layers normalise and augment.
keras.utils.set_random_seed(args.seed)
layers = keras.layers
with scope:
    model = keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, info.image.channels)),
            layers.Rescaling(1 / 255),
            layers.Normalization(mean=info.image.mean, variance=[std**2 for std in info.image.std]),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.1, 0.1),
            *[layers.Conv2D(count, 3, strides=2, padding="same", activation="relu") for count in FILTERS],
            layers.GlobalMaxPooling2D(),
            layers.Dense(info.num_classes),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Weighted, so that padding doesn't count, as it does in Keras' own val_loss.
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="cross_entropy")]
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss, weighted_metrics=metrics)

# --- Train: `fit` restores and saves weights, optimizer, random seeds and position.
if resume.step:
    print(f"continuing after step {resume.step}")
resume.fit(model, evals, epochs=args.epochs, verbose=2)
model.save(path := os.path.join(args.out, "model.keras"))
print(f"{args.epochs} epochs are trained: {path}")
