"""The verdict on a verifier: right on exact and lossy rules, and an error for one that promises too much."""

from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from experiments.check_verifier import check
from specdec.tree import DraftTree
from verifiers import RejectionVerifier

Configure = Callable[..., DictConfig]
SMALL = ("vocab=2", "tables=1", "temperatures=[1]")


class NoResidual(RejectionVerifier):
    """Says that it is exact, and emits from p after a rejection."""

    def next_law(self, tree: DraftTree, target_probs: Tensor, stop: Tensor) -> Tensor:
        return target_probs[torch.arange(len(stop)), stop]


def test_an_exact_rule(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    done = check(configure("check_verifier", "verifier=traversal", *SMALL))
    assert max(case.tv for case in done) < 1e-12
    assert all(case.accepted == pytest.approx(case.known["traversal"]) for case in done)
    assert {case.shape for case in done} > {"chain 3", "2 x 2"}
    assert all("block" in case.known for case in done if case.shape == "chain 3")
    text = " ".join(capsys.readouterr().out.split())
    assert "TraversalVerifier is exact, over" in text and "It says of itself: exact." in text


def test_a_lossy_rule(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    done = check(configure("check_verifier", "verifier=lenient", *SMALL))
    assert {case.shape for case in done} == {"chain 3"}, "it takes chains only"
    text = " ".join(capsys.readouterr().out.split())
    assert "LenientVerifier is not exact" in text and "It says of itself: lossy." in text


def test_a_rule_that_promises_too_much(configure: Configure) -> None:
    config = configure("check_verifier", f"verifier._target_={NoResidual.__module__}.NoResidual", *SMALL)
    with pytest.raises(ValueError, match="NoResidual says that it is exact and is not: total variation 0"):
        check(config)


@pytest.mark.parametrize("bad", ["vocab=1", "tables=0", "seed=x", "temperatures=[0]", "temperatures=[]"])
def test_bad_settings(configure: Configure, bad: str) -> None:
    with pytest.raises(ValueError, match=f"^{bad.split('=')[0]}="):
        check(configure("check_verifier", bad))
