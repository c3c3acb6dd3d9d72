"""The tables of RESULTS.md from what the benchmarks printed, kept in results/*.json: `python -m benchmarks.results`.

Each file is one table: the command, machine, date and commit of its measurement, its columns and its rows. After a new
measurement, edit the file and run this. `--check` exits with 1 if RESULTS.md isn't what it would write.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def kept(name: str) -> dict[str, Any]:
    """A file of results."""
    return dict(json.loads((HERE / "results" / f"{name}.json").read_text()))


def table(name: str) -> str:
    """Markdown of a table: where its figures come from, columns, rows."""
    result = kept(name)
    source = f"`{result['command']}` · {result['machine']} · {result['date']} · commit {result['commit']}"
    lines = [result["columns"], ["---"] * len(result["columns"]), *result["rows"]]
    return f"{source}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page(text: str) -> str:
    """The page with all its tables as the files have them."""
    return _MARK.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


def main() -> None:
    """Write RESULTS.md, or compare."""
    before = PAGE.read_text()
    if sys.argv[1:] == ["--check"]:
        sys.exit(before != page(before))
    PAGE.write_text(page(before))


if __name__ == "__main__":
    main()
