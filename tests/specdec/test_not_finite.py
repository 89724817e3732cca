"""Rows whose logits are not finite: they end their request and nothing else, also in rounds that are played ahead."""

import random

import pytest
import torch

from specdec import Batch, Drafter, DraftSampling, DraftTree, Engine, Paging, SamplingParams, Session, Sizes, Target
from specdec.engine.running import RunningRequests
from tests.models import tiny_model
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB = 64


class Poisoned(Drafter):
    """Drafts a token that makes NaN of all that sees it, in some rounds of some requests, and otherwise one guess."""

    max_nodes = max_depth = 1
    is_chain = True
    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(self, bad: int, share: int):
        self.bad, self.share = bad, share

    def bind(self, target: Target, sizes: Sizes) -> Session:
        return PoisonedSession(self)


class PoisonedSession(Session):
    lookback = 0

    def __init__(self, drafter: Poisoned):
        self._drafter = drafter

    def propose(self, batch: Batch) -> DraftTree:
        poisoned = ((batch.keys ^ (batch.rounds * 0x9E3779B1)) * 0x2545F491 >> 24) % self._drafter.share == 0
        token = torch.where(poisoned, self._drafter.bad, (batch.roots * 5 + 3) % self._drafter.bad)
        parents = torch.tensor([[-1, 0]], device=batch.device).expand(len(batch), -1)
        return DraftTree.build(torch.stack([batch.roots, token], 1), parents, max_depth=1, max_children=1)


@pytest.mark.parametrize("seed", [1, *(complete(seed, strong=False) for seed in range(2, 12))])
@pytest.mark.parametrize("recording", ["rounds", "off"])
def test_what_was_not_finite_ends_its_request_and_nothing_else(recording: str, seed: int) -> None:
    """Also where the next round has been begun: slots, pages and beginnings that others share are clean behind it."""
    model, rng, bad = tiny_model(vocab_size=VOCAB, layers=2), random.Random(seed), VOCAB - 1
    with torch.no_grad():
        model.get_output_embeddings().weight[bad] = model.get_output_embeddings().weight[
            0
        ]  # never said: ties go to the lower id
    prompts = [[rng.randrange(9) for _ in range(rng.choice([1, 2, 5, 17]))] for _ in range(24)]
    sampling = [SamplingParams(max_new_tokens=14, seed=seed, stream=number) for number in range(len(prompts))]
    plain = Engine(Target(model), max_length=40).generate(prompts, sampling)
    assert not any(bad in output.token_ids for output in plain)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    paging = rng.choice([None, Paging(shared=True), Paging(page_size=4, pages=40, shared=True, reserve=0.2)])
    parts = Target(model), Poisoned(bad, rng.choice([9, 25])), RejectionVerifier()
    options = {"attention": rng.choice(["dense", "auto"]), "recording": recording, "max_length": 40}
    alone = [Engine(*parts, **options).generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    engine = Engine(*parts, max_batch_size=3, cache=paging, **options)
    for outputs in (engine.generate(prompts, sampling) for _ in range(2)):
        for output, single, whole in zip(outputs, alone, plain, strict=True):
            assert (output.token_ids, output.finish_reason) == (single.token_ids, single.finish_reason)
            fine = output.finish_reason == "length"
            assert output.token_ids == whole.token_ids[: None if fine else len(output.token_ids)]
        assert {output.finish_reason for output in outputs} == {"error", "length"}


def test_a_slot_that_is_left_as_it_is_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = RunningRequests.leave
    monkeypatch.setattr(RunningRequests, "leave", lambda self, request, *, sound=True: leave(self, request))
    with pytest.raises(AssertionError):
        test_what_was_not_finite_ends_its_request_and_nothing_else("rounds", 1)
