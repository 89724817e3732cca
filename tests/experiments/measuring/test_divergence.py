"""The verdict on whole methods: honest ones end as equal or as ties in every dtype, broken ones as not lossless.

The bundled models run, because the verdict rests on what a dtype does to trained logits.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import ModelDrafter
from experiments.datasets.stdlib import Stdlib
from experiments.measuring import measure as loop
from experiments.measuring.jobs import Job, prepare
from experiments.measuring.measure import Contender, find_divergence, measure
from experiments.results.lossless import Divergence, Verdict, judge, worst
from experiments.results.records import PLAIN, Record
from specdec import DraftTree, Engine, Laws, SamplingParams, Target
from specdec.checks.ties import Tie
from tests.experiments.test_run import WrongRoot
from verifiers.block import TraversalVerifier

Setting = tuple[str, str | None]
"""Dtype and quantization of the target."""


@cache
def target(dtype: str, quantization: str | None) -> Target:
    return Target.from_pretrained("bundled/target", dtype=dtype, quantization=quantization)


def tokenizer() -> Any:
    return target("float32", None).tokenizer


def jobs(count: int, tokens: int) -> list[Job]:
    every = Stdlib(prompt_tokens=48).load()
    prompts = every[:: len(every) // count][:count]
    return prepare(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True), tokenizer())


def verdict(engine: Engine, tokens: int = 16) -> tuple[dict[str, Any], Divergence | None]:
    """The verdict on the method's records, next to plain decoding on the same engine, and the worst divergence."""
    written: list[Record] = []
    with engine:
        contenders = [Contender(PLAIN, engine, speculate=False), Contender("method", engine)]
        list(measure(contenders, jobs(2, tokens), write=written.append))
    outputs = [record for record in written if record.method == "method"]
    found = judge(outputs)
    assert found is not None and len(outputs) == 2 and all(each.equals_plain is not None for each in outputs)
    return found, worst(outputs)


def engine_of(setting: Setting, **options: Any) -> Engine:
    """An engine with the bundled pair, if the options name no other parts."""
    drafter = ModelDrafter.from_pretrained("bundled/drafter", shape=[2, 2, 1], dtype=setting[0])
    usual = {"drafter": drafter, "verifier": TraversalVerifier(), "max_batch_size": 2, "max_length": 256}
    return Engine(target(*setting), **usual | options)


@pytest.mark.parametrize(
    "setting", [("bfloat16", None), pytest.param(("bfloat16", "int8"), marks=pytest.mark.full)], ids=str
)
def test_an_honest_method_is_never_called_broken(setting: Setting) -> None:
    found, _ = verdict(engine_of(setting))
    assert found["lossless"] != Verdict.NOT_LOSSLESS, found


def test_on_an_invariant_engine_nothing_explains_another_token() -> None:
    (job,) = jobs(1, 4)
    engine = engine_of(("float32", None), invariant=True)
    found = find_divergence(engine, job, [1], [2], exactness="exact")
    assert found["tie_bound"] == 0.0 and found["margin"] > 0


class AcceptsAll(TraversalVerifier):
    """Says that it is exact, and accepts whatever is drafted first."""

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        deepest = torch.where(tree.valid, tree.depth, -1).argmax(-1, keepdim=True)
        stop = torch.zeros_like(target_probs[..., 0]).scatter_(1, deepest, 1.0)
        return Laws(stop, lambda stop: target_probs[torch.arange(len(stop)), stop])


def corrupted_commit(setting: Setting) -> Engine:
    """Keys and values of an accepted path stay where the tree had them, instead of moving to their places."""
    engine = engine_of(setting)
    engine.runner.cache.commit = lambda *_: None  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    ("broken", "setting"),
    [
        (lambda setting: engine_of(setting, verifier=AcceptsAll()), ("float32", None)),
        (corrupted_commit, ("float32", None)),
        pytest.param(corrupted_commit, ("bfloat16", "int8"), marks=pytest.mark.full),
    ],
)
def test_a_broken_method_is_not_lossless(broken: Callable[[Setting], Engine], setting: Setting) -> None:
    found, largest = verdict(broken(setting), tokens=24)
    assert found["lossless"] == Verdict.NOT_LOSSLESS and largest is not None, found
    assert largest.margin == found["largest_margin"] and largest.tie_bound == found["tie_bound"]
    ours, plains = largest.tokens
    assert ours != plains
    assert largest.texts == (tokenizer().decode([ours]), tokenizer().decode([plains]))


def test_an_examination_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*arguments: object, **more: object) -> Tie:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop, "examine", broken)
    found, _ = verdict(engine_of(("float32", None), drafter=WrongRoot(max_draft_tokens=4)), 8)
    assert found["lossless"] == Verdict.NOT_LOSSLESS and found["largest_margin"] is None
    assert "could not be examined" in caplog.text and "RuntimeError: out of memory" in caplog.text
