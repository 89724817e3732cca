"""The engine's own duties: cuts, steps, refusals, one synchronization per round."""

from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from drafters import NGramDrafter
from specdec import Drafter, DraftSampling, Engine, SamplingParams, Target, Verifier
from specdec.host import without_looking
from tests.components import DRAFTERS, STRONGEST, fitting
from tests.honest import Honest
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB = 64


PROMPTS = [[1, 2, 3], [5] * 20, [7], [8, 9] * 6, [4, 2]]
LOOKED_AT = {None, "ngram", "eagle3_expansion", "block_by_confidence", STRONGEST["rejection"]}


def make(target: Target, drafter: str | None = "model_tree_without_replacement", **kwargs: object) -> Engine:
    if drafter is None:
        return Engine(target, max_length=64, **kwargs)  # type: ignore[arg-type]
    made = DRAFTERS[drafter](target.model)
    return Engine(target, made, fitting(made), max_length=64, **kwargs)  # type: ignore[arg-type]


def test_equal_prompts_get_different_samples_and_seeds_repeat(target) -> None:
    engine, found = make(target, max_batch_size=6), []
    for seed in (0, 0, 1):
        sampling = SamplingParams(temperature=1.5, max_new_tokens=8, n=3, seed=seed)
        found.append([output.token_ids for output in engine.generate([[1, 2, 3]] * 2, sampling)])
    assert len(set(found[0])) == 6
    assert found[0] == found[1] != found[2]


def test_steps_add_up(target) -> None:
    engine = make(target, max_batch_size=3, timing=True)
    for output in engine.generate(PROMPTS, SamplingParams(max_new_tokens=11)):
        assert tuple(token for step in output.steps for token in step.token_ids) == output.token_ids
        assert [step.round for step in output.steps] == list(range(len(output.steps)))
        assert [step.finish_reason for step in output.steps[:-1]] == [None] * (len(output.steps) - 1)
        assert output.finish_reason == "length"
        for step in output.steps:
            assert len(step.logprobs) == len(step.token_ids)
            assert all(logprob <= 1e-6 for logprob in step.logprobs)
            assert 0 <= step.accepted <= step.proposed_depth <= 3
            assert step.proposed_nodes <= 7
            assert 0 <= step.expected_accepted <= step.proposed_depth + 1e-5
            assert {"draft", "verify", "accept", "commit"} <= step.seconds.keys()
        assert output.steps[0].seconds.get("prefill", 0.0) > 0 or len(output.prompt_ids) == 1


@pytest.mark.parametrize("drafter", ["model_chain_iid", "ngram"])
def test_cuts_inside_an_accepted_path(target, drafter) -> None:
    whole = make(target, None).generate([[1, 2, 3]], SamplingParams(max_new_tokens=20))[0].token_ids
    engine = make(target, drafter)
    for length in (1, 4, 7):
        output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=length))[0]
        assert (output.token_ids, output.finish_reason) == (whole[:length], "length")
    for stop in list(dict.fromkeys(whole))[::3]:
        output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=20, stop_token_ids=(stop,)))[0]
        assert (output.token_ids, output.finish_reason) == (whole[: whole.index(stop) + 1], "stop")


def test_eos_is_the_union_of_all_sources(model) -> None:
    whole = Engine(Target(model), max_length=64).generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0].token_ids
    late = max(set(whole), key=whole.index)
    model.generation_config.eos_token_id = [VOCAB - 1, late]
    try:
        target = Target(model)
        assert target.eos_token_ids == {VOCAB - 1, late}
        engine = make(target, "model_chain_iid")
        output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0]
        assert (output.token_ids, output.finish_reason) == (whole[: whole.index(late) + 1], "stop")
        ignoring = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, ignore_eos=True))[0]
        assert ignoring.token_ids == whole
    finally:
        model.generation_config.eos_token_id = None


def test_the_last_position_of_the_row_can_be_filled_in_fewer_rounds(target) -> None:
    prompt = PROMPTS[1] * 2
    engine = make(target, max_batch_size=2)
    wanted = SamplingParams(max_new_tokens=64 - len(prompt))
    fast, plain = engine.generate([prompt], wanted)[0], engine.generate([prompt], wanted, speculate=False)[0]
    assert fast.token_ids == plain.token_ids
    assert len(fast.prompt_ids) + len(fast.token_ids) == 64
    assert len(plain.steps) == len(plain.token_ids) > 1.5 * len(fast.steps)
    assert all(step.proposed_nodes == 0 for step in plain.steps)


class Synchronizations(TorchFunctionMode):
    """Counts what would make the host wait for a GPU."""

    names = frozenset(
        ["item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "__array__"]
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.names:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


CUT_SHORT = {"model_by_confidence", "block_by_confidence"}
"""Drafters whose policy decides on the device how many nodes are verified: what is cut off saves more than the look."""

WAITS_IN_DRAFTS = ("slem", "staged_chain_iid")
"""Drafters whose drafts are made on the host: it waits for every forward of a drafting model that it reads."""
ON_THE_HOST = {"lookahead"}
"""Drafters that keep on the host what the target said of their nodes, which they read for themselves."""


@pytest.mark.parametrize("drafter", [complete(name, strong=name in LOOKED_AT) for name in (None, *DRAFTERS)])
def test_one_synchronization_per_round(target, drafter) -> None:
    engine = make(target, drafter, max_batch_size=2)
    for prompt in ([1, 2, 1, 2], [3, 4, 3, 4]):
        engine.submit(prompt, SamplingParams(max_new_tokens=20, temperature=1.0))
    with without_looking():  # as on a GPU
        engine.step()
        engine.step()
        with Synchronizations() as counted:
            engine.step()
    if drafter in WAITS_IN_DRAFTS:
        assert counted.seen[-1] == "numpy" and len(counted.seen) > 2, "then it belongs to the others"
        return
    # How many nodes a policy has left, where there is one; and the one table that the host reads.
    assert counted.seen == ["__int__"] * (drafter in CUT_SHORT) + ["numpy"] + ["cpu", "numpy"] * (
        drafter in ON_THE_HOST
    )


class Methods(Drafter):
    def bind(self, target, sizes): ...


class Forgetful(NGramDrafter):
    """Its constructor leaves out its parent's."""

    def __init__(self): ...


class OnlyLaws(Verifier):
    samplings = frozenset([DraftSampling.IID])

    def laws(self, tree, target_probs): ...


def changed(kind: type, **attributes: object) -> Any:
    """An instance of a class with other attributes."""
    return type("Changed", (kind,), attributes)()


REFUSED = [
    (Methods(), "Methods has no max_nodes and no max_depth and no laws and no is_chain: .*max_nodes = 4; max_depth"),
    (Forgetful(), "Forgetful has no max_nodes .*super"),
    (OnlyLaws(), "OnlyLaws has no exactness: .*exactness = Exactness.EXACT"),
    (changed(Honest, max_nodes=2.5), "Changed.max_nodes=2.5: "),
    (changed(Honest, laws=DraftSampling.IID), "Changed.laws=<DraftSampling.IID: 1>: "),
    (changed(Honest, hidden_layers=(7,)), "Changed.hidden_layers names layer 7 "),
]


@pytest.mark.parametrize(("component", "words"), REFUSED, ids=range(len(REFUSED)))
def test_missing_and_wrong_attributes_are_named(target: Target, component: Any, words: str) -> None:
    pair = (component, RejectionVerifier()) if isinstance(component, Drafter) else (Honest(), component)
    with pytest.raises(ValueError, match=f"^{words}") as caught:
        Engine(target, *pair, max_length=32)
    assert "\n" not in str(caught.value)
