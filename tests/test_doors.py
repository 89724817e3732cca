"""Mistakes that a new user makes in Python: each gets one sentence, before any work."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafters import MedusaDrafter, ModelDrafter, NGramDrafter
from specdec import Engine, SamplingParams, Target, TreeShape
from specdec.engine import scheduler
from specdec.generation import from_generation_config
from tests.components import perturbed
from tests.experiments.conftest import VOCAB_SIZE, byte_tokenizer
from tests.experiments.serving.conftest import TEMPLATE
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers import LenientVerifier, RejectionVerifier

SHORT = SamplingParams(max_new_tokens=4)


@pytest.fixture(autouse=True)
def _as_users_run_it() -> Iterator[None]:
    """The tests' own check of types would refuse most of these before the code under test does."""
    with shapes_unchecked():
        yield


@pytest.fixture(scope="module")
def at_hand() -> SimpleNamespace:
    model, tokenizer = tiny_model(vocab_size=VOCAB_SIZE), byte_tokenizer()
    target, known = Target(model, tokenizer), {"model": model, "tokenizer": tokenizer, "small": perturbed(model, 0.1)}
    engines = {"engine": Engine(target, max_length=64), "silent": Engine(Target(model), max_length=64)}
    return SimpleNamespace(target=target, **known, **engines)


def closed(target: Target) -> Engine:
    with Engine(target, max_length=64) as engine:
        return engine


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: Engine(x.model), "target is the model LlamaForCausalLM itself"),
    (lambda x: Engine(x.target, NGramDrafter, RejectionVerifier()), "drafter is the class NGramDrafter itself"),
    (lambda x: Engine(x.target, RejectionVerifier(), NGramDrafter()), "drafter is the verifier RejectionVerifier"),
    (lambda x: Engine(x.target, NGramDrafter()), "NGramDrafter needs a verifier"),
    (lambda x: Engine(x.target, max_batch_size=2.5), "max_batch_size=2.5"),
    (lambda x: Engine(x.target, ModelDrafter(x.small, attention="fast"), RejectionVerifier()), "the drafter llama"),
    (lambda x: Target("gpt2"), "model is the text 'gpt2'"),
    (lambda x: Target(x.model, "gpt2"), "tokenizer is the text 'gpt2'"),
    (lambda x: Target.from_pretrained("nobody/nothing"), "cannot load the model 'nobody/nothing'"),
    (lambda x: Target.from_pretrained("bundled/target", device=0), "device=0"),
    (lambda x: ModelDrafter(x.small, 2.5), "chain length=2.5"),
    (lambda x: ModelDrafter(x.small, [64, 64, 64]), "branching factors [64, 64, 64] make a tree of 266,304 nodes"),
    (lambda x: TreeShape.branching([3, 2]), "[3, 2]"),
    (lambda x: ModelDrafter(x.small, sampling="greedy"), "drafter sampling='greedy'"),
    (lambda x: MedusaDrafter("bundled/medusa"), "heads is a str"),
    (lambda x: LenientVerifier(lenience="0.8"), "lenience='0.8'"),
    (lambda x: scheduler.TokenBudget(16, least=16), "least=16"),
    (lambda x: scheduler.Priority(ageing=0.0), "ageing=0.0"),
    (lambda x: scheduler.Tiers(batch_rows=-1), "batch_rows=-1"),
    (lambda x: x.engine.generate(None), "prompts is None"),
    (lambda x: x.engine.generate(x.tokenizer("abc")), "prompts is what a tokenizer returns"),
    (lambda x: x.engine.generate({"role": "user", "content": "x"}), "prompts is a single chat message"),
    (lambda x: x.engine.generate([b"abc"]), "prompt 0: the prompt is bytes"),
    (lambda x: x.engine.generate(""), "prompt 0: the prompt '' has no tokens"),
    (lambda x: x.silent.generate("hi"), "prompt 0: a text prompt needs a tokenizer"),
    (lambda x: x.engine.generate("a \ud800"), r"the prompt has half of a character, '\ud800' at place 2"),
    (lambda x: x.engine.generate("a", SamplingParams(max_new_tokens=4, stop="\ud800")), "stop has half of a character"),
    (lambda x: x.engine.generate([{"role": "user", "content": "hi"}]), "prompt 0: the target's tokenizer has no chat"),
    (lambda x: x.engine.generate([{"content": "hi"}]), "prompt 0: chat message 0 is {'content'"),
    (lambda x: x.engine.generate("hi", {"temperature": 1}), "sampling is a dict"),
    (lambda x: x.engine.generate([[]], SHORT), "prompt 0: the prompt is empty"),
    (lambda x: x.engine.generate([[1], [2, VOCAB_SIZE]], SHORT), f"prompt 1: token id {VOCAB_SIZE}"),
    (lambda x: x.engine.generate([[1] * 60], SamplingParams(max_new_tokens=5)), "exceed the engine's max_length=64"),
    (lambda x: x.silent.generate([[1]], SamplingParams(max_new_tokens=3, stop="x")), "stop strings need a tokenizer"),
    (lambda x: x.engine.generate([[1]], [SHORT] * 2), "1 prompts but 2"),
    (lambda x: x.engine.generate([[1]], SamplingParams(max_new_tokens=4, logprobs=10**6)), "logprobs=1000000: the"),
    (lambda x: closed(x.target).generate([[1]], SHORT), "this engine was closed"),
    (lambda x: Engine(x.target, max_length=10_000), "max_length=10000"),
    (lambda x: Engine(x.target, attention="fast"), "attention='fast': give one of auto, triton, native"),
    (lambda x: SamplingParams(logits_processor=dict), "has a class itself"),
    (lambda x: from_generation_config({"top_k": 3}), "config is a dict"),
]


