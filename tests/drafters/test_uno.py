"""Uno: the target's own adapter over noise, and that what is trained is what is served."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.training import TargetStates, TextBatch
from drafters.lora import write_adapter
from drafters.own_model import twin_of
from drafters.uno import TrainedUno, UnoDrafter
from specdec import Engine, SamplingParams, Target
from specdec.drafting.window import ParallelScorer
from specdec.interfaces import Round
from specdec.target.adapters import Adapters
from tests.components import noisy_adapter
from tests.drafters.agreeing import losses
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("untried")
VOCAB, DEPTH = 24, 3
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


@pytest.fixture
def model() -> Any:
    return tiny_model(vocab_size=VOCAB)


def rounds(model: Any, drafter: UnoDrafter) -> tuple[list[tuple[Round, list[Any]]], list[torch.Tensor], list[Any]]:
    """What is drafted behind which tokens, the noise of every round, and the outputs."""
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=3, max_length=40)
    seen, noise = [], []
    scorer: Any = engine.session.scorer  # pyright: ignore[reportOptionalMemberAccess]
    fill = scorer._fill
    scorer._fill = lambda batch, count: noise.append(fill(batch, count)) or noise[-1]
    engine.on_round = lambda found: seen.append((found, [each and each.tokens for each in found.requests]))
    outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=1.0))
    return seen, noise, outputs


@torch.inference_mode()
def test_every_depth_says_what_the_adapted_model_says_behind_noise(model: Any) -> None:
    """The reference is one row and one forward by peft's own rule: a token through the adapter, or not."""
    adapter = noisy_adapter(model, 0.5)
    seen, noise, _ = rounds(model, UnoDrafter(adapter, DEPTH))
    twin = twin_of(model)
    adapters = Adapters(twin, {"uno": adapter})
    tried = 0
    drafted = [each for each in seen if each[0].tree.width > 2]
    for (found, sequences), fill in zip(drafted, [each for each in noise if each.shape[1]], strict=True):
        for row, so_far in enumerate(sequences):
            depth = int(found.tree.valid[row, 1:].sum())
            if so_far is None or depth == 0:
                continue
            tokens = torch.tensor([[*so_far, *fill[row].tolist()]])
            adapters.choice.set((torch.arange(tokens.shape[1]) >= len(so_far))[None].long())
            expected = twin(tokens).logits[0, len(so_far) - 1 :].softmax(-1)
            q = found.tree.draft_probs[row, :depth]
            torch.testing.assert_close(q, expected[:depth], atol=1e-4, rtol=1e-3)
            tried += 1
    assert tried > 10
    for found, _ in seen:  # the first depth is the target's own, so that it is always accepted
        assert (found.verdict.num_accepted[found.tree.valid[:, 1:].any(-1)] > 0).all()


