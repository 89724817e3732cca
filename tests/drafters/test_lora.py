"""An adapter of a small model: the loss falls, what is trained is what is served, and its folder is peft's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from drafters.heads.training import TargetStates, TextBatch
from drafters.lora import TrainedLora
from drafters.model import ModelDrafter
from experiments.exporting.folders import Source, kind_of, read
from specdec.target.target import Target
from tests.drafters.agreeing import losses
from tests.models import tiny_model

peft = pytest.importorskip("peft")
# peft asks transformers for something that transformers will rename.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
VOCAB = 24
ALONE = torch.arange(9)[None] * 7 % VOCAB


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A small model that knows nothing of the target."""
    tiny_model(vocab_size=VOCAB, layers=2, seed=3).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def packed() -> TextBatch:
    """Two rows of two documents each; one of them is ``ALONE``."""
    tokens = torch.stack([torch.cat([ALONE[0], ALONE[0, :5] + 1]), torch.arange(14) * 3 % VOCAB])
    documents = torch.tensor([[0] * 9 + [1] * 5] * 2)
    positions = torch.tensor([[*range(9), *range(5)]] * 2)
    return TextBatch(tokens, torch.ones_like(tokens).bool(), documents, positions)


def test_training_lowers_the_loss_and_what_is_trained_is_what_is_served(base: str, tmp_path: Path) -> None:
    target = Target(tiny_model(vocab_size=VOCAB), name="tiny")
    head = TrainedLora(name=base, rank=4)
    head.begin(target, None)
    first, *_, last = losses(head, target, packed(), 30)
    assert last < 0.6 * first
    assert {name.partition(".")[2].partition(".")[0] for name in head.state_dict()} == {"down", "up"}
    batch, states = packed(), TargetStates({}, lambda given: given)
    prediction = head(batch, states, head.anchors(batch, torch.Generator()))
    # The first document, where it has a successor.
    wanted = head.logits(prediction.states[0][:8], batch.tokens[0, :8], 1).detach()
    served: Any = head.drafter()
    torch.testing.assert_close(served.model(ALONE).logits[0, :8], wanted, rtol=1e-4, atol=1e-4)
    without = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(without(ALONE).logits[0, :8], wanted, atol=0.1), "the mutant: no adapter"

    head.save(tmp_path / "saved", {})
    theirs: Any = peft.PeftModel.from_pretrained(without, str(tmp_path / "saved"))
    assert theirs.peft_config["default"].base_model_name_or_path == base
    ours: Any = ModelDrafter.from_pretrained(base, adapter=str(tmp_path / "saved"), dtype="float32", device="cpu")
    torch.testing.assert_close(ours.model(ALONE).logits, theirs(ALONE).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.model(ALONE).logits[0, :8], wanted, rtol=0.05, atol=0.05)  # rounded to bfloat16
    exported: Any = read(Source(name=base, adapter=str(tmp_path / "saved")), "lm").module
    torch.testing.assert_close(exported(ALONE).logits, ours.model(ALONE).logits, rtol=1e-4, atol=1e-4)
    for load in (ModelDrafter.from_pretrained, kind_of):
        with pytest.raises(ValueError, match=rf"an adapter[,:].* give .*adapter[=:] ?{tmp_path / 'saved'}"):
            load(str(tmp_path / "saved"))


def test_what_cannot_be_adapted_is_refused(base: str) -> None:
    target = Target(tiny_model(vocab_size=VOCAB), name="tiny")
    with pytest.raises(ValueError, match=r"the model .*base has no linear layers named lm_head: give layers"):
        TrainedLora(name=base, layers=["lm_head"]).begin(target, None)
    with pytest.raises(ValueError, match=r"head\.rank=0"):
        TrainedLora(name=base, rank=0)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(base)
    letters = Tokenizer(models.WordLevel({chr(97 + token): token for token in range(VOCAB)}))
    other = Target(target.model, PreTrainedTokenizerFast(tokenizer_object=letters), name="letters")
    with pytest.raises(ValueError, match="base has another vocabulary than the target letters"):
        TrainedLora(name=base).begin(other, None)
    other = Target(tiny_model(vocab_size=VOCAB + 8), name="wide")
    with pytest.raises(ValueError, match=rf"the head has {VOCAB} tokens and the target wide has {VOCAB + 8}"):
        TrainedLora(name=base).begin(other, None)
