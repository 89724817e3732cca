"""The better of two drafters per row: which one is chosen, and that the other one keeps up."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.choice import ChoiceDrafter, ChoiceSession
from drafters.medusa import MedusaDrafter
from drafters.merged import MergedDrafter
from drafters.model import ModelDrafter
from drafters.suffix import SuffixDrafter
from specdec.batch import Batch
from specdec.engine.engine import Engine
from specdec.interfaces import Session, Sizes
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome
from tests.components import medusa_heads, perturbed
from tests.forwards import outcome_of, prefill, slots_of
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.shapes import shapes_unchecked
from tests.test_distribution import LEVEL, SAMPLINGS, p_value
from tests.test_distribution import VOCAB as FEW
from verifiers import RejectionVerifier

VOCAB = 32
LOOPS = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
NEW = [5, 9, 2, 7, 1, 8, 3]


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB, layers=2)


class Asked(Wrapped):
    """Notes for which slots it drafts."""

    def __init__(self, inner: Session):
        super().__init__(inner)
        self.asked: list[list[int]] = []

    def propose(self, batch: Batch) -> DraftTree:
        self.asked.append(batch.on_host.slots.tolist())
        return super().propose(batch)


def chooser(model, **options) -> ChoiceSession:
    part = Wrapping(ModelDrafter(perturbed(model, 0.1), [2, 1], sampling="iid"), Asked)
    return ChoiceDrafter(SuffixDrafter(6), part, **options).bind(Target(model), Sizes(max_batch_size=3, max_length=64))


@torch.inference_mode()
def test_each_row_gets_the_better_draft(model) -> None:
    drafter, sequences = chooser(model, start=0.9), [NEW, LOOPS, NEW[::-1]]
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0), SamplingParams()]
    for slot, sequence in enumerate(sequences):
        drafter.admit(slot, sequence, params[slot])
    with shapes_unchecked():
        slots = slots_of(sequences, vocab_size=VOCAB, params=params)
        assert drafter.parts[0].rate(slots)[0] == 0 and drafter.parts[0].rate(slots)[1] > 0.9
        tree = drafter.propose(slots)
    assert drafter.parts[1].asked == [[0, 2]]  # the row that is looked up costs the model nothing
    assert tree.law[0, 1:5].tolist() == [1] * 4 and tree.law[2, 1:5].tolist() == [0] * 4
    assert tree.tokens[1][tree.valid[1]].tolist() == [2, 3, 4, 1, 2, 3, 4] and not tree.law[1].any()
    assert tree.parents[1, :3].tolist() == [-1, 0, 1] and tree.parents[0, :5].tolist() == [-1, 0, 0, 1, 2]
    assert tree.draft_probs is not None and tree.draft_probs[0, 0].sum() == pytest.approx(1)


def test_the_mean_follows_what_the_model_reaches(model) -> None:
    """A model that is always right is asked until the look-up promises more."""
    drafter = ChoiceDrafter(SuffixDrafter(8), Wrapping(ModelDrafter(model, 3), Asked), start=0.0, memory=0.5)
    with shapes_unchecked(), Engine(Target(model), drafter, RejectionVerifier(), max_length=64) as engine:
        engine.generate([NEW], SamplingParams(max_new_tokens=16, ignore_eos=True))
        assert engine.session._mean[0] > 2
        rounds = len(engine.session.parts[1].asked)
        engine.generate([LOOPS * 4], SamplingParams(max_new_tokens=1))
        assert engine.session._mean[0] == 0.0  # every request begins anew
    assert rounds >= 3


def knows_the_sequence(part: Wrapping, engine: Engine, slot: int) -> int:
    """Check that a model's cache is what a prefill of the sequence gives; returns the number of tokens it knows."""
    runner, scorer = part.session.models[0], part.session.inner.scorer
    known = min(int(scorer._known[slot]), engine._slots.length_of(slot) - 1)
    tokens = torch.from_numpy(engine._slots._host_tokens[slot : slot + 1, :known].astype(np.int64))
    fresh = ModelRunner(runner.model, max_batch_size=1, max_length=96, max_nodes=8)
    prefill(fresh, tokens, np.zeros(1, dtype=np.int64))
    for found, wanted in zip(runner.cache.tensors, fresh.cache.tensors, strict=True):
        assert torch.allclose(found[:, slot, :known], wanted[:, 0, :known], atol=1e-5)
    return known


