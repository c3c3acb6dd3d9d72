"""Trains a small network with JAX on all devices; Orbax saves weights and position together.

python examples/train_jax.py datasets/photos/1.0.0     # after a kill, it continues at the exact batch
"""

import argparse
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

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
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
options = {"global_batch_size": args.batch_size, "image_size": IMAGE_SIZE, "host": "auto"}
try:
    info = imageshards.load_info(args.dataset)
    train = imageshards.train_batches(info, "train", seed=args.seed, augment=imageshards.augment.flip_crop, **options)
    batches = imageshards.as_jax(train, mesh).repeat()
    evals = imageshards.as_jax(imageshards.eval_batches(info, "validation", **options), mesh)
    manager = ocp.CheckpointManager(args.out.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))
    if done := manager.latest_step() or 0:
        saved = manager.restore(done, args=ocp.args.Composite(position=ocp.args.JsonRestore())).position
        if saved["position"]["global_batch_size"] != args.batch_size:
            parser.error(f"{args.out} is of a run with another --batch_size, and steps are counted in batches")
        batches.load_state_dict(saved)
except imageshards.ImageShardsError as error:
    parser.error(str(error))


# --- Model and optimizer: functions of the parameters, a dict of arrays.
@jax.jit
def loss_and_hits(params, images, labels, weights=1):
    """Sums over a batch: the cross-entropy, and how often the largest logit is the class. Padding has weight 0."""
    x, layout = (images / 255 - np.array(info.image.mean)) / np.array(info.image.std), ("NHWC", "HWIO", "NHWC")
    for kernel in params["kernels"]:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout))
    logits = jax.nn.log_softmax(x.max((1, 2)) @ params["head"])
    losses = -jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return (jnp.stack([losses, logits.argmax(1) == labels]) * weights).sum(1)


@jax.jit
def train_step(state, images, labels):
    """SGD with momentum. Images are spread over the devices, so XLA sums the gradients over them."""
    loss, gradients = jax.value_and_grad(lambda p: loss_and_hits(p, images, labels)[0] / len(labels))(state["params"])
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state["params"], velocity)
    return {"params": params, "velocity": velocity, "loss": state["loss"] + loss}


# --- Start, or continue after the last checkpoint.
keys, sizes = jax.random.split(jax.random.key(args.seed), len(FILTERS)), (info.image.channels, *FILTERS)
kernels = [jax.nn.initializers.he_normal()(key, (3, 3, *sizes[n : n + 2])) for n, key in enumerate(keys)]
params = {"kernels": kernels, "head": jnp.zeros((FILTERS[-1], info.num_classes))}
state = {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params), "loss": jnp.zeros(())}
state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
if done:
    state = manager.restore(done, args=ocp.args.Composite(state=ocp.args.StandardRestore(state))).state
    print(f"continuing after step {done}")

# --- Train. An epoch is len(train) steps; its loss is summed in the state.
for step in range(done + 1, args.epochs * len(train) + 1):
    state = train_step(state, *next(batches))
    epoch, within = divmod(step, len(train))
    if within == 0:
        loss, accuracy = sum(loss_and_hits(state["params"], *batch) for batch in evals) / info.records("validation")
        print(f"epoch {epoch}: loss {state['loss'] / len(train):.4f}, val_loss {loss:.4f}, val_accuracy {accuracy:.4f}")
        state["loss"] = jnp.zeros_like(state["loss"])
    if within % args.checkpoint_steps == 0:
        saved = {"state": ocp.args.StandardSave(state), "position": ocp.args.JsonSave(batches.state_dict())}
        manager.save(step, args=ocp.args.Composite(**saved))
manager.close()  # a checkpoint is written in the background
np.savez(args.out / "params.npz", *jax.tree.leaves(state["params"]))
print(f"{args.epochs} epochs are trained: {args.out / 'params.npz'}")
