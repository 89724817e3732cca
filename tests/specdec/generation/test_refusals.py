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


def criteria(*given: StoppingCriteria) -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList(given)}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": masked((1, 3))}, "row 1 of the attention mask"),
    ({"attention_mask": masked((0, 0), (0, 2))}, "row 0 of the attention mask"),
    ({"attention_mask": masked(*((1, i) for i in range(4)))}, "row 1 of the attention mask"),
    ({"num_beams": 2}, "num_beams=2"),
    ({"assistant_model": tiny_model(layers=1)}, "assistant_model"),
    ({"guidance_scale": 2.0}, "runs the model itself at each step"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    *(
        ({"return_dict_in_generate": True, name: True}, name)
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    ),
    ({"position_ids": torch.arange(4)[None] + 1}, "row 0 of position_ids"),
    ({"max_time": 1.0}, "MaxTimeCriteria"),
    (criteria(Own()), "Own"),
    (criteria(OwnEos(3)), "OwnEos"),
    (
        {"logits_processor": [SynthIDTextWatermarkLogitsProcessor(**WATERMARK, device=torch.device("cpu"))]},
        "keeps a state from step to step",
    ),
    ({"stop_strings": "a"}, "need a tokenizer"),
    # Nothing pads the rows that end first.
    (criteria(StopStringCriteria(letters(), "a")), "set eos_token_id"),
]
if penalties(1):
    REFUSED.append(({"logits_processor": penalties(1, 2, 3)}, "prompt_ignore_length for 3 rows, and the batch has 2"))


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object, **kwargs: object) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(generate, "Engine", made)


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_what_is_not_supported_is_refused_before_any_work(model, arguments: dict[str, Any], named: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ValueError, match=named) as raised:
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