def test_noise_through_the_base_weights_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the adapter is never chosen."""
    init = ParallelScorer.__init__
    right = rounds(model, UnoDrafter(noisy_adapter(model, 0.5), DEPTH))[0][0][0].tree.draft_probs
    monkeypatch.setattr(ParallelScorer, "__init__", lambda self, *a, adapter=0, **more: init(self, *a, **more))
    wrong = rounds(model, UnoDrafter(noisy_adapter(model, 0.5), DEPTH))[0][0][0].tree.draft_probs
    assert right is not None and wrong is not None and not torch.allclose(right[:, 1], wrong[:, 1], atol=1e-3)
    torch.testing.assert_close(right[:, 0], wrong[:, 0])


def test_noise_is_the_requests_own_and_the_target_stays_as_it_is(model: Any) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    together = rounds(model, UnoDrafter(noisy_adapter(model, 0.5), DEPTH, noise_below=9))
    assert all((fill >= 1).all() and (fill < 9).all() for fill in together[1])
    engine = Engine(Target(model), UnoDrafter(noisy_adapter(model, 0.5), DEPTH, noise_below=9), RejectionVerifier())
    for stream, (prompt, output) in enumerate(zip(PROMPTS, together[2], strict=True)):
        alone = SamplingParams(max_new_tokens=12, temperature=1.0, stream=stream)
        assert engine.generate([prompt], alone)[0].token_ids == output.token_ids
    assert {name for name, _ in model.named_parameters()} == before.keys()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def batch_of(rows: int = 2, length: int = 14) -> TextBatch:
    tokens = torch.arange(rows * length).view(rows, length) * 7 % 5 + 3
    places = torch.arange(length).expand(rows, -1)
    return TextBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), places)


def test_training_lowers_the_loss_and_what_is_trained_is_what_is_served(model: Any, tmp_path: Path) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    head = TrainedUno(depths=DEPTH, rank=4, keeps=1.0)
    head.begin(Target(model), None)
    first, *_, last = losses(head, Target(model), batch_of(), 25)
    assert last < 0.6 * first
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert not any("base" in name for name in head.state_dict())
    # A draft of the first row's root at position 5, as it is trained and as it is served.
    batch, generator = batch_of(rows=1), torch.Generator().manual_seed(1)
    anchors = head.eval().anchors(batch, generator)
    with torch.no_grad():
        states = head(batch, TargetStates({}, lambda given: given), anchors).states
    at = anchors.index.tolist().index(5)
    trained_logits = torch.stack(
        [head.logits(states[depth][at : at + 1], anchors.index, depth + 1)[0] for depth in range(DEPTH)]
    )
    noise = torch.randint(
        1, VOCAB, (1, int(anchors.valid[:, 1:].sum())), generator=torch.Generator().manual_seed(head._seed)
    )
    own = [slot for slot, (draft, _) in enumerate(anchors.valid[:, 1:].nonzero().tolist()) if draft == at]
    drafter: Any = head.drafter()
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_length=40)
    scorer: Any = engine.session.scorer  # pyright: ignore[reportOptionalMemberAccess]
    scorer._fill = lambda batch, count: noise[:, own][:, :count]
    seen: list[Round] = []
    engine.on_round = lambda found: seen.append(found)
    engine.generate([batch.tokens[0, :6].tolist()], SamplingParams(max_new_tokens=6, temperature=1.0))
    served = seen[0].tree.draft_probs
    assert served is not None
    torch.testing.assert_close(served[0, :DEPTH], trained_logits.softmax(-1), atol=1e-4, rtol=1e-3)
    # The saved folder is peft's, and loads with the same weights up to bfloat16.
    head.save(tmp_path / "saved", {})
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "saved")).r == 4
    loaded = UnoDrafter.from_pretrained(tmp_path / "saved", shape=DEPTH, optimize=False)
    again = Engine(Target(model), loaded, RejectionVerifier(), max_length=40)
    twin: Any = again.session.scorer.runner.model  # pyright: ignore[reportOptionalMemberAccess]
    for layer, (down, up) in head.head.matrices.items():
        adapted = twin.get_submodule(layer)
        torch.testing.assert_close(adapted.down, down.detach().bfloat16().float())
        torch.testing.assert_close(adapted.up, up.detach().bfloat16().float())


def test_a_published_folder_loads_and_others_are_refused(model: Any, tmp_path: Path) -> None:
    write_adapter(tmp_path / "uno" / "adapter", noisy_adapter(model, 0.5), base="tiny")
    drafter = UnoDrafter.from_pretrained(tmp_path / "uno", shape=[2, 1])
    [output] = Engine(Target(model), drafter, RejectionVerifier()).generate([[1, 2]], SamplingParams(max_new_tokens=6))
    assert len(output.token_ids) == 6
    other = tiny_model(vocab_size=VOCAB, layers=2)
    with pytest.raises(ValueError, match=r"of another base \(tiny\): its .*layers\.2.* there"):
        Engine(Target(other), drafter, RejectionVerifier())
    with pytest.raises(ValueError, match=r"no adapter at .*: give a folder with adapter_config\.json"):
        UnoDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"noise_below={VOCAB + 1}: the target .* has {VOCAB} tokens"):
        Engine(Target(model), UnoDrafter(noisy_adapter(model, 0.5), noise_below=VOCAB + 1), RejectionVerifier())
    with pytest.raises(ValueError, match="no linear layers named nothing"):
        TrainedUno(layers=["nothing"]).begin(Target(model), None)
