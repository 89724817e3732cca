"""Backends behind whole models: the tokens that they give, which one is picked, and what they refuse."""

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from drafters.model import ModelDrafter
from specdec.attention import BACKENDS, AttentionBackend, call
from specdec.checks.reference import reference_decode
from specdec.doctor.findings import chosen
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.facts import find
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from tests.components import DISTANCE, DRAFTERS, TREE, fitting, perturbed
from tests.models import tiny_model
from tests.verifiers.cases import complete

ROOT = Path(__file__).parents[2]
PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 4]


def _levels(model: PreTrainedModel) -> ModelDrafter:
    """A drafter whose own forwards go down the tree level by level, through the kernel as well."""
    return ModelDrafter(perturbed(model, DISTANCE), TREE, sampling="deterministic", attention="triton")


@pytest.mark.parametrize(
    ("architecture", "layers", "drafter"),
    [
        ("llama", 1, _levels),
        complete("gemma2", 2, DRAFTERS["ngram"], strong=False),
        complete("mistral_sliding", 1, DRAFTERS["medusa"], strong=False),
    ],
    ids=["llama", "gemma2", "mistral"],
)
def test_the_kernel_decodes_as_the_model_itself(
    architecture: str, layers: int, drafter: Callable[[PreTrainedModel], Drafter]
) -> None:
    """Prompts longer than the windows, a slot that is used twice, trees of the drafter's own shape."""
    model = tiny_model(architecture, layers=layers)
    made = drafter(model)
    engine = Engine(Target(model), made, fitting(made), max_batch_size=2, max_length=32, attention="triton")
    assert engine.runner.backend is BACKENDS["triton"]
    sampling = SamplingParams(max_new_tokens=5)
    outputs = engine.generate(PROMPTS, sampling)
    wanted = [reference_decode(model, prompt, sampling) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(step.accepted for output in outputs for step in output.steps) > 0  # trees were kept, too


class _Failing(type(BACKENDS["grouped"])):
    """A backend that gives wrong numbers: it lets every query see all keys of its row."""

    def prepare(self, *args):
        view = super().prepare(*args)
        return type(view)(view.cache, [torch.zeros_like(mask) for mask in view.masks])


class _Missing(type(BACKENDS["grouped"])):
    def check(self, model):
        return "it is not installed"


def test_auto_says_why_others_were_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: dict[str, AttentionBackend] = {"absent": _Missing(), "wrong": _Failing(), **BACKENDS}
    monkeypatch.setattr("specdec.target.facts.BACKENDS", backends)
    found = find(tiny_model(), attention="eager")
    assert (found.name, found.reason) == ("eager", "eager")
    found = find(tiny_model())
    assert found.name == "grouped"
    assert found.reason.startswith("grouped (auto; not absent: it is not installed; not wrong: its logits ")


def test_without_triton_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"attention='triton': Triton is not installed .* use attention='auto'"):
        ModelRunner(tiny_model(), max_batch_size=1, max_length=8, attention="triton")
    monkeypatch.setattr("specdec.machine.is_native", lambda *args: True)  # asks the GPU
    rows = dict(chosen(torch.device("cuda"), default_threads=1))
    assert rows["attention"].startswith("grouped, because Triton is not installed")


def test_what_the_kernel_is_not_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: PreTrainedModel, words: str, attention: str = "triton") -> None:
        with pytest.raises(ValueError, match=words):
            ModelRunner(model, max_batch_size=1, max_length=8, attention=attention)

    refused(tiny_model(layers=1), "attention='flash': .* auto, triton, grouped, dense, eager", attention="flash")
    refused(tiny_model(layers=1).double(), "float64")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(tiny_model(layers=1), "on cpu")


@pytest.mark.parametrize(("change", "words"), [("key", "changes keys or values"), ("mask", "changes the mask")])
def test_a_model_that_goes_behind_the_cache_is_noticed(
    change: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads the cache, so what a model does to keys or masks afterwards would be lost without a word."""
    model = tiny_model(layers=1)
    function = call.attention

    def changing(module, query, key, value, attention_mask, **kwargs):
        if change == "key":
            key = key * 2
        else:
            attention_mask = attention_mask + 1
        return function(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(call.AttentionInterface._global_mapping, call.NAME, changing)
    with pytest.raises(ValueError, match=words):
        ModelRunner(model, max_batch_size=1, max_length=8, attention="triton")


def test_the_core_needs_no_triton() -> None:
    """Nothing of ours imports the kernel before a model asks for it (transformers does, where it is installed)."""
    with_triton = {"tree_kernel.py", "tree_attention.py"}
    for file in (ROOT / "specdec").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom) and file.name not in with_triton:
                assert not re.search(r"\b(tree_kernel|tree_attention)\b", ast.unparse(node)), file
