"""Trains a small network with JAX on all devices; Orbax saves weights and position together.

python examples/train_jax.py datasets/photos/1.0.0     # after a kill, it continues at the exact batch
"""

import argparse
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions
from orbax.checkpoint.args import Composite, JsonRestore, JsonSave, StandardRestore, StandardSave

import imageshards

IMAGE_SIZE, FILTERS, LEARNING_RATE, MOMENTUM = 96, (16, 32, 64, 128), 0.01, 0.9

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("dataset", help="a folder or URL that `imageshards write` published")
parser.add_argument("--out", type=Path, default="runs/jax", help="a folder of this run only")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch_size", type=int, default=32, help="of all devices together")
parser.add_argument("--checkpoint_steps", type=int, default=100, help="steps from one checkpoint to the next")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: a checkpoint is complete or isn't there

# --- Input: global arrays, spread over the devices. On several hosts call jax.distributed.initialize() before.
mesh = Mesh(np.array(jax.devices()), ("data",))
print(f"training on {jax.device_count()} x {jax.devices()[0].device_kind}")
options = {"global_batch_size": args.batch_size, "image_size": IMAGE_SIZE, "host": "auto"}
try:
    info = imageshards.load_info(args.dataset)
    train = imageshards.train_batches(info, "train", seed=args.seed, augment=imageshards.augment.flip_crop, **options)
    batches = imageshards.as_jax(train, mesh).repeat()
    evals = imageshards.as_jax(imageshards.eval_batches(info, "validation", **options), mesh)
    manager = CheckpointManager(args.out.absolute() / "checkpoints", options=CheckpointManagerOptions(max_to_keep=2))
    if done := manager.latest_step() or 0:
        saved = manager.restore(done, args=Composite(position=JsonRestore())).position
        if saved["position"]["global_batch_size"] != args.batch_size:
            parser.error(f"{args.out} is of a run with another --batch_size, and steps are counted in batches")
        batches.load_state_dict(saved)
except imageshards.ImageShardsError as error:
    parser.error(str(error))


# --- Model and optimizer: functions of the parameters, a dict of arrays.
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
    """SGD with momentum. Images are spread over the devices, so XLA sums the gradients over them."""
    loss, gradients = jax.value_and_grad(lambda p: losses_and_hits(p, images, labels)[0].mean())(state["params"])
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state["params"], velocity)
    return {"params": params, "velocity": velocity, "loss": state["loss"] + loss}


@jax.jit
def eval_step(params, images, labels, weights):
    """Loss and hits, summed over the records of a batch: padding has weight 0."""
    return jnp.stack([(values * weights).sum() for values in losses_and_hits(params, images, labels)])


# --- Start, or continue after the last checkpoint.
key, params = jax.random.key(args.seed), {"head": jnp.zeros((FILTERS[-1], info.num_classes))}
for number, (before, after) in enumerate(zip((info.image.channels, *FILTERS), FILTERS, strict=False)):
    kernel = jax.nn.initializers.he_normal()(jax.random.fold_in(key, number), (3, 3, before, after))
    params |= {f"kernel_{number}": kernel, f"bias_{number}": jnp.zeros(after)}
state = {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params), "loss": jnp.zeros(())}
state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
if done:
    state = manager.restore(done, args=Composite(state=StandardRestore(state))).state
    print(f"continuing after step {done}")

# --- Train. An epoch is len(train) steps; its loss is summed in the state.
for step in range(done + 1, args.epochs * len(train) + 1):
    state = train_step(state, *next(batches))
    epoch, within = divmod(step, len(train))
    if within == 0:
        loss, accuracy = sum(eval_step(state["params"], *batch) for batch in evals) / info.records("validation")
        print(f"epoch {epoch}: loss {state['loss'] / len(train):.4f}, val_loss {loss:.4f}, val_accuracy {accuracy:.4f}")
        state["loss"] = jnp.zeros_like(state["loss"])
    if within % args.checkpoint_steps == 0:
        manager.save(step, args=Composite(state=StandardSave(state), position=JsonSave(batches.state_dict())))
manager.close()  # a checkpoint is written in the background
np.savez(args.out / "params.npz", **state["params"])
print(f"{args.epochs} epochs are trained: {args.out / 'params.npz'}")
