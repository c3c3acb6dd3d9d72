"""Trains a small network on a Grain pipeline over single records: your own order and transformations, one by one.

python examples/train_grain.py datasets/photos/1.0.0     # after a kill, it continues at the exact batch
"""

import argparse
import json
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from grain import MapDataset, ReadOptions

import imageshards

IMAGE_SIZE, FILTERS, LEARNING_RATE, MOMENTUM = 96, (16, 32, 64, 128), 0.01, 0.9
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("dataset", help="a folder or URL that `imageshards write` published")
parser.add_argument("--out", type=Path, default="runs/grain", help="a folder of this run only")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch_size", type=int, default=32, help="an epoch leaves out what fills no batch")
parser.add_argument("--checkpoint_steps", type=int, default=100, help="steps from one checkpoint to the next")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: a checkpoint is complete or isn't there

# --- Input: Grain reads records by number, in its own order, and transforms them one by one.
info = imageshards.load_info(args.dataset)
train, validation = (imageshards.records(info, split, image_size=IMAGE_SIZE) for split in ("train", "validation"))
epoch = MapDataset.source(train).seed(args.seed).shuffle()  # `random` below follows from seed, epoch and record
epoch = epoch.random_map(lambda one, random: (one["image"][:, :: random.choice([1, -1])], one["class"]))
epoch = epoch.batch(args.batch_size, drop_remainder=True)
reading = ReadOptions(num_threads=8, prefetch_buffer_size=8)  # batches; by default 500 are kept in memory
batches = iter(epoch.repeat(args.epochs).to_iter_dataset(reading))
evals = MapDataset.source(validation).map(lambda one: (one["image"], one["class"])).batch(args.batch_size)


# --- Model and optimizer: functions of the parameters, a dict of arrays.
@jax.jit
def loss_and_hits(params, images, labels):
    """Sums over a batch: the cross-entropy, and how often the largest logit is the class."""
    x, layout = (images / 255 - np.array(info.image.mean)) / np.array(info.image.std), ("NHWC", "HWIO", "NHWC")
    for kernel in params["kernels"]:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout))
    logits = jax.nn.log_softmax(x.max((1, 2)) @ params["head"])
    losses = -jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.stack([losses, logits.argmax(1) == labels]).sum(1)


@jax.jit
def train_step(state, images, labels):
    """SGD with momentum."""
    gradients = jax.grad(lambda p: loss_and_hits(p, images, labels)[0] / len(labels))(state["params"])
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state["params"], velocity)
    return {"params": params, "velocity": velocity, "step": state["step"] + 1}


# --- Start, or continue after the last checkpoint: one file, which is replaced in one step.
keys, sizes = jax.random.split(jax.random.key(args.seed), len(FILTERS)), (info.image.channels, *FILTERS)
kernels = [jax.nn.initializers.he_normal()(key, (3, 3, *sizes[n : n + 2])) for n, key in enumerate(keys)]
params = {"kernels": kernels, "head": jnp.zeros((FILTERS[-1], info.num_classes))}
state = {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params), "step": 0}
path, new = args.out / "checkpoint.npz", args.out / "new.npz"
run = f"seed {args.seed}, batches of {args.batch_size}, dataset {info.source('train')}"  # a position counts on these
args.out.mkdir(parents=True, exist_ok=True)
if path.exists():
    saved = np.load(path)
    if saved["run"] != run:
        parser.error(f"{path} is of another run: {saved['run']}; this one: {run}")
    batches.set_state(json.loads(str(saved["batches"])))
    state = jax.tree.unflatten(jax.tree.structure(state), [saved[f"arr_{n}"] for n in range(len(saved) - 2)])
    print(f"continuing after step {state['step']}")

# --- Train.
for images, labels in batches:
    state = train_step(state, images, labels)
    done, within = divmod(int(state["step"]), len(epoch))
    if within == 0:
        sums = [loss_and_hits(state["params"], *batch) for batch in evals.to_iter_dataset(reading)]
        loss, accuracy = np.sum(sums, axis=0) / len(validation)
        print(f"epoch {done}: val_loss {loss:.4f}, val_accuracy {accuracy:.4f}")
    if within % args.checkpoint_steps == 0:
        np.savez(new, *jax.tree.leaves(state), batches=json.dumps(batches.get_state()), run=run)
        new.replace(path)
np.savez(args.out / "params.npz", *jax.tree.leaves(state["params"]))
print(f"{args.epochs} epochs are trained: {args.out / 'params.npz'}")
