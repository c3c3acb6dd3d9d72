"""A training on a mix, for test_mix.py: python -m … KIND FOLDER DIE_AT URL URL [ADDRESS PROCESS].

Prints the hash of its weights. It saves every second step and continues from the last save; after DIE_AT steps, if that
isn't 0, it kills itself.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import reader

STEPS = 150  # of which an iteration has 60


def with_keras(batches: Any, folder: Path, die_at: int) -> str:
    import keras

    from tests.reading.keras_fits import digest, stateful

    class Die(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if resume.step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    resume, model = reader.keras.Resume(folder, batches, every_steps=2), stateful()
    resume.fit(model, epochs=2, callbacks=[Die()], verbose=0)
    return digest(model)


def with_loop(
    batches: Any, path: Path, die_at: int, adapt: Callable[[Any], Iterable[Any]], step_of: Callable[[Any, Any], Any]
) -> str:
    """Train: weights, batch → weights."""
    weights = np.zeros((192, 5), np.float32)
    if path.exists():
        position, weights = pickle.loads(path.read_bytes())
        batches = batches.at(reader.Position.from_json(position))
    step, adapted = batches.start.step, adapt(batches)
    while step < STEPS:
        for batch in adapted:
            weights, step = step_of(weights, batch), step + 1
            if step % 2 == 0:
                path.with_suffix(".new").write_bytes(pickle.dumps((batches.position_at(step).to_json(), weights)))
                path.with_suffix(".new").replace(path)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:
                break
    return hashlib.sha256(weights.tobytes()).hexdigest()


def with_torch(batches: Any, folder: Path, die_at: int, workers: int) -> str:
    import torch

    def step_of(weights: Any, batch: Any) -> Any:
        parameters = torch.tensor(weights, requires_grad=True)
        images = batch[0].reshape(len(batch[0]), -1).float() / 255
        torch.nn.functional.cross_entropy(images @ parameters, batch[1]).backward()
        return (parameters - 0.1 * parameters.grad).detach().numpy()

    def adapt(batches: Any) -> Any:
        more: dict[str, Any] = {"num_workers": workers, "persistent_workers": True} if workers else {}
        return torch.utils.data.DataLoader(reader.as_torch(batches), batch_size=None, **more)

    return with_loop(batches, folder / "save", die_at, adapt, step_of)


def with_jax(batches: Any, folder: Path, die_at: int) -> str:
    import jax
    from jax import numpy as jnp

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        logits = images.reshape(len(images), -1).astype(jnp.float32) / 255 @ weights
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    gradient, mesh = jax.jit(jax.grad(loss)), jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    return with_loop(
        *(batches, folder / f"save{jax.process_index()}", die_at, lambda one: reader.as_jax(one, mesh)),
        lambda weights, batch: weights - 0.1 * np.asarray(gradient(weights, *batch)),
    )


def main(kind: str, folder: str, die_at: str, first: str, second: str, address: str = "", process: str = "") -> None:
    if address:
        import jax

        jax.distributed.initialize(address, 2, int(process))
    batches = reader.mix(
        {first: 3, second: 1}, global_batch_size=8, seed=3, augment=reader.augment.flip_crop, host="auto"
    )
    Path(folder).mkdir(exist_ok=True)
    if kind == "jax processes":
        print(with_jax(batches, Path(folder), int(die_at)))
    elif kind.startswith("loader"):
        print(with_torch(batches, Path(folder), int(die_at), int(kind[-1])))
    else:
        print(with_keras(batches, Path(folder), int(die_at)))


if __name__ == "__main__":
    main(*sys.argv[1:])