@pytest.mark.parametrize(("mistake", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_gets_one_sentence_before_any_work(mistake, said, at_hand) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        mistake(at_hand)
    assert "\n" not in str(raised.value)
    assert at_hand.engine.unfinished == at_hand.silent.unfinished == 0


def ids(engine: Engine, prompts: Any) -> list[tuple[int, ...]]:
    return [done.prompt_ids for done in engine.generate(prompts, SHORT)]


def test_a_single_prompt_may_stand_alone(at_hand: SimpleNamespace) -> None:
    engine, tokens = at_hand.engine, tuple(at_hand.tokenizer("def f")["input_ids"])
    for single in ("def f", list(tokens), tokens, np.array(tokens), torch.tensor(tokens), list(np.array(tokens))):
        assert ids(engine, single) == [tokens], single
    assert ids(engine, torch.tensor([[5, 6], [7, 8]])) == [(5, 6), (7, 8)]
    assert ids(engine, (text for text in ["def f", [1, 2]])) == [tokens, (1, 2)]
    assert ids(engine, []) == []
    assert ids(engine, ["d", "e"]) == [tuple(at_hand.tokenizer(text)["input_ids"]) for text in "de"]
    several = engine.generate("def f", SamplingParams(max_new_tokens=4, temperature=1, n=3))
    assert [done.prompt_ids for done in several] == [tokens] * 3
    assert len({step.request for step in engine.stream("def f", SHORT)}) == 1


def test_chat_messages_go_through_the_chat_template(at_hand: SimpleNamespace) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    engine = Engine(Target(at_hand.model, tokenizer), NGramDrafter(), RejectionVerifier(), max_length=96)
    user, more = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    first = tuple(tokenizer("<user>Hi\n<assistant>", add_special_tokens=False)["input_ids"])
    assert ids(engine, [user]) == [first]
    assert ids(engine, [[user], "a", [user, more, user]])[::2] == [
        first,
        tuple(tokenizer("<user>Hi\n<assistant>Ho\n<user>Hi\n<assistant>")["input_ids"]),
    ]
    number = engine.submit([user], SHORT)
    steps = [step for _ in range(8) for step in engine.step()]
    assert {step.request for step in steps} == {number}
    streamed = tuple(token for step in engine.stream([user], SHORT) for token in step.token_ids)
    assert streamed == engine.generate([user], SHORT)[0].token_ids
    # Where the assistant has begun, the output goes on with what it said.
    assert ids(engine, [user, more]) == [tuple(tokenizer("<user>Hi\n<assistant>Ho")["input_ids"])]
    with pytest.raises(ValueError, match="the conversation has half of a character"):
        engine.generate([{"role": "user", "content": "Hi \ud800"}], SHORT)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="the target's chat template does not take these messages: roles must alt"):
        engine.generate([{"role": "user", "content": "Hi"}], SHORT)
