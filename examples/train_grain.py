"""Trains a small network on a Grain pipeline over single records: your own order and transformations, one by one.

python examples/train_grain.py datasets/photos/1.0.0     # after a kill, it continues at the exact batch
"""

import argparse
import json
import os
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
def flip(record, random):
    """Image and class of a record, every second one mirrored. `random` follows from seed, epoch and record."""
    return record["image"][:, ::-1] if random.random() < 0.5 else record["image"], record["class"]


try:
    info = imageshards.load_info(args.dataset)
    train, validation = (imageshards.records(info, split, image_size=IMAGE_SIZE) for split in ("train", "validation"))
except imageshards.ImageShardsError as error:
    parser.error(str(error))
epoch = MapDataset.source(train).seed(args.seed).shuffle().random_map(flip).batch(args.batch_size, drop_remainder=True)
reading = ReadOptions(num_threads=8, prefetch_buffer_size=8)  # batches; by default 500 are kept in memory
batches = iter(epoch.repeat(args.epochs).to_iter_dataset(reading))
evals = MapDataset.source(validation).map(lambda one: (one["image"], one["class"])).batch(args.batch_size)


# --- Model and optimizer: functions of the parameters, a dict of arrays.
@jax.jit
def losses_and_hits(params, images, labels):
    """Of each image its cross-entropy, and whether the class with the largest logit is its own."""
    x, layout = (images / 255 - np.array(info.image.mean)) / np.array(info.image.std), ("NHWC", "HWIO", "NHWC")
    for number in range(len(FILTERS)):
        x = jax.lax.conv_general_dilated(x, params[f"kernel_{number}"], (2, 2), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + params[f"bias_{number}"])
    logits = jax.nn.log_softmax(x.max((1, 2)) @ params["head"])
    return -jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0], logits.argmax(1) == labels


@jax.jit
def train_step(state, images, labels):
    """SGD with momentum."""
    loss, gradients = jax.value_and_grad(lambda p: losses_and_hits(p, images, labels)[0].mean())(state["params"])
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state["params"], velocity)
    return {"params": params, "velocity": velocity, "loss": state["loss"] + loss, "step": state["step"] + 1}


# --- Start, or continue after the last checkpoint: one file, which is replaced in one step.
key, params = jax.random.key(args.seed), {"head": jnp.zeros((FILTERS[-1], info.num_classes))}
for number, (before, after) in enumerate(zip((info.image.channels, *FILTERS), FILTERS, strict=False)):
    kernel = jax.nn.initializers.he_normal()(jax.random.fold_in(key, number), (3, 3, before, after))
    params |= {f"kernel_{number}": kernel, f"bias_{number}": jnp.zeros(after)}
state = {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params), "loss": jnp.zeros(()), "step": 0}
path, new = args.out / "checkpoint.npz", args.out / "new.npz"
run = f"seed {args.seed}, batches of {args.batch_size}, dataset {info.source('train')}"  # a position counts on these
args.out.mkdir(parents=True, exist_ok=True)
if path.exists():
    with np.load(path) as saved:
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
        results = [np.stack(losses_and_hits(state["params"], *batch)) for batch in evals.to_iter_dataset(reading)]
        loss, accuracy = np.concatenate(results, axis=1).mean(axis=1)
        print(f"epoch {done}: loss {state['loss'] / len(epoch):.4f}, val_loss {loss:.4f}, val_accuracy {accuracy:.4f}")
        state["loss"] = jnp.zeros_like(state["loss"])
    if within % args.checkpoint_steps == 0:
        np.savez(new, *jax.tree.leaves(state), batches=json.dumps(batches.get_state()), run=run)
        os.replace(new, path)
np.savez(args.out / "params.npz", **state["params"])
print(f"{args.epochs} epochs are trained: {args.out / 'params.npz'}")
