"""Records what the reader does, for `test_golden.py`: `python -m tests.reading.golden.record`.

What is recorded is a promise to everybody who saved a position. Record again only to add a case (`{"case": …}` in
a JSON file), or after a decision to break it; `git diff` must then show nothing else.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import reader
from tests.reading.golden import observe
from tests.reading.golden.dataset import DATASETS, make_dataset

FOLDER = Path(__file__).parent
KINDS = (*observe.SEEN, "positions", "iterators")


def record(info: reader.DatasetInfo, kind: str, one: dict[str, Any]) -> dict[str, Any]:
    """A case with what is seen of it, and with what a user would have saved; what one has saved stays."""
    case = one["case"]
    if kind == "positions":
        position = observe.position_of(info, case)
        text = one.get("text", position.to_json())
        return {"case": case, "text": text, "seen": observe.observe_position(info, case, position)}
    if kind == "iterators":
        state = one.get("state") or observe.state_of(info, case)
        return {"case": case, "state": state, "seen": observe.observe_state(info, case, state)}
    return {"case": case, "seen": observe.SEEN[kind](info, case)}


def main() -> None:
    """Record the cases of each JSON file, one case a line."""
    with tempfile.TemporaryDirectory() as folder:
        infos = {name: reader.load_info(make_dataset(Path(folder, name, "1.0.0"), name)) for name in DATASETS}
        for kind in KINDS:
            path = FOLDER / f"{kind}.json"
            cases = json.loads(path.read_text())
            recorded = (record(infos[one["case"]["dataset"]], kind, one) for one in cases)
            path.write_text("[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in recorded) + "\n]\n")


if __name__ == "__main__":
    main()
