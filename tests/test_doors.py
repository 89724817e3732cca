"""Mistakes that a new user makes in Python: each gets one sentence, before any work."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from drafters import MedusaDrafter, MedusaHeads, ModelDrafter, NGramDrafter
from specdec import Engine, ModelRunner, SamplingParams, Scheduler, Target, TreeShape
from specdec.generation import SpeculativeGenerate, from_generation_config
from tests.components import medusa_heads, perturbed
from tests.experiments.conftest import VOCAB_SIZE, byte_tokenizer
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers import (
    CascadeVerifier,
    LenientVerifier,
    RejectionVerifier,
    TypicalVerifier,
    WeightedTransportVerifier,
)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = SamplingParams(max_new_tokens=4)


@pytest.fixture(autouse=True)
def _as_users_run_it() -> Iterator[None]:
    """The tests' own check of types would refuse most of these before the code under test does."""
    with shapes_unchecked():
        yield


@pytest.fixture(scope="module")
def at_hand() -> SimpleNamespace:
    """What a user has in the notebook."""
    model, tokenizer = tiny_model(vocab_size=VOCAB_SIZE), byte_tokenizer()
    target, silent = Target(model, tokenizer), Target(model)
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        target=target,
        engine=Engine(target, max_length=64),
        silent=Engine(silent, max_length=64),
        heads=medusa_heads(model),
        small=perturbed(model, 0.1),
    )


def outgrown(model: Any) -> Engine:
    """An engine whose drafter has fewer positions than the target."""
    short = tiny_model(vocab_size=VOCAB_SIZE)
    short.config.max_position_embeddings = 48
    return Engine(Target(model), ModelDrafter(short), RejectionVerifier(), max_length=64)


