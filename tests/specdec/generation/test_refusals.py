"""What our engine cannot do inside transformers' generate is refused before any work."""

from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
)

from specdec.generation import SpeculativeGenerate, generate
from tests.models import tiny_model
from tests.specdec.generation.calls import VOCAB, letters, penalties


class Own(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool)


class OwnEos(EosTokenCriteria):
    pass


def masked(*zeros: tuple[int, int]) -> torch.Tensor:
    mask = torch.ones((2, 4), dtype=torch.long)
    for place in zeros:
        mask[place] = 0
    return mask


WATERMARK = {"ngram_len": 2, "keys": [1], "sampling_table_size": 8, "sampling_table_seed": 0, "context_history_size": 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "right padding": ({"attention_mask": masked((1, 3))}, "row 1 of the attention mask has zeros behind"),
    "a hole": ({"attention_mask": masked((0, 0), (0, 2))}, "row 0 of the attention mask has zeros behind"),
    "no token": ({"attention_mask": masked(*((1, i) for i in range(4)))}, "row 1 of the attention mask is all zeros"),
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "an assistant": ({"assistant_model": tiny_model()}, "assistant_model is not used: this engine drafts with its own"),
    "guidance": ({"guidance_scale": 2.0}, "runs the model itself at each step"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: this engine returns"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits: this engine returns"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions: this engine"),
    "states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states: this engine"),
    "positions": ({"position_ids": torch.arange(4)[None] + 1}, "row 0 of position_ids is not 0, 1, 2"),
    "time": ({"max_time": 1.0}, "MaxTimeCriteria"),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([Own()])}, "Own"),
    "another EOS criterion": ({"stopping_criteria": StoppingCriteriaList([OwnEos(3)])}, "OwnEos"),
    "a watermark": (
        {"logits_processor": [SynthIDTextWatermarkLogitsProcessor(**WATERMARK, device=torch.device("cpu"))]},
        "keeps a state from step to step",
    ),
    "lengths": ({"logits_processor": penalties(1, 2, 3)}, "prompt_ignore_length for 3 rows, and the batch has 2"),
    "no tokenizer": ({"stop_strings": "a"}, "need a tokenizer, and transformers does not pass its own"),
    "rows that nothing pads": (
        {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(letters(), "a")])},
        "set eos_token_id, or call generate once per prompt",
    ),
}


if not penalties(1):
    del REFUSED["lengths"]


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object, **kwargs: object) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(generate, "Engine", made)


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_before_any_work(model, case: str) -> None:
    arguments, message = REFUSED[case]
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ValueError, match=message) as raised:
        model.generate(ids, **{"max_new_tokens": 3, **arguments}, custom_generate=SpeculativeGenerate())
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("_no_work")
def test_inputs_other_than_tokens_are_refused(model) -> None:
    ours = SpeculativeGenerate()
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="inputs_embeds are not supported"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=3, custom_generate=ours)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 3 tokens"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, custom_generate=ours)
    gpt2 = tiny_model("gpt2", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="generate got token_type_ids for the model's forward"):
        gpt2.generate(ids, token_type_ids=torch.zeros_like(ids), max_new_tokens=3, custom_generate=ours)
