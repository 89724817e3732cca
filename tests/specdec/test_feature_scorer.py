"""A head that reads pairs knows all pairs of its sequence, whoever has drafted them."""

import pytest
import torch

from drafters.choice import ChoiceDrafter
from drafters.eagle import EagleDrafter
from drafters.merged import MergedDrafter
from drafters.suffix import SuffixDrafter
from experiments.bench.synthetic import SyntheticDrafter
from specdec.drafting.feature_scorer import FeatureScorer
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import eagle_head
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

PROMPT = [5, 3, 8, 1, 9, 2]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Logits after the root of the only request, by the length before the root."""
    found: dict[int, torch.Tensor] = {}
    original = FeatureScorer.root_logits

    def watched(scorer: FeatureScorer, slots: object) -> torch.Tensor:
        logits = original(scorer, slots)  # type: ignore[arg-type]
        found[int(slots.on_host.lengths[0])] = logits[0, -1].clone()  # type: ignore[attr-defined]
        return logits

    monkeypatch.setattr(FeatureScorer, "root_logits", watched)
    return found


def decoded(target: Target, drafter: Drafter, prompt: list[int], tokens: int) -> list[int]:
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    with Engine(target, drafter, RejectionVerifier(), max_length=96, recording="off") as engine:
        (done,) = engine.generate([prompt], sampling)
    return [*prompt, *done.token_ids]


def test_drafts_of_another_drafter_may_be_longer_than_the_window(seen: dict[int, torch.Tensor]) -> None:
    target = Target(tiny_model(vocab_size=32))
    head = eagle_head(target.model)
    always_right = SyntheticDrafter(accept=1.0, depth=9)  # nine tokens per round, and the head drafts one
    sequence = decoded(target, MergedDrafter(always_right, EagleDrafter(head, 1)), PROMPT, 40)
    together = dict(seen)
    assert len(together) >= 4 and max(together) > len(PROMPT) + 20
    for length, logits in together.items():
        seen.clear()
        decoded(target, EagleDrafter(head, 1), sequence[: length + 1], 4)
        torch.testing.assert_close(logits, seen[length], msg=f"after {length} tokens")


def test_rounds_that_the_other_drafter_drafts_alone(seen: dict[int, torch.Tensor]) -> None:
    target = Target(tiny_model(vocab_size=32))
    head = eagle_head(target.model)
    again = PROMPT * 6  # the look-up drafts many tokens, of which few are accepted, and then the head drafts
    choice = ChoiceDrafter(SuffixDrafter(max_draft_tokens=16), EagleDrafter(head, 2), start=0.5)
    sequence = decoded(target, choice, again, 40)
    together = dict(seen)
    for length, logits in together.items():
        seen.clear()
        decoded(target, EagleDrafter(head, 2), sequence[: length + 1], 4)
        torch.testing.assert_close(logits, seen[length], msg=f"after {length} tokens")
    assert together, "the head has drafted, too"
