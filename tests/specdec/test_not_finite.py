"""Numbers that are not finite: which request they end, and when they end none."""

import numpy as np
import pytest
import scipy.stats
import torch

import specdec.engine.turns
from drafters import ModelDrafter
from specdec import Batch, DraftSampling, DraftTree, Engine, SamplingParams, StatelessDrafter, Target, TreeShape
from specdec.random import Purpose, uniforms
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from tests.specdec.test_engine_failures import PROMPTS, SAMPLING, VOCAB, Gapped
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [o.token_ids for o in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize("kind", ["model_tree_without_replacement", complete("ngram", strong=False)])
def test_nan_logits_near_the_last_position_end_that_request_only(kind: str) -> None:
    """The row has no room for what a verdict without meaning would emit."""
    model = tiny_model(vocab_size=VOCAB, layers=2)
    bad, length = VOCAB - 1, 24
    prompts = [[*range(1, 23), bad], [1, 2, 1, 2, 1]]
    sampling = [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=8)]
    wanted = Engine(Target(model), max_length=length).generate(prompts[1:], sampling[1:])[0].token_ids
    assert bad not in wanted
    drafter = DRAFTERS[kind](model)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=length)
    failed, other = engine.generate(prompts, sampling)
    assert failed.finish_reason == "error" and "not finite in round 0" in str(failed.error)
    assert other.token_ids == wanted


@pytest.mark.parametrize(
    ("batch", "kv_cache"),
    [(2, "int8"), *(complete(*each, strong=False) for each in ((1, None), (2, None), (2, "fp8")))],
)
def test_nan_logits_end_that_request_only_and_go_with_it(batch: int, kv_cache: str | None) -> None:
    model, bad, options = tiny_model(vocab_size=VOCAB, layers=2), VOCAB - 1, {"max_length": 64, "kv_cache": kv_cache}
    drafter = ModelDrafter(perturbed(model, 0.1), [2, 1])
    wanted = [o.token_ids for o in Engine(Target(model), **options).generate(PROMPTS, SAMPLING)]
    assert not any(bad in tokens for tokens in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=batch, **options)
    outputs = engine.generate([PROMPTS[0], [1, 2, bad, 3], *PROMPTS[1:]], SAMPLING)
    failed = outputs.pop(1)
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    assert "not finite in round" in str(failed.error)
    assert [o.token_ids for o in outputs] == wanted
    # The slot that held NaN is clean again.
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


class Poisoned(Gapped):
    """Drafts a bad token beside the right ones."""

    is_chain = False
    bad = VOCAB - 1

    def propose(self, batch: Batch) -> DraftTree:
        tree = super().propose(batch)
        tokens = tree.tokens.clone()
        tokens[:, 1] = self.bad
        return DraftTree.build(tokens, tree.parents, max_children=2)


def test_a_rejected_token_with_nan_logits_ends_nothing(wanted: list[tuple[int, ...]]) -> None:
    """Its keys spoil the whole tree through the masks: the row goes on from its root, without drafts for a round."""
    model = tiny_model(vocab_size=VOCAB, layers=2)
    assert not any(Poisoned.bad in output for output in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[Poisoned.bad] = float("nan")
    for sampling in (SAMPLING, SamplingParams(max_new_tokens=12, temperature=1e-5)):
        engine = Engine(Target(model), Poisoned(wanted), RejectionVerifier(), max_batch_size=3, max_length=64)
        outputs = engine.generate(PROMPTS, sampling)
        assert [o.token_ids for o in outputs] == wanted
        broken = [step for output in outputs for step in output.steps if step.error is not None]
        assert broken and all(step.token_ids == () and step.finish_reason is None for step in broken)
        assert all("not finite in round" in str(step.error) for step in broken)


class Guessing(StatelessDrafter):
    """Drafts one token: always the bad one, or one drawn evenly from all."""

    max_nodes = max_depth = 1
    is_chain = True
    bad = 3

    def __init__(self, law: DraftSampling, vocab: int):
        self.laws, self.law, self.vocab = frozenset([law]), law, vocab

    def propose(self, batch: Batch) -> DraftTree:
        drafted = torch.full_like(batch.roots, self.bad)
        q = None
        if self.law is DraftSampling.IID:
            drafted = (uniforms(batch.keys, batch.rounds, Purpose.DRAFT, 1)[:, 0] * self.vocab).long()
            q = torch.full((len(batch), 2, self.vocab), 1 / self.vocab)
        tokens = torch.stack([batch.roots, drafted], dim=1)
        return DraftTree.from_shape(TreeShape.chain(1), tokens, sampling=self.law, draft_probs=q)


def first_tokens(law: DraftSampling) -> tuple[float, int]:
    """Chi-square p-value of the first tokens of sampled requests, and how many requests had none."""
    vocab, samples = 8, 2000
    model = tiny_model(vocab_size=vocab, scale=1.5, layers=1)
    with torch.no_grad():
        p = model(torch.tensor([[1, 2]])).logits[0, -1].double().softmax(-1).numpy()
        model.get_input_embeddings().weight[Guessing.bad] = float("nan")
    engine = Engine(Target(model), Guessing(law, vocab), RejectionVerifier(), max_batch_size=500, max_length=16)
    with shapes_unchecked():
        outputs = engine.generate([[1, 2]], SamplingParams(max_new_tokens=2, temperature=1.0, n=samples, seed=5))
    firsts = [output.token_ids[0] for output in outputs if output.token_ids]
    counts = np.bincount(firsts, minlength=vocab)
    return float(scipy.stats.chisquare(counts, p / p.sum() * len(firsts)).pvalue), samples - len(firsts)


@pytest.mark.full
def test_going_on_without_a_chosen_draft_follows_the_target() -> None:
    """A correct engine fails this with another seed once in a million times."""
    p_value, ended = first_tokens(DraftSampling.DETERMINISTIC)
    assert p_value > 1e-6 and ended == 0


def test_going_on_without_a_drawn_draft_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: draws are forgotten, too. So such a request ends with an error instead."""
    assert first_tokens(DraftSampling.IID)[1] > 100
    monkeypatch.setattr(specdec.engine.turns, "repeatable", lambda played: played.read.proposed_nodes > 0)
    p_value, ended = first_tokens(DraftSampling.IID)
    assert p_value < 1e-6 and ended == 0
