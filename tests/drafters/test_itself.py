"""The target as its own drafter: what is left out, that weights are shared, and the search."""

import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters.itself import SelfDrafter, leave_out, parts_of
from drafters.reduced import twin_of
from experiments.measuring.meters import held_by
from specdec import Engine, Paging, SamplingParams, Target
from specdec.quantization import quantize
from specdec.quantization.base import QuantizedLinear
from tests.models import tiny_model
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")
VOCAB = 24
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)


def silenced(model: PreTrainedModel, names: list[str]) -> torch.Tensor:
    """The logits of a model whose parts say nothing: what it means to leave them out."""

    def nothing(module: Any, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        return (torch.zeros_like(hidden), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(hidden)

    hooks = [parts_of(model)[name].register_forward_hook(nothing) for name in names]
    try:
        with torch.inference_mode():
            return model(TOKENS).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("architecture", ["llama_mqa_tied", "qwen2_mixed_sliding", "gemma3", "gpt2"])
def test_what_is_left_computes_the_rest_with_the_very_same_weights(architecture: str) -> None:
    model = tiny_model(architecture, vocab_size=VOCAB)
    before, names, last = dict(model.named_parameters()), list(parts_of(model)), len(parts_of(model)) // 2 - 1
    attention = names[0].partition(".")[2]
    drafter = SelfDrafter([f"0.{attention}", f"1-{last - 1}", f"{last}.mlp"], 3)
    gone = [name for name in names if name not in ("0.mlp", f"{last}.{attention}")]
    target = Target(model)
    thin = drafter.model_for(target)
    with torch.inference_mode():
        torch.testing.assert_close(thin(TOKENS).logits, silenced(model, gone), atol=1e-5, rtol=1e-5)
    own = {id(parameter) for parameter in before.values()}
    assert all(id(parameter) in own for parameter in thin.parameters())
    assert [*before] == [name for name, _ in model.named_parameters()] and len(parts_of(model)) == len(names)
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=40)
    held = held_by([engine])
    assert held["drafter"] == 0 and held["drafter_kv"] * (last + 1) == held["kv"]  # one layer keeps something
    outputs, plain = (engine.generate(PROMPTS, GREEDY, speculate=each) for each in (True, False))
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]


def exits(model: PreTrainedModel, skip: list[str], *, over_the_target: bool | None, **options: Any) -> tuple[Any, int]:
    """What became of every draft of greedy and drawn requests, and the bytes of the drafter's own cache."""
    drafter = SelfDrafter(skip, (2, 1, 1), sampling="iid")
    if over_the_target is not None:
        drafter._shares_cache = lambda *given: over_the_target  # pyright: ignore[reportAttributeAccessIssue]
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_length=40, max_batch_size=2, **options)
    engine.runner.joins = False  # both draft in a request's first round
    wanted = [replace(GREEDY, temperature=number % 2, seed=number) for number in range(4)]
    outputs = engine.generate([*PROMPTS, [5], PROMPTS[0] * 3], wanted)
    made = [[(step.token_ids, step.accepted, step.proposed_nodes) for step in each.steps] for each in outputs]
    return made, held_by([engine])["drafter_kv"]


PAGES = Paging(page_size=4, pages=12, reserve=0.0, shared=True)


@pytest.mark.parametrize(
    ("architecture", "cache"),
    [("qwen2_mixed_sliding", PAGES), complete("gpt2", None, strong=False), complete("gemma3", PAGES, strong=False)],
)
def test_an_early_exit_drafts_over_the_target_s_own_cache(architecture: str, cache: Paging | None) -> None:
    model = tiny_model(architecture, vocab_size=VOCAB)
    made, bytes_own = exits(model, ["2-"], over_the_target=None, cache=cache)
    alone, bytes_alone = exits(model, ["2-"], over_the_target=False, cache=cache)
    assert made == alone and sum(accepted for steps in made for _, accepted, _ in steps) > 5
    assert bytes_own == 0 < bytes_alone


