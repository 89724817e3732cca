"""The right answers to a finished run's prompts, by its manifest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.config.sections import build
from experiments.datasets.files import rows
from experiments.datasets.jsonl import Jsonl
from experiments.datasets.prompt import choose, fingerprint
from experiments.grading.references import Reference, by_question, reference_of

_KNOWN = 'GSM8K ("answer" with "#### 18"), HumanEval ("entry_point" and "test") or MBPP ("test_list")'


def check_samples(manifests: Sequence[Mapping[str, Any]], k: int) -> None:
    """Refuse a k that needs more samples than a run has, before anything is graded.

    Raises:
        ValueError: There are too few.
    """
    for manifest in manifests:
        samples = manifest["config"].get("sampling", {}).get("n", k)
        if samples < k:
            raise ValueError(f"k={k}: pass@{k} needs {k} samples of every prompt, and a run has sampling.n={samples}")


def references_of(folder: Path, manifest: Mapping[str, Any], answers: str | None) -> dict[str, Reference]:
    """Right answers to the prompts of a run, by prompt id. Prompts of several turns have none.

    Args:
        folder: The run's, for messages.
        manifest: The run's.
        answers: A file of the benchmark with its answers; None for the file that the prompts came from.

    Raises:
        ValueError: The dataset has changed since the run, or there are no answers.
    """
    dataset = build(OmegaConf.create({"dataset": manifest["config"]["dataset"]}), "dataset")
    prompts, _ = choose(dataset)
    if fingerprint(prompts) != manifest["prompts_hash"]:
        raise ValueError(
            f"the prompts of {folder} are no longer those of its dataset: its file has changed since the run, or is "
            f"another one"
        )
    single = {prompt.id: prompt.turns[0] for prompt in prompts if len(prompt.turns) == 1}
    if answers is not None:
        found = by_question([row for _, row in rows(answers)], single)
        source = f"{answers} has no answer to any prompt of {folder}"
    elif isinstance(dataset, Jsonl):
        everything = {name: reference_of(row) for name, row in dataset.rows()}
        found = {name: value for name in single if (value := everything.get(name)) is not None}
        source = f"{dataset.file}, which {folder} decoded, has no answers"
    else:
        found = {}
        source = f"{folder} decoded {type(dataset).__name__.lower()} prompts, which have no right answers"
    if not found:
        raise ValueError(f"{source}: give answers=FILE, the original file of {_KNOWN}")
    return found
