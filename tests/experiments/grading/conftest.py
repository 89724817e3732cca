"""lm-eval, or where it is not installed a stand-in with the part of its interface that is used here."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml


class TemplateLM:
    """The base class, of whose methods none is called here."""


class TaskManager:
    """The tasks of a folder alone."""

    def __init__(self, include_path: str | None = None):
        found = [yaml.safe_load(path.read_text()) for path in sorted(Path(include_path or "nowhere").glob("*.yaml"))]
        self.known = {task["task"]: task for task in found}
        self.all_tasks = list(self.known)


def simple_evaluate(
    model: Any, tasks: list[str], task_manager: TaskManager, confirm_run_unsafe_code: bool, **options: Any
) -> dict[str, Any]:
    """Tasks that generate an answer, graded by whether it is the expected one."""
    samples = {}
    for name in tasks:
        task = task_manager.known[name]
        if task.get("unsafe_code") and not confirm_run_unsafe_code:
            raise ValueError(f"Attempted to run task: {name}. Set confirm_run_unsafe_code=True to run this task.")
        lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        rows = [json.loads(line) for line in lines][: options["limit"]]
        how = task["generation_kwargs"] | (options["gen_kwargs"] or {})
        requests = [SimpleNamespace(args=(row["question"], how), task_name=name) for row in rows]
        answers = model.generate_until(requests)
        samples[name] = [
            {
                "doc_id": number,
                "filter": "none",
                "metrics": ["exact_match"],
                "exact_match": float(answer == row["answer"]),
            }
            for number, (row, answer) in enumerate(zip(rows, answers, strict=True))
        ]
    return {"samples": samples}


@pytest.fixture(autouse=True)
def lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes lm-eval importable."""
    if importlib.util.find_spec("lm_eval") is not None:
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        return
    modules = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "experiments.grading.harness", raising=False)
