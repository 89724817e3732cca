"""The verdict on whole methods: honest ones end as equal or as ties in every dtype, broken ones as not lossless.

The bundled models run, because the verdict rests on what a dtype does to trained logits.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter
from experiments.datasets.stdlib import Stdlib
from experiments.measuring import divergence
from experiments.measuring.jobs import Job, prepare
from experiments.measuring.measure import Contender, measure
from experiments.results.frame import Figures
from experiments.results.lossless import Verdict, judge
from experiments.results.records import PLAIN, Record
from specdec.batch import Batch
from specdec.checks.ties import Tie
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Laws, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from tests.verifiers.cases import complete
from verifiers.block import TraversalVerifier

DTYPES = [
    ("float32", None),
    pytest.param("bfloat16", None, marks=pytest.mark.full),
    pytest.param("float64", None, marks=pytest.mark.full),
    pytest.param("bfloat16", "int8", marks=pytest.mark.full),
]
DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "ngram": lambda dtype: NGramDrafter(max_draft_tokens=6, branches=2),
    "model": lambda dtype: ModelDrafter.from_pretrained("bundled/drafter", shape=[2, 2, 1], dtype=dtype),
    "medusa": lambda dtype: MedusaDrafter.from_pretrained("bundled/medusa", dtype=dtype),
}


@cache
def target(dtype: str, quantization: str | None) -> Target:
    return Target.from_pretrained("bundled/target", dtype=dtype, quantization=quantization)


def jobs(count: int, tokens: int) -> list[Job]:
    every = Stdlib(prompt_tokens=48).load()
    prompts = every[:: len(every) // count][:count]
    tokenizer = target("float32", None).tokenizer
    assert tokenizer is not None
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return prepare(prompts, sampling, tokenizer, max_length=4096)[0]


def records(engine: Engine, count: int = 4, tokens: int = 32) -> list[Record]:
    """The method's records, next to plain decoding on the same engine."""
    written: list[Record] = []
    with engine:
        contenders = [Contender(PLAIN, engine, speculate=False), Contender("method", engine)]
        list(measure(contenders, jobs(count, tokens), write=written.append))
    return [record for record in written if record.method == "method"]


def verdict(engine: Engine, count: int = 4, tokens: int = 32) -> Figures:
    found = judge(records(engine, count, tokens))
    assert found is not None
    return found


def engine_of(
    dtype: str,
    drafter: Drafter,
    rule: Verifier | None = None,
    *,
    quantization: str | None = None,
    batch: int = 2,
    invariant: bool = False,
) -> Engine:
    loaded, rule = target(dtype, quantization), rule or TraversalVerifier()
    return Engine(loaded, drafter, rule, max_batch_size=batch, max_length=256, invariant=invariant)


# ---------------------------------------------------------------- honest methods


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        complete(name, dtype, quantization, strong=name == "model" and dtype != "float64" and quantization is None)
        for name in DRAFTERS
        for dtype in ("float32", "bfloat16", "float64")
        for quantization in (None, "int8")
        if dtype == "bfloat16" or quantization is None
    ],
)
def test_an_honest_method_is_never_called_broken(name: str, dtype: str, quantization: str | None) -> None:
    found = verdict(engine_of(dtype, DRAFTERS[name](dtype), quantization=quantization))
    assert found.verdict is not Verdict.NOT_LOSSLESS, found
    if dtype in ("float32", "float64"):
        assert found.verdict is Verdict.EQUAL, found
    assert found.compared == 4


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_on_an_invariant_engine_every_output_is_equal(name: str, quantization: str | None) -> None:
    """In bfloat16, where as many outputs of an ordinary engine diverge now and then."""
    engine = engine_of("bfloat16", DRAFTERS[name]("bfloat16"), quantization=quantization, batch=4, invariant=True)
    found = verdict(engine, 12, 40)
    assert (found.verdict, found.compared) == (Verdict.EQUAL, 12), found


