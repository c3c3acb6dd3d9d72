"""Every public name: the shelf that users import it from, and the module that defines it."""

from __future__ import annotations

from beam_pipeline.text import meant

_WRITE = "write"  # as the command is called; beam_pipeline.run
SHELVES: dict[str, dict[str, str]] = {
    "imageshards": {
        "Config": "beam_pipeline.config",
        "DatasetInfo": "reader.info",
        "EvalBatches": "reader.stream",
        "Evaluation": "reader.training.evaluate",
        "ImageShardsError": "beam_pipeline.errors",
        "Manifest": "beam_pipeline.schema.manifest",
        "Position": "reader.position",
        "Prediction": "reader.training.run",
        "Records": "reader.map",
        "TrainBatches": "reader.stream",
        "TrainOptions": "reader.training.options",
        "as_jax": "reader.jax",
        "as_tf": "reader.tensorflow",
        "as_torch": "reader.torch",
        "augment": "reader",  # modules
        "decode": "reader.preprocess",
        "eval_batches": "reader.batches",
        "eval_dataset": "reader.tensorflow",
        "evaluate": "reader.training.evaluate",
        "keras": "reader",
        "load_info": "reader.info",
        "load_run": "reader.training.run",
        "mix": "reader.mixing",
        "predict": "reader.training.run",
        "record_dataset": "reader.foreign",
        "records": "reader.map",
        "train": "reader.training.fit",
        "train_batches": "reader.batches",
        "train_dataset": "reader.tensorflow",
        _WRITE: "beam_pipeline.cli.run",
    },
    "imageshards.tools": {
        "bench": "reader.tools.bench",
        "diff": "reader.tools.diff",
        "duplicates": "reader.tools.duplicates",
        "index": "reader.tools.index",
        "rejects": "reader.tools.rejects",
        "report": "reader.tools.report",
        "show": "reader.tools.show",
        "verify": "reader.tools.verify",
    },
    "imageshards.beam": {
        "ConvertedImage": "beam_pipeline.transforms",
        "ImageRef": "beam_pipeline.transforms",
        "ListImages": "beam_pipeline.transforms",
        "ReadImages": "beam_pipeline.transforms",
        "RejectLine": "beam_pipeline.transforms",
        "WriteDataset": "beam_pipeline.transforms",
        "from_worker": "beam_pipeline.errors",
    },
}


def homes(package: str) -> dict[str, str]:
    """Name → module, of what a package defines."""
    every = {name: home for shelf in SHELVES.values() for name, home in shelf.items()}
    return {name: home for name, home in sorted(every.items()) if home.partition(".")[0] == package}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for a name that isn't there: it says where it is, or what it may be meant for."""
    for shelf, names in SHELVES.items():
        if name in names and shelf != module:
            return AttributeError(f"{module}.{name} is {shelf}.{name}", name=name)
    hint = meant(name, SHELVES.get(module, ()), "", str)
    return AttributeError(f"module {module!r} has no attribute {name!r}{': ' * bool(hint)}{hint}", name=name)
