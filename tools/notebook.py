"""Makes docs/tutorial.ipynb from docs/tutorial.py and runs it, so that it holds its outputs: python -m tools.notebook

The script is in the percent format that Jupyter, VS Code and Spyder read, and runs as a script too:
https://jupytext.readthedocs.io/en/latest/formats-scripts.html#the-percent-format
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SCRIPT, NOTEBOOK = ROOT / "docs" / "tutorial.py", ROOT / "docs" / "tutorial.ipynb"
_TIMEOUT_S = 300  # for a cell


def from_script(text: str) -> nbformat.NotebookNode:
    """A notebook with the cells of a script in percent format, without outputs."""
    cells: list[nbformat.NotebookNode] = []
    for number, (kind, source) in enumerate(re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", text, re.MULTILINE)):
        source, more = source.strip("\n"), {"id": f"cell-{number}"}
        if "[markdown]" in kind:
            cells.append(nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", source, flags=re.MULTILINE), **more))
        else:
            cells.append(nbformat.v4.new_code_cell(source, **more))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in a folder and keep their outputs, without what only this machine and this moment know.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    metadata = dict(notebook.metadata)
    client = NotebookClient(
        notebook,
        timeout=_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,  # a busy machine cuts one print into several outputs
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(metadata)  # the kernel has added its version
    for cell in notebook.cells:
        # TensorFlow writes to stderr which drivers it misses, with the time.
        kept = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
        if cell.cell_type == "code":
            cell.outputs = [_portable(output, f"{folder.resolve()}{os.sep}") for output in kept]


def _portable(output: Any, folder: str) -> Any:
    """Paths are those below the folder; of a picture that is there as PNG and as JPEG, the smaller one."""
    data = output.get("data", {})
    for texts, key in ((output, "text"), (data, "text/plain")):
        if key in texts:
            texts[key] = texts[key].replace(folder, "")
    pictures = sorted((mime for mime in data if mime.startswith("image/")), key=lambda mime: len(data[mime]))
    for mime in pictures[1:]:
        del data[mime]
        output["metadata"].pop(mime, None)
    return output


def main() -> None:
    """Write the notebook."""
    notebook = from_script(SCRIPT.read_text())
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.relative_to(ROOT)}: {len(notebook.cells)} cells, {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
