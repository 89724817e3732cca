"""A head beside a look-up whose paths are deeper than its own: rounds then commit more than the head could draft."""

from collections.abc import Callable
from typing import Any

import pytest

from drafters.block import BlockDrafter
from drafters.choice import ChoiceDrafter
from drafters.combined import CombinedDrafter
from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from drafters.merged import MergedDrafter
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from drafters.suffix import SuffixDrafter
from specdec.checks.drafter import check_drafter
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Outcome
from tests.components import block_head, eagle3_head, medusa_heads, mtp_head, perturbed
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from verifiers import RejectionVerifier

DEEP = 20
HEADS: dict[str, Callable[[Any], Drafter]] = {
    "eagle": lambda model: EagleDrafter(eagle3_head(model), 2),
    "mtp": lambda model: MTPDrafter(mtp_head(model), 2),
    "block": lambda model: BlockDrafter(block_head(model), 2),
    "medusa": lambda model: MedusaDrafter(medusa_heads(model), 2),
    "model": lambda model: ModelDrafter(perturbed(model, 0.2), 2),
}
CASES = [
    ("eagle", MergedDrafter),
    *(
        pytest.param(head, kind, marks=pytest.mark.full)
        for head, kind in (
            ("block", MergedDrafter),
            ("mtp", MergedDrafter),
            ("medusa", ChoiceDrafter),
            ("model", ChoiceDrafter),
        )
    ),
]


def looping() -> Any:
    """A target that repeats itself soon, so that a look-up is right for long."""
    return tiny_model(vocab_size=12, layers=2)


def combined(kind: type[CombinedDrafter], head: str, model: Any) -> CombinedDrafter:
    return kind(lookup=SuffixDrafter(DEEP, shared=False), model=HEADS[head](model))


@pytest.mark.parametrize(("head", "kind"), CASES)
def test_long_rounds_lose_nothing(head: str, kind: type[CombinedDrafter]) -> None:
    """The longest rounds end where the cache does. Several prompts make rounds of unequal lengths."""
    model = looping()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6], [2, 2, 2, 2]]
    longest = 0

    class Counting(Wrapped):
        def observe(self, outcome: Outcome) -> None:
            nonlocal longest
            if outcome.path is not None:
                longest = max(longest, int(outcome.counts.max()))
            super().observe(outcome)

    sampling = [SamplingParams(max_new_tokens=64 - len(prompt)) for prompt in prompts]
    drafter = Wrapping(combined(kind, head, model), Counting)
    with Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=4, max_length=64) as engine:
        done = [output.token_ids for output in engine.generate(prompts, sampling)]
        assert done == [output.token_ids for output in engine.generate(prompts, sampling, speculate=False)]
    assert longest > 8, "the look-up's paths are accepted, and deeper than the head's"


@pytest.mark.full
@pytest.mark.parametrize(("head", "kind"), CASES)
def test_drafts_after_long_rounds_are_those_of_a_new_request(head: str, kind: type[CombinedDrafter]) -> None:
    model = looping()
    findings = check_drafter(
        lambda: combined(kind, head, model), Target(model), verifier=RejectionVerifier(), rounds=8, draws=0, rules=()
    )
    assert [finding for finding in findings if finding.failed] == []