@pytest.mark.parametrize("invariant", [False, True])
def test_a_true_tie_is_a_tie(invariant: bool) -> None:
    """Two tokens of one logit, between which the method takes the other one: no dtype tells them apart.

    But on an invariant engine nothing explains that two methods take different ones.
    """
    (job,) = jobs(1, 4)
    engine = engine_of("float32", NGramDrafter(max_draft_tokens=2), invariant=invariant)
    weight = engine.target.model.get_output_embeddings().weight
    first = engine.generate([job.prompt_ids], job.sampling, speculate=False)[0].token_ids[0]
    other = (first + 1) % len(weight)
    before = weight.detach()[other].clone()
    weight.data[other] = weight.data[first]
    try:
        found = divergence.find_divergence(engine, job, [max(first, other)], [min(first, other)], exactness="exact")
        lossy = divergence.find_divergence(engine, job, [max(first, other)], [min(first, other)], exactness="lossy")
    finally:
        weight.data[other] = before
    if invariant:
        assert found["tie_bound"] == 0.0
    else:
        assert found["margin"] <= found["tie_bound"] < 1e-3
    assert lossy["tie_bound"] is None, "nobody judges a lossy rule"


# ---------------------------------------------------------------- broken ones


class WrongRoot(NGramDrafter):
    """Puts another token where the sequence's last one belongs, so that another sequence is verified."""

    def propose(self, batch: Batch) -> DraftTree:
        tree = super().propose(batch)
        tokens = tree.tokens.clone()
        tokens[:, 0] = (tokens[:, 0] + 1) % batch.vocab_size
        return replace(tree, tokens=tokens)


class AcceptsAll(TraversalVerifier):
    """Says that it is exact, and accepts whatever is drafted first."""

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        deepest = torch.where(tree.valid, tree.depth, -1).argmax(-1, keepdim=True)
        stop = torch.zeros_like(target_probs[..., 0]).scatter_(1, deepest, 1.0)
        return Laws(stop, lambda stop: target_probs[torch.arange(len(stop)), stop])


def wrong_root(dtype: str, quantization: str | None) -> Engine:
    return engine_of(dtype, WrongRoot(max_draft_tokens=4), quantization=quantization)


def accepts_all(dtype: str, quantization: str | None) -> Engine:
    return engine_of(dtype, DRAFTERS["model"](dtype), AcceptsAll(), quantization=quantization)


def corrupted_commit(dtype: str, quantization: str | None) -> Engine:
    """Keys and values of an accepted path stay where the tree had them, instead of moving to their places."""
    engine = engine_of(dtype, DRAFTERS["model"](dtype), quantization=quantization)
    engine.runner.cache.commit = lambda slots, lengths, path: None  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(("dtype", "quantization"), DTYPES)
@pytest.mark.parametrize("broken", [wrong_root, accepts_all, corrupted_commit])
def test_a_broken_method_is_not_lossless(
    broken: Callable[[str, str | None], Engine], dtype: str, quantization: str | None
) -> None:
    found = verdict(broken(dtype, quantization))
    assert found.verdict is Verdict.NOT_LOSSLESS, found
    assert found.worst is not None
    assert found.worst.margin == found.largest_margin and found.worst.tie_bound == found.tie_bound
    ours, plains = found.worst.tokens
    assert ours != plains
    tokenizer = target("float32", None).tokenizer
    assert tokenizer is not None
    assert found.worst.texts == (tokenizer.decode([ours]), tokenizer.decode([plains]))


def test_an_examination_that_fails_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object, **more: object) -> Tie:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(divergence, "examine", broken)
    found = verdict(wrong_root("float32", None), 2, 8)
    assert found.verdict is Verdict.NOT_LOSSLESS and found.largest_margin is None
    assert "could not be examined" in caplog.text and "RuntimeError: out of memory" in caplog.text