@pytest.mark.parametrize("kind", ["choice", "merged"])
@torch.inference_mode()
def test_the_model_keeps_up_with_what_was_looked_up(model, kind: str) -> None:
    """After rounds of all kinds its cache holds what it would after a prefill of the sequence."""
    part = Wrapping(ModelDrafter(perturbed(model, 0.2), [2, 1]), Asked)
    drafter = {
        "choice": lambda: ChoiceDrafter(SuffixDrafter(6), part, start=0.7),
        "merged": lambda: MergedDrafter(SuffixDrafter(6), part),
    }[kind]()
    seen: list[Outcome] = []

    class Listens(Wrapped):
        def observe(self, outcome: Outcome) -> None:
            seen.append(outcome)
            super().observe(outcome)

    drafter = Wrapping(drafter, Listens)
    known = []
    long = SamplingParams(max_new_tokens=40, ignore_eos=True)
    # Its own output, which ends in a loop, is what the look-up is right about from the first round on.
    (output,) = Engine(Target(model), max_length=96).generate([NEW], long)
    with shapes_unchecked(), Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=3, max_length=96) as e:
        for prompt in ([*NEW, *output.token_ids[:24]], NEW, [*NEW, *output.token_ids]):
            e.submit(prompt, replace(long, max_new_tokens=20))
        for _ in range(6):
            e.step()
            known += [knows_the_sequence(part, e, slot) for slot in e._slots.running]
    assert max(known) > 30
    paths = [each.host.path for each in seen if each.path is not None]
    beyond = 4 if kind == "merged" else 0  # a look-up's nodes stand behind the model's four
    assert any((path > beyond).any() for path in paths) and len(part.session.asked) >= 3


def test_a_part_may_want_hidden_states(model) -> None:
    drafter = ChoiceDrafter(SuffixDrafter(6), MedusaDrafter(medusa_heads(model), [2, 1]), start=0.5)
    plain = Engine(Target(model), max_batch_size=2, max_length=64)
    wanted = SamplingParams(max_new_tokens=20)
    with shapes_unchecked(), Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=64) as e:
        assert e.session.hidden_layers == (-1,)
        found = [each.token_ids for each in e.generate([LOOPS, NEW], wanted)]
        assert found == [each.token_ids for each in plain.generate([LOOPS, NEW], wanted)]


def test_trust_follows_how_often_the_look_up_was_right(model) -> None:
    drafter = chooser(model, memory=0.5)
    drafter._by_model[:], drafter._rated[:] = [False, False, True], [4.0, 0.0, 2.0]
    drafter._trust[:] = [1.0, 1.0, 0.5]
    outcome = outcome_of(torch.zeros(3, 2, dtype=torch.long), [2, 1, 2], starts=[5, 5, 5], path=[[1], [-1], [-1]])
    with shapes_unchecked():
        drafter.observe(outcome)
    # One of four expected tokens; nothing was expected; the model's round brings trust back a little.
    assert drafter._trust.tolist() == pytest.approx([0.625, 1.0, 0.525])
    assert drafter._mean.tolist() == pytest.approx([1.0, 1.0, 1.0])


class Peeks(Wrapped):
    """Mutant: keeps the model's draft only if its first token is one of low numbers, which looks at what was drawn."""

    def propose(self, batch: Batch) -> DraftTree:
        drawn = super().propose(batch)
        if drawn.width == 1:
            return drawn
        kept = drawn.tokens[:, 1] < 2
        return drawn.limited(torch.where(kept, drawn.max_depth, 0))


def test_a_choice_that_looks_at_the_draft_is_biased() -> None:
    model = tiny_model("llama", vocab_size=FEW, scale=1.5, layers=2)
    drafter = Wrapping(ModelDrafter(perturbed(model, 0.6), 2), Peeks)
    assert p_value(model, drafter, RejectionVerifier(), SAMPLINGS["temperature 1"], samples=600) < LEVEL
