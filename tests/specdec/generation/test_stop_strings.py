"""Stop strings end a row where they do in transformers."""

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor, StoppingCriteriaList, StopStringCriteria

from specdec.engine.engine import Engine
from specdec.generation import SpeculativeGenerate
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import DRAFTERS
from tests.specdec.generation.calls import PAD, batch, letters
from verifiers.rejection import RejectionVerifier


def stops_of(model) -> dict[str, list[str]]:
    """Stop strings that occur in the greedy outputs of ``batch``."""
    rows = model.generate(**batch(), max_new_tokens=12, pad_token_id=PAD).tolist()
    spelled = ["".join(letters().convert_ids_to_tokens(row)) for row in rows]
    tokens = [letters().convert_ids_to_tokens(row) for row in rows]
    assert len(spelled) == 3
    return {
        "inside": ["".join(tokens[0][9:11])],
        "several": ["".join(tokens[0][10:13]), "".join(tokens[1][8:10])],
        "from the prompt on": ["".join(tokens[1][4:7])],
        "never": ["zzzzzzz"],
    }


@pytest.mark.parametrize("case", ["inside", "several", "from the prompt on", "never"])
def test_stop_strings_end_a_row_where_they_do_in_transformers(model, case: str) -> None:
    stop = stops_of(model)[case]
    common = {"max_new_tokens": 12, "pad_token_id": PAD, "eos_token_id": 29}
    plain = model.generate(**batch(), **common, stop_strings=stop, tokenizer=letters())
    whole = model.generate(**batch(), **common)
    assert torch.equal(plain, whole) == (case == "never")
    named = {"stop_strings": stop, "tokenizer": letters()}
    # A criterion brings what it needs: no tokenizer is given.
    criteria = {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(letters(), stop)])}
    for given, options in ((named, {"tokenizer": letters()}), (criteria, {"max_batch_size": 2})):
        ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier(), **options)
        assert torch.equal(model.generate(**batch(), **common, **given, custom_generate=ours), plain)


def test_a_stop_string_that_is_a_special_token(model) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    biased = {"sequence_bias": [[[30], 4.0]], "max_new_tokens": 40}
    plain = model.generate(prompt, **biased, stop_strings="</s>", tokenizer=letters())
    assert plain[0, -1] == 30 and plain.shape[1] < 43, "the special token comes, and ends the output"
    ours = SpeculativeGenerate(tokenizer=letters())
    assert torch.equal(model.generate(prompt, **biased, stop_strings="</s>", custom_generate=ours), plain)


def test_a_special_token_ends_the_engine_s_own_output_and_text(model) -> None:
    bias = SequenceBiasLogitsProcessor({(30,): 4.0})
    engine = Engine(Target(model, letters()), DRAFTERS["ngram"](model), RejectionVerifier(), max_length=64)
    sampling = SamplingParams(max_new_tokens=40, stop="</s>", logits_processor=bias)
    output = engine.generate([[1, 2, 3]], sampling)[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == 30 and 30 not in output.token_ids[:-1]
    assert output.text == "".join(letters().convert_ids_to_tokens(list(output.token_ids[:-1])))