WHOLE = "give a whole number, without a decimal point"
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    # What an engine is made of.
    "a model as target": (
        lambda x: Engine(x.model),
        "target is the model LlamaForCausalLM itself: give Target(model, tokenizer)",
    ),
    "a name as target": (lambda x: Engine("gpt2"), "target is the text 'gpt2': give Target.from_pretrained('gpt2')"),
    "no target": (lambda x: Engine(None), "target is None: give a Target"),
    "the class Target": (lambda x: Engine(Target), "target is the class Target itself: give an instance, Target(…)"),
    "a drafter's class": (
        lambda x: Engine(x.target, NGramDrafter, RejectionVerifier()),
        "drafter is the class NGramDrafter itself: give an instance, NGramDrafter(…)",
    ),
    "a rule's class": (
        lambda x: Engine(x.target, NGramDrafter(), RejectionVerifier),
        "verifier is the class RejectionVerifier itself: give an instance, RejectionVerifier(…)",
    ),
    "drafter and rule swapped": (
        lambda x: Engine(x.target, RejectionVerifier(), NGramDrafter()),
        "drafter is the verifier RejectionVerifier: give the drafter first, then the verifier",
    ),
    "a model as drafter": (
        lambda x: Engine(x.target, x.small, RejectionVerifier()),
        "drafter is the model LlamaForCausalLM itself: give ModelDrafter(model)",
    ),
    "a target as drafter": (
        lambda x: Engine(x.target, x.target, RejectionVerifier()),
        "drafter is a Target: give ModelDrafter(model)",
    ),
    "a drafter by its name": (
        lambda x: Engine(x.target, "ngram", RejectionVerifier()),
        "drafter is a str: give a Drafter, or None for plain decoding",
    ),
    "a rule by its name": (
        lambda x: Engine(x.target, NGramDrafter(), "rejection"),
        "verifier is a str: give an acceptance rule, for example RejectionVerifier()",
    ),
    "a model as rule": (
        lambda x: Engine(x.target, NGramDrafter(), x.model),
        "verifier is the model LlamaForCausalLM itself: a verifier is the acceptance rule",
    ),
    "no rule": (lambda x: Engine(x.target, NGramDrafter()), "NGramDrafter needs a verifier"),
    "half a slot": (lambda x: Engine(x.target, max_batch_size=2.5), f"max_batch_size=2.5: {WHOLE}"),
    "true slots": (lambda x: Engine(x.target, max_batch_size=True), f"max_batch_size=True: {WHOLE}"),
    "a text for slots": (lambda x: Engine(x.target, max_batch_size="4"), f"max_batch_size='4': {WHOLE}"),
    "a float for positions": (lambda x: Engine(x.target, max_length=64.0), f"max_length=64.0: {WHOLE}"),
    "no chunk": (lambda x: Engine(x.target, prefill_chunk=None), f"prefill_chunk=None: {WHOLE}"),
    "a text for a flag": (lambda x: Engine(x.target, timing="yes"), "timing='yes': give True or False"),
    "a number for a flag": (lambda x: Engine(x.target, optimize=1), "optimize=1: give True or False"),
    "a word for a flag": (lambda x: Engine(x.target, invariant="yes"), "invariant='yes': give True or False"),
    "a scheduler's class": (lambda x: Engine(x.target, scheduler=Scheduler), "scheduler is the class Scheduler itself"),
    "a list of backends": (
        lambda x: Engine(x.target, attention=["grouped"]),
        "attention=['grouped']: give one of auto, ",
    ),
    "a short drafter": (
        lambda x: outgrown(x.model),
        "the drafter llama: max_length=64 is beyond the 48 positions of this llama model",
    ),
    "a drafter's wrong backend": (
        lambda x: Engine(x.target, ModelDrafter(x.small, attention="fast"), RejectionVerifier()),
        "the drafter llama: attention='fast': give one of auto, ",
    ),
    # What a target is made of.
    "a target of a name": (
        lambda x: Target("gpt2"),
        "model is the text 'gpt2': give a loaded model, or use Target.from_pretrained('gpt2')",
    ),
    "model and tokenizer swapped": (lambda x: Target(x.tokenizer, x.model), "in each other's place"),
    "a target of a target": (
        lambda x: Target(x.target),
        "model is a Target: give the model in it, which is its attribute .model",
    ),
    "a tokenizer by its name": (
        lambda x: Target(x.model, "gpt2"),
        "tokenizer is the text 'gpt2': give a tokenizer loaded with AutoTokenizer.from_pretrained('gpt2')",
    ),
    "a tokenizer's class": (
        lambda x: Target(x.model, PreTrainedTokenizerFast),
        "itself: give a tokenizer loaded with AutoTokenizer.from_pretrained, or None",
    ),
    "a raw tokenizer": (lambda x: Target(x.model, x.tokenizer.backend_tokenizer), "tokenizer is a Tokenizer: give"),
    "a model's class": (lambda x: Target(type(x.model)), "model is the class LlamaForCausalLM itself: give a loaded"),
    "nothing to load": (lambda x: Target.from_pretrained(None), "the model is None: give a name on the hub, or"),
    "a number to load": (lambda x: Target.from_pretrained(7), "the model is 7: give a name on the hub, or the path"),
    "a missing folder": (
        lambda x: Target.from_pretrained("models/llama-8b/final"),
        "no model at 'models/llama-8b/final': there is no such folder",
    ),
    "a missing folder at home": (
        lambda x: Target.from_pretrained("~/no-such-model"),
        "no model at '~/no-such-model': there is no such folder",
    ),
    "a missing folder beside others": (
        lambda x: Target.from_pretrained("specdec/llama"),
        "no model at 'specdec/llama': there is no such folder",
    ),
    "a file for a folder": (
        lambda x: Target.from_pretrained("README.md"),
        "no model at 'README.md': it is a file, give the folder that it is in",
    ),
    "neither here nor on the hub": (
        lambda x: Target.from_pretrained("nobody/nothing"),
        "cannot load the model 'nobody/nothing', which is no local folder: ",
    ),
    "flash attention that is not installed": (
        lambda x: Target.from_pretrained("bundled/target", attn_implementation="flash_attention_2"),
        "; leave attn_implementation out, the engine computes attention itself",
    ),
    "an option that the model has not": (
        lambda x: Target.from_pretrained("bundled/target", load_in_5bit=True),
        "cannot load the model 'bundled/target': LlamaForCausalLM.__init__() got an unexpected keyword argument",
    ),
    "a device without numbers": (
        lambda x: Target.from_pretrained("bundled/target", device="meta"),
        "device='meta' holds shapes and no numbers",
    ),
    "a device that is not there": (
        lambda x: Target.from_pretrained("bundled/target", device="xpu"),
        "device='xpu' is not there, or torch cannot use it (",
    ),
    "a number for a device": (lambda x: Target.from_pretrained("bundled/target", device=0), "device=0: give 'auto', "),
    "no dtype": (lambda x: Target.from_pretrained("bundled/target", dtype=None), "dtype=None: give 'auto', "),
    "a width for a dtype": (lambda x: Target.from_pretrained("bundled/target", dtype=16), "dtype=16: give 'auto', "),
    "a factor for a shape": (lambda x: Target.from_pretrained("bundled/target", inflate=3), "inflate=3: give one of "),
    # Runner, drafters, shapes and rules.
    "a runner of a target": (
        lambda x: ModelRunner(x.target, max_batch_size=1, max_length=8),
        "model is a Target: give the model in it",
    ),
    "a runner of floats": (
        lambda x: ModelRunner(x.model, max_batch_size=1.0, max_length=8),
        f"max_batch_size=1.0: {WHOLE}",
    ),
    "negative nodes": (
        lambda x: ModelRunner(x.model, max_batch_size=1, max_length=8, max_nodes=-1),
        "max_nodes=-1: give at least 0",
    ),
    "a drafter of a name": (
        lambda x: ModelDrafter("gpt2"),
        "model is the text 'gpt2': give a loaded model, or use ModelDrafter.from_pretrained('gpt2')",
    ),
    "a drafter of a target": (lambda x: ModelDrafter(x.target), "model is a Target: give the model in it"),
    "a fraction of a chain": (lambda x: ModelDrafter(x.small, 2.5), f"chain length=2.5: {WHOLE}"),
    "no shape": (lambda x: ModelDrafter(x.small, None), "the tree shape is None: give a length such as 4, branching"),
    "a shape as text": (lambda x: ModelDrafter(x.small, "3,2"), "the tree shape is '3,2': give a length such as 4"),
    "a huge tree": (
        lambda x: ModelDrafter(x.small, [64, 64, 64]),
        "branching factors [64, 64, 64] make a tree of 266,304 nodes, and a tree may have at most 4,096 nodes",
    ),
    "a true shape": (lambda x: ModelDrafter(x.small, True), f"chain length=True: {WHOLE}"),
    "a fraction of a branch": (lambda x: ModelDrafter(x.small, [2.5, 1]), f"branching factor=2.5: {WHOLE}"),
    "a shape by name": (lambda x: ModelDrafter(x.small, {"chain": 3}), "the tree shape is {'chain': 3}: give a length"),
    "the class TreeShape": (
        lambda x: ModelDrafter(x.small, TreeShape),
        "the class TreeShape itself: give one, such as",
    ),
    "a factor list": (
        lambda x: TreeShape.branching([3, 2]),
        "[3, 2]: give them one by one, as in TreeShape.branching(",
    ),
    "flat paths": (lambda x: TreeShape.from_paths([0, 1]), "a path of a tree shape is 0: give a list of sibling ranks"),
    "half a rank": (lambda x: TreeShape.from_paths([(0.5,)]), f"sibling rank=0.5: {WHOLE}"),
    "an unknown draw": (lambda x: ModelDrafter(x.small, sampling="greedy"), "drafter sampling='greedy': give one of"),
    "a warm text": (lambda x: ModelDrafter(x.small, temperature="0.7"), "drafter temperature='0.7': give 0 (top-k), a"),
    "a cold drafter": (lambda x: ModelDrafter(x.small, temperature=-1), "drafter temperature=-1: give 0 (top-k), a"),
    "a tokenizer's name": (lambda x: ModelDrafter(x.small, tokenizer="gpt2"), "tokenizer is the text 'gpt2': give"),
    "n-grams of a float": (lambda x: NGramDrafter(2.5), f"max_draft_tokens=2.5: {WHOLE}"),
    "n-grams of a text": (lambda x: NGramDrafter(max_ngram="4"), f"max_ngram='4': {WHOLE}"),
    "n-grams of a flag": (lambda x: NGramDrafter(branches=True), f"branches=True: {WHOLE}"),
    "n-grams without end": (
        lambda x: NGramDrafter(10**6),
        "make a tree of 2,000,000 nodes, and a tree may have at most",
    ),
    "Medusa of a name": (
        lambda x: MedusaDrafter("bundled/medusa"),
        "heads is a str: give MedusaHeads, or load them with MedusaDrafter.from_pretrained(…)",
    ),
    "Medusa of a class": (lambda x: MedusaDrafter(MedusaHeads), "heads is the class MedusaHeads itself"),
    "Medusa in half a depth": (lambda x: MedusaDrafter(x.heads, shape=2.5), f"chain length=2.5: {WHOLE}"),
    "Medusa elsewhere": (
        lambda x: MedusaDrafter.from_pretrained("heads/of/mine"),
        "no Medusa checkpoint at heads/of/mine: there is no such folder",
    ),
    "Medusa on no device": (
        lambda x: MedusaDrafter.from_pretrained("bundled/medusa", device="xpu"),
        "device='xpu' is not there",
    ),
    "no heads": (lambda x: MedusaHeads(num_heads=0, hidden_size=8, vocab_size=8), "num_heads=0: give at least 1"),
    "a lenience as text": (lambda x: LenientVerifier(lenience="0.8"), "lenience='0.8': give a factor in (0, 1]"),
    "a flag for a lenience": (lambda x: LenientVerifier(lenience=True), "lenience=True: give a factor in (0, 1]"),
    "an epsilon as text": (lambda x: TypicalVerifier(epsilon="x"), "epsilon='x': give a probability in (0, 1)"),
    "no alpha": (lambda x: CascadeVerifier(alpha=None), "alpha=None: give a number"),
    "no deferral": (lambda x: CascadeVerifier(deferral=None), "deferral=None: choose chow, "),
    "solvers": (lambda x: WeightedTransportVerifier(solver=["pairs"]), "solver=['pairs']: choose pairs or program"),
    # What is asked for.
    "no prompts": (lambda x: x.engine.generate(None), "prompts is None: give a text, a list of token ids or"),
    "a number": (lambda x: x.engine.generate(3), "prompts is an int: give a text, a list of token ids or"),
    "what a tokenizer returns": (
        lambda x: x.engine.generate(x.tokenizer("abc")),
        "prompts is what a tokenizer returns: give its input_ids",
    ),
    "a message alone": (
        lambda x: x.engine.generate({"role": "user", "content": "x"}),
        "prompts is a single chat message: give a list of messages",
    ),
    "bytes": (lambda x: x.engine.generate([b"abc"]), "prompt 0: the prompt is bytes: give text or token ids"),
    "fractions of tokens": (lambda x: x.engine.generate([[1, 2.7]], SHORT), "prompt 0: token id=2.7: give whole"),
    "truths for tokens": (lambda x: x.engine.generate([True, False], SHORT), "prompt 0: token id=True: give whole"),
    "logits for tokens": (lambda x: x.engine.generate(torch.rand(2, 3)), "prompt 0: token id=0."),
    "a list too many": (
        lambda x: x.engine.generate([[[1, 2]]]),
        "prompt 0: the prompt is a list with a list in it: give a text, a list of token ids or",
    ),
    "an unordered prompt": (lambda x: x.engine.generate({1, 2}), "prompts is a set: give a text"),
    "an empty text": (lambda x: x.engine.generate(""), "prompt 0: the prompt '' has no tokens"),
    "text without tokenizer": (
        lambda x: x.silent.generate("hi"),
        "prompt 0: a text prompt needs a tokenizer: give the Target one, or pass token ids",
    ),
    "chat without tokenizer": (
        lambda x: x.silent.generate([{"role": "user", "content": "hi"}]),
        "prompt 0: chat messages need a tokenizer: give the Target one, or pass token ids",
    ),
    "chat without template": (
        lambda x: x.engine.generate([{"role": "user", "content": "hi"}]),
        "prompt 0: the target's tokenizer has no chat template",
    ),
    "a message without role": (
        lambda x: x.engine.generate([{"content": "hi"}]),
        "prompt 0: chat message 0 is {'content': 'hi'}: give {'role': 'user', 'content': 'text'}",
    ),
    "a dict for sampling": (
        lambda x: x.engine.generate("hi", {"temperature": 1}),
        "sampling is a dict: give SamplingParams(temperature=…)",
    ),
    "the class SamplingParams": (
        lambda x: x.engine.generate("hi", SamplingParams),
        "sampling is the class SamplingParams itself: give an instance",
    ),
    "a number for sampling": (lambda x: x.engine.generate("hi", 0.7), "sampling is a float: give SamplingParams(…)"),
    "dicts for sampling": (
        lambda x: x.engine.generate(["a", "b"], [SHORT, {"n": 2}]),
        "sampling 1 is a dict: give SamplingParams(n=…)",
    ),
    "transformers' sampling": (
        lambda x: x.engine.generate("hi", GenerationConfig()),
        "sampling is a GenerationConfig: give specdec.generation.from_generation_config(…)",
    ),
    "a processor's class": (lambda x: SamplingParams(logits_processor=dict), "has a class itself: give an instance"),
    "a word for speculate": (lambda x: x.engine.generate("hi", speculate="no"), "speculate='no': give True or False"),
    "two prompts to submit": (
        lambda x: x.engine.submit(["a", "b"]),
        "the prompt is a list with a str in it: give a text, a list of token ids or a list of chat messages",
    ),
    "a dict to submit": (lambda x: x.engine.submit("a", {"n": 1}), "sampling is a dict: give SamplingParams(n=…)"),
    "a stream that nobody reads": (lambda x: x.engine.stream(5), "prompts is an int: give a text"),
    "a class in generate": (
        lambda x: SpeculativeGenerate(NGramDrafter, RejectionVerifier()),
        "drafter is the class NGramDrafter itself",
    ),
    "a dict for a config": (lambda x: from_generation_config({"top_k": 3}), "config is a dict: give a Generation"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence_before_any_work(name: str, at_hand: SimpleNamespace) -> None:
    mistake, sentence = MISTAKES[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        mistake(at_hand)
    message = str(raised.value)
    assert sentence in message
    assert "\n" not in message
    assert at_hand.engine.unfinished == at_hand.silent.unfinished == 0


def ids(engine: Engine, prompts: Any) -> list[tuple[int, ...]]:
    """The prompts as the engine understood them."""
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


def test_what_a_chat_template_says_is_shown(at_hand: SimpleNamespace) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    engine = Engine(Target(at_hand.model, tokenizer), max_length=64)
    with pytest.raises(ValueError, match="the target's chat template does not take these messages: roles must alt"):
        engine.generate([{"role": "user", "content": "Hi"}], SHORT)