def test_other_layers_have_a_cache_of_their_own_and_would_draft_otherwise_without() -> None:
    model = tiny_model(vocab_size=VOCAB)
    for skip in (["3.mlp"], ["1", "3"]):  # a part of the last layer; layers in the middle
        assert exits(model, skip, over_the_target=None)[1] > 0
    skip = ["1", "3"]
    assert exits(model, skip, over_the_target=True)[0] != exits(model, skip, over_the_target=False)[0]
    for more in ({"quantization": "int8", "quantization_check": False}, {"kv_cache": "int8"}):
        engine = Engine(Target(model), SelfDrafter(["2-"], 2, **more), RejectionVerifier(), max_length=40)
        assert held_by([engine])["drafter_kv"] > 0


def test_a_quantized_copy_takes_the_memory_of_its_integers() -> None:
    model = tiny_model("llama_mqa_tied", vocab_size=VOCAB)
    target, copied = Target(model), quantize(copy.deepcopy(model), "int4", check=False)
    drafter = SelfDrafter(["2", "1.mlp"], 3, quantization="int4")
    thin = drafter.model_for(target)
    whole = SelfDrafter(None, 3, quantization="int4").model_for(target)
    with torch.inference_mode():
        torch.testing.assert_close(whole(TOKENS).logits, copied(TOKENS).logits)
        torch.testing.assert_close(thin(TOKENS).logits, silenced(copied, ["2.self_attn", "2.mlp", "1.mlp"]))
    assert type(model.lm_head) is torch.nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=40)
    layers: list[Any] = [each for each in thin.modules() if isinstance(each, QuantizedLinear)]
    bytes_each = [each.weight.nbytes + each.scale.nbytes for each in layers]
    assert len(layers) == 3 * 4 + 2 * 3 + 1 and held_by([engine])["drafter"] == sum(bytes_each)
    with pytest.raises(ValueError, match="quantization='int4': this llama model is quantized already"):
        Engine(Target(copied), drafter, RejectionVerifier())


def test_the_search_promises_what_rounds_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean tokens of a round that begins at every token of the target's texts, each played by an engine."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    search, model = importlib.import_module("skip_search").search, tiny_model(vocab_size=VOCAB, layers=3)

    def found(**settings: Any) -> Any:
        return search(Target(model), twin_of(model), depth=2, prompts=PROMPTS, tokens=10, **settings)

    best, lengths = found(), []
    engine = Engine(Target(model), SelfDrafter(list(best.skip), 2), RejectionVerifier(), max_length=40)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        for end in range(9):
            beginning = [*prompt, *done.token_ids[:end]]
            (played,) = engine.generate([beginning], SamplingParams(max_new_tokens=4, ignore_eos=True))
            lengths.append(1 + played.steps[0].accepted)
    assert best.tokens == pytest.approx(sum(lengths) / len(lengths)) and len({*lengths}) > 1
    assert best == found() and found(tries=2).speedup <= best.speedup
    # Leaving out nothing has all tokens accepted, and costs as much as the target.
    assert best.speedup == pytest.approx(best.tokens / (1 + 2 * best.share)) and 0 < best.share < 1


def test_a_search_s_file_is_read_and_what_leaves_nothing_out_or_everything_is_refused(tmp_path: Path) -> None:
    target, file = Target(tiny_model(vocab_size=VOCAB)), tmp_path / "skip.json"
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"skip": ["1"], "layers": 32, "target": "another"}))
    file.write_text("[]")
    for skip, more, words in (
        (None, {}, "skip=None: give layers or parts"),
        (None, {"quantization": "int3"}, "quantization='int3': give one of int8"),
        (str(tmp_path / "no.json"), {}, "there is no such file; python examples"),
        (other, {}, "was found for another of 32 layers, .* llama has 4"),
        (file, {}, "no JSON object with a list skip"),
        (["4"], {}, r"has no 4: give layers from 0 to 3, such as 2 or 2-3, or parts of them \(self_attn, mlp\)"),
        (["0-3"], {}, "leaves nothing of the 4 layers"),
    ):
        with pytest.raises(ValueError, match=words):
            SelfDrafter(skip, **more).model_for(target)
    file.write_text(json.dumps({"skip": ["1", "2.mlp"], "layers": 4}))
    assert len(parts_of(SelfDrafter(str(file), 2).model_for(target))) == 5
    target.model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="the llama model has no list of 5 layers"):
        leave_out(twin_of(target.model), ["1.mlp"])
