"""The notebook runs, and its outputs are kept."""

import os
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path: Path) -> None:
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq")  # it asks asyncio for a policy that is to go
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_it_runs_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell again, in a new kernel; the rules' total variations are numbers without chance."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Its process runs beside other tests: where threads outnumber free cores, each waits for one that does not run.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(path)
    kept = [texts(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    made = [texts(cell) for cell in notebook.cells]
    checked = [(old, new) for old, new in zip(kept, made, strict=True) if "total variation" in old]
    assert len(checked) == 1
    for line_old, line_new in zip(*(each.splitlines() for each in checked[0]), strict=True):
        assert line_old.split()[-4:] == line_new.split()[-4:], "accepted per round"


def texts(cell: nbformat.NotebookNode) -> str:
    """What a cell printed."""
    return "".join(
        output.get("text", "") for output in cell.get("outputs", []) if output.get("name", "stdout") == "stdout"
    )
