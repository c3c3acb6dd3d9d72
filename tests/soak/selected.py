"""A training on some of the classes, balanced, that can be killed.

    python -m tests.soak.selected KIND URL FOLDER [KILL]

It saves after every 5 steps, is killed by SIGKILL at step KILL, and goes on from the last save when it starts again. At
its end it prints a hash of its weights.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import reader

KINDS = ("keras-tensorflow", "torch", "jax")
STEPS, SAVED = 40, 5
OPTIONS: dict[str, Any] = {
    "global_batch_size": 16,
    "classes": {"bird": "bird", "cat": "pet", "dog": "pet"},
    "where": lambda columns: columns["bytes"] % 5 > 0,
    "balance": {"bird": 3, "pet": 1},
    "epoch_records": 250,
    "augment": reader.augment.flip,
    "seed": 3,
}


def kill_at(step: int, kill: int | None) -> None:
    """End this process as the kernel would."""
    if step == kill:
        os.kill(os.getpid(), signal.SIGKILL)


def hashed(arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in arrays)).hexdigest()


def train_keras(url: str, folder: Path, kill: int | None) -> str:
    """By `Resume`."""
    import keras

    class Kill(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kill_at(resume.step, kill)

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((16, 24, 3)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = reader.train_batches(url, "train", **OPTIONS)
    resume = reader.keras.Resume(folder, batches, every_steps=SAVED)
    epochs = {"epochs": resume.epochs(STEPS // len(batches) + 1), "initial_epoch": resume.initial_epoch}
    model.fit(resume.data, **epochs, shuffle=False, callbacks=[resume, Kill()], verbose=0)
    return hashed(model.get_weights())


def train_loop(
    folder: Path,
    kill: int | None,
    begin: Callable[[Any], Any],
    batches_of: Callable[[Any], Iterator[Any]],
    step_of: Any,
) -> Any:
    """A loop that saves its state and the position in one file."""
    saved = pickle.loads((folder / "saved").read_bytes()) if (folder / "saved").exists() else (0, None, None)
    step, position, state = saved
    state = begin(state)
    batches = reader.train_batches(
        url_of[0], "train", **OPTIONS, position=position and reader.Position.from_json(position)
    )
    for images, labels in batches_of(batches):
        state = step_of(state, images, labels)
        step += 1
        if step % SAVED == 0:
            new = folder / "new"
            new.write_bytes(pickle.dumps((step, batches.position_at(step).to_json(), state)))
            new.replace(folder / "saved")
        kill_at(step, kill)
        if step == STEPS:
            return state


url_of: list[str] = []


def train_torch(folder: Path, kill: int | None) -> str:
    import torch

    def begin(state: Any) -> Any:
        torch.manual_seed(1)
        weights = torch.zeros(16 * 24 * 3, 2) if state is None else torch.from_numpy(state)
        return weights.numpy()

    def step_of(state: Any, images: Any, labels: Any) -> Any:
        weights = torch.from_numpy(state.copy()).requires_grad_()
        loss = torch.nn.functional.cross_entropy(images.reshape(len(labels), -1).float() / 255 @ weights, labels)
        loss.backward()
        return (weights - 0.1 * weights.grad).detach().numpy()

    def batches_of(batches: Any) -> Iterator[Any]:
        loader = torch.utils.data.DataLoader(
            reader.as_torch(batches), batch_size=None, num_workers=2, persistent_workers=True
        )
        while True:
            yield from loader

    return hashed([train_loop(folder, kill, begin, batches_of, step_of)])


def train_jax(folder: Path, kill: int | None) -> str:
    import jax
    import jax.numpy as jnp

    def loss_of(weights: Any, images: Any, labels: Any) -> Any:
        logits = jax.nn.log_softmax(images.reshape(len(labels), -1).astype(jnp.float32) / 255 @ weights)
        return -logits[jnp.arange(len(labels)), labels].mean()

    gradient = jax.jit(jax.grad(loss_of))

    def batches_of(batches: Any) -> Iterator[Any]:
        arrays = reader.as_jax(batches, jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
        while True:
            yield from arrays

    return hashed(
        [
            train_loop(
                folder,
                kill,
                lambda state: np.zeros((16 * 24 * 3, 2), np.float32) if state is None else state,
                batches_of,
                lambda state, images, labels: np.asarray(state - 0.1 * gradient(state, images, labels)),
            )
        ]
    )


def main(kind: str, url: str, folder: str, kill: int | None) -> None:
    """Train to the end, or until it is killed."""
    Path(folder).mkdir(exist_ok=True)
    url_of.append(url)
    if kind.startswith("keras"):
        print(train_keras(url, Path(folder), kill))
    else:
        print({"torch": train_torch, "jax": train_jax}[kind](Path(folder), kill))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else None)
