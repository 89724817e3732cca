"""P-EAGLE and PARD in training: masks of many drafts behind packed text, fewer from depth to depth."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.block_training import TrainedBlock
from drafters.heads.parallel import Masked, dropped
from drafters.heads.training import Anchors, TextBatch
from drafters.pard import TrainedPARD
from drafters.peagle import TrainedPEagle
from experiments.training.states import FrozenTarget
from specdec.target.target import Target
from tests.experiments.conftest import VOCAB_SIZE
from tests.experiments.training.test_heads import LM, alone, check, logits, packed, ready

HEADS: dict[str, Callable[[], Any]] = {
    "peagle": lambda: TrainedPEagle(depths=4, layers=2, hidden_layers=[1, 2, 3], keeps=0.5, mask_token_id=7),
    "pard": lambda: TrainedPARD(config=LM, depths=4, keeps=0.5, mask_token_id=7),
}


@torch.no_grad()
def slowly(head: Any, batch: TextBatch, frozen: FrozenTarget, root: int) -> Tensor:
    """The logits of one draft as they are served: its own document up to the root, and masks behind it."""
    own, at = alone(batch, root)
    masks = torch.full((1, head.depths - 1), 7)
    if isinstance(head, TrainedPARD):
        return head.head(torch.cat([own.tokens[:, : at + 1], masks], 1)).logits[0, at:]
    states = frozen(own)
    features = head.head.fuse([states.hidden[layer][:, :at] for layer in head.hidden_layers])
    fill = head.head.fuse([head.head.model.mask_hidden]).expand(1, head.depths - 1, -1)
    tokens = torch.cat([own.tokens[:, 1 : at + 1], masks], 1)
    return head.head(tokens, features=torch.cat([features, fill], 1)).logits[0, at - 1 :]


@pytest.mark.parametrize("name", HEADS)
def test_masks_behind_packed_text_are_each_draft_alone(name: str, target: Target, generator: torch.Generator) -> None:
    head, frozen, batch, anchors = ready(HEADS[name](), target)
    generator.manual_seed(0)
    every = head.eval().anchors(batch, generator)
    assert torch.equal(every.index, anchors.index) and 0 < anchors.valid[:, 1:].sum() < every.valid[:, 1:].sum()
    mine = logits(head, batch, frozen, anchors)
    check(mine, anchors, lambda root: slowly(head, batch, frozen, root))
    mine.tanh().mul(anchors.valid[:, :, None]).sum().backward()
    assert not [name for name, each in head.named_parameters() if each.grad is None or not each.grad.any()]


def test_a_mask_that_sees_another_draft_is_told(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: masks see those of all drafts of their row that are no deeper."""
    head, frozen, batch, _ = ready(HEADS["pard"](), target)
    anchors = head.eval().anchors(batch, torch.Generator())
    behind = Masked.behind

    def leaky(*arguments: Any, **more: Any) -> Masked:
        found = behind(*arguments, **more)
        length = batch.tokens.shape[1]
        found.seen[:, length:, length:] = torch.ones(found.masks, found.masks).tril().bool()
        return found

    monkeypatch.setattr(Masked, "behind", leaky)
    mine = logits(head, batch, frozen, anchors)
    wanted = torch.stack([slowly(head, batch, frozen, root) for root in anchors.index.tolist()])
    far = (mine - wanted).abs().amax(-1) * anchors.valid
    assert far[:, 0].max() < 1e-4 and far[:, 2].max() > 1e-2


def test_drafts_are_dropped_from_depth_to_depth(generator: torch.Generator) -> None:
    """As many as the shares say, each draft as likely as any other, and none that was dropped comes back."""
    batch = packed((14,), (14,), supervised=1.0)
    every, seen = Anchors.everywhere(batch, 5, before=0), torch.zeros(13)
    for _ in range(800):
        found = dropped(every, batch, 0.5, 0.2, generator)
        rows = found.valid.view(2, 13, 5)
        assert rows.sum(1)[:, :4].tolist() == [[13, 6, 3, 2]] * 2, "13 · max(0.5 ** d, 0.2)"
        assert set(rows.sum(1)[:, 4].tolist()) <= {1, 2}, "one of two may be at the end of its document"
        assert not (found.valid[:, 1:] & ~found.valid[:, :-1]).any() and not (found.valid & ~every.valid).any()
        seen += rows[0, :, 1]
    # Each of the twelve that have two tokens behind them is kept with probability 1/2; four standard deviations.
    assert seen[12] == 0 and (seen[:12] - 400).abs().max() < 4 * (800 * 0.25) ** 0.5


def test_what_cannot_be_trained_is_refused(target: Target) -> None:
    tokens = rf"head\.mask_token_id=.*has the tokens 0 to {VOCAB_SIZE - 1}"
    for message, make in (
        (r"head\.keeps=0\.0: give a share above 0", lambda: TrainedPEagle(keeps=0.0)),
        (r"head\.keeps_least=1\.5: give a share", lambda: TrainedPARD(config=LM, keeps_least=1.5)),
        (tokens, lambda: TrainedPEagle(mask_token_id=VOCAB_SIZE)),
        (tokens, lambda: TrainedPARD(config=LM, mask_token_id=-1)),
        (r"head\.config\.markov_rnk is no further field", lambda: TrainedBlock(config={"markov_rnk": 3})),
        (r"head\.config\.block_size is no further field", lambda: TrainedBlock(config={"block_size": 3})),
        (r"head\.config\.sliding_window=0: give", lambda: TrainedBlock(config={"sliding_window": 0})),
    ):
        with pytest.raises(ValueError, match=message):
            make().begin(target, None)
