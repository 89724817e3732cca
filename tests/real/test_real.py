"""Language models that other people trained: what is promised of them, tried on each that is at hand.

``make test-real SPECDEC_MODELS=FOLDER`` runs these, where FOLDER has some of ``NAMES``, each in a folder of its own in
transformers' layout. One model is in memory at a time, in float32, with the drafter that is tried.
"""

import copy
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import drafters
from drafters.corpus import Corpus
from drafters.heads.eagle import Eagle3Head
from experiments.datasets.jsonl import Jsonl
from experiments.measuring.jobs import render
from experiments.serving.fields import RequestError, understand
from specdec import Drafter, Engine, Paging, SamplingParams, Target, Verifier
from specdec.checks.ties import examine
from specdec.drafting.builders import BeamSearchTree, ExpansionTree
from specdec.engine.intake import encode, encode_chat
from tests import components
from tests.test_distribution import LEVEL, NO_RESIDUAL, goodness
from verifiers import RejectionVerifier

TREE = components.TREE
NAMES = ("smollm2-135m", "gemma3-270m", "qwen-coder-0.5b", "qwen-coder-1.5b")
SMALLER = {"qwen-coder-1.5b": "qwen-coder-0.5b"}  # of the same vocabulary; the first name drafts for the others by text
FOLDER = Path(os.environ.get("SPECDEC_MODELS") or ".")
THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("SPECDEC_MODELS" not in os.environ, reason="SPECDEC_MODELS names no folder with models"),
]

TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "Müller schrieb: „Ça va? 🙂“ — 日本語の",
)
GREEDY = SamplingParams(max_new_tokens=16)
ROOM = 2.0
"""Bytes of memory that must be free, per byte of a model's weights in float32."""


def at_hand(name: str) -> Path:
    folder = FOLDER / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} has no model")
    return folder


def read(name: str) -> Target:
    """A model in float32, if there is memory for it."""
    folder = at_hand(name)
    needed = ROOM * 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # they are of 16 bits
    if psutil.virtual_memory().available < needed:
        pytest.skip(f"{name} needs {needed / 1e9:.1f} GB")
    return Target.from_pretrained(str(folder), dtype="float32", device="cpu")


def generated(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that transformers' ``generate`` writes after a prompt."""
    given = torch.tensor([list(prompt)])
    options = {"attention_mask": torch.ones_like(given), "do_sample": False, "max_new_tokens": count}
    return target.model.generate(given, **options)[0, len(prompt) :].tolist()  # type: ignore[operator]


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """A model, prompts, and what transformers writes after them, before any engine has touched the model."""
    torch.set_num_threads(THREADS)
    target = read(request.param)
    assert target.tokenizer is not None
    prompts = [encode(target.tokenizer, text) for text in TEXTS]
    if target.tokenizer.chat_template:
        prompts.append(encode(target.tokenizer, [{"role": "user", "content": "Count from one to ten in words."}]))
    written = [generated(target, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    layers = target.model.config.num_hidden_layers
    yield SimpleNamespace(
        name=request.param, target=target, model=target.model, prompts=prompts, written=written, layers=layers
    )
    del target
    gc.collect()


@pytest.fixture(autouse=True)
def _threads(_fresh_start: None) -> None:
    gc.collect()  # the drafter of the test before
    torch.set_num_threads(THREADS)


def check_same(target: Target, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> None:
    """Token for token, or up to a place where rounding may exchange two tokens (``specdec.checks.ties``)."""
    place = next((at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        assert len(found) == len(wanted)
        return
    sequence, pair = [*prompt, *wanted[:place]], (found[place], wanted[place])
    tie = examine(target.model, sequence, pair, GREEDY, prompt_length=len(prompt))
    assert tie.margin is not None and tie.bound is not None and tie.margin <= tie.bound, (place, pair, tie)
    print(f"a tie of float32 at {place}: margin {tie.margin:.2g}, bound {tie.bound:.2g}")


# ---------------------------------------------------------------- every kind of drafter


def eagle3(real: SimpleNamespace) -> Eagle3Head:
    """Heads of random weights, over a part of the vocabulary."""
    ids = [*range(0, real.target.vocab_size, 16)]
    return components.wide(Eagle3Head.for_target(real.model, draft_ids=ids), 1.5)


def written_before(real: SimpleNamespace) -> Corpus:
    return Corpus.of([[*prompt[-4:], *text] for prompt, text in zip(real.prompts, real.written, strict=True)])


def smaller(real: SimpleNamespace) -> Drafter:
    if real.name not in SMALLER:
        pytest.skip(f"{real.name} has no smaller model of its vocabulary")
    return drafters.ModelDrafter(read(SMALLER[real.name]).model, 3)


def other(real: SimpleNamespace) -> dict[str, Any]:
    """A model of another vocabulary."""
    if real.name == NAMES[0]:
        pytest.skip("the smallest model drafts for the others")
    target = read(NAMES[0])
    return {"model": target.model, "tokenizer": target.tokenizer}


def last(real: SimpleNamespace, share: float = 0.8) -> str:
    return f"{int(real.layers * share)}-"


DRAFTERS: dict[str, Callable[[SimpleNamespace], Drafter]] = {
    "ngram": lambda real: drafters.NGramDrafter(max_draft_tokens=4, branches=2),
    "suffix": lambda real: drafters.SuffixDrafter(6, mode="tree", tree_depth=8, shared=True),
    "recycling": lambda real: drafters.TokenRecyclingDrafter(TREE, scope="request"),
    "lookahead": lambda real: drafters.LookaheadDrafter(ngram=4, window=3, guesses=2),
    "rest": lambda real: drafters.RestDrafter(written_before(real), max_nodes=6, max_depth=3, min_match=1),
    "sam": lambda real: drafters.SamDrafter(written_before(real), max_draft_tokens=4, threshold=1),
    "marginals": lambda real: drafters.MarginalDrafter(TREE, samples=2),
    "smaller model": smaller,
    "tli": lambda real: drafters.TLIDrafter(shape=TREE, **other(real)),
    "slem": lambda real: drafters.SLEMDrafter(drafters.ModelDrafter(shape=3, **other(real))),
    "early exit": lambda real: drafters.SelfDrafter([last(real, 0.7)], TREE),
    "skip": lambda real: drafters.SelfDrafter([real.layers // 2, f"{real.layers // 3}.mlp"], ExpansionTree(7, 3, 3)),
    "quantized": lambda real: drafters.SelfDrafter(quantization="int4", shape=3),
    "staged": lambda real: drafters.StagedDrafter(
        drafters.SelfDrafter([last(real)], 3), drafters.NGramDrafter(2, branches=1), RejectionVerifier()
    ),
    "medusa": lambda real: drafters.MedusaDrafter(components.medusa_heads(real.model, 2), [2, 1]),
    "hydra": lambda real: drafters.HydraDrafter(components.hydra_heads(real.model, 2), [2, 1]),
    "redrafter": lambda real: drafters.ReDrafter(components.recurrent_head(real.model), BeamSearchTree(2, 2)),
    "eagle": lambda real: drafters.EagleDrafter(components.eagle_head(real.model), TREE),
    "eagle3": lambda real: drafters.EagleDrafter(eagle3(real), ExpansionTree(nodes=8, depth=3, width=3)),
    "parallel eagle": lambda real: drafters.PEagleDrafter(components.peagle_head(real.model), TREE),
    "mtp": lambda real: drafters.MTPDrafter(components.mtp_head(real.model), 3),
    "uno": lambda real: drafters.UnoDrafter(components.noisy_adapter(real.model, 0.1), 3),
    "pard": lambda real: drafters.PARDDrafter(real.model, 3, mask_token_id=real.target.vocab_size - 1),
    "block": lambda real: drafters.BlockDrafter(components.block_head(real.model), ExpansionTree(6, 3, 6)),
    "choice": lambda real: drafters.ChoiceDrafter(drafters.SuffixDrafter(4), drafters.SelfDrafter([last(real)], 2)),
    "merged": lambda real: drafters.MergedDrafter(
        drafters.SuffixDrafter(4), drafters.EagleDrafter(eagle3(real), [2, 1])
    ),
}
AGREE = ("ngram", "suffix", "rest", "sam", "smaller model", "tli", "slem", "quantized", "choice")
"""Drafters of which some tokens are accepted, whatever the model."""


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_outputs_are_transformers(real: SimpleNamespace, kind: str) -> None:
    """Ragged prompts, more than slots; every drafter reads a real model's own hidden states, layers and vocabulary."""
    engine = Engine(real.target, DRAFTERS[kind](real), RejectionVerifier(), max_batch_size=2, max_length=256)
    outputs = engine.generate(real.prompts, GREEDY)
    for prompt, output, written in zip(real.prompts, outputs, real.written, strict=True):
        check_same(real.target, prompt, output.token_ids, written)
    steps = [step for output in outputs for step in output.steps]
    print(f"{kind}: {sum(len(step.token_ids) for step in steps) / len(steps):.2f} tokens a round")
    assert any(step.proposed_nodes for step in steps)
    assert any(step.accepted for step in steps) or kind not in AGREE


def test_a_long_prompt_is_read_in_chunks_and_over_every_window(real: SimpleNamespace) -> None:
    """2,000 tokens, four chunks: with Gemma's window of 512, most of them are out of sight in most layers."""
    text = Path(os.__file__).with_name("textwrap.py").read_text(encoding="utf-8")
    prompt = encode(real.target.tokenizer, text)[:2000]
    assert len(prompt) == 2000
    written = generated(real.target, prompt, 16)
    for cache, drafter in (
        (None, drafters.SelfDrafter([last(real, 0.7)], TREE)),
        (Paging(page_size=64), drafters.NGramDrafter(max_draft_tokens=4, branches=2)),
    ):
        engine = Engine(real.target, drafter, RejectionVerifier(), max_length=2048, prefill_chunk=512, cache=cache)
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=16))
        check_same(real.target, prompt, output.token_ids, written)


# ---------------------------------------------------------------- the joint law

SAMPLED = SamplingParams(temperature=1.0, top_k=3, max_new_tokens=3, ignore_eos=True, n=400, seed=0)
OPEN = "My favourite animals are"


@torch.inference_mode()
def exact_law(target: Target, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The probability of every output, from transformers' forwards over whole sequences and a softmax of three."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(SAMPLED.max_new_tokens):
        logits: Tensor = target.model(torch.tensor([[*prompt, *path] for path in law])).logits[:, -1].double()
        values, tokens = logits.topk(SAMPLED.top_k)
        nexts = zip(law.items(), values.softmax(-1).tolist(), tokens.tolist(), strict=True)
        law = {
            (*path, token): mass * share
            for (path, mass), shares, three in nexts
            for share, token in zip(shares, three, strict=True)
        }
    return law


def p_value(real: SimpleNamespace, rule: Verifier) -> float:
    prompt = encode(real.target.tokenizer, OPEN)
    law = exact_law(real.target, prompt)
    assert max(law.values()) < 0.5, "tokens are drawn"
    sharper: dict[str, Any] = {"sampling": "iid", "temperature": 0.3}
    drafter = drafters.SelfDrafter([f"{real.layers // 2}.mlp"], 2, **sharper)
    size = {"max_batch_size": 50, "max_length": 32, "cache": Paging(page_size=4, shared=True)}
    outputs = Engine(real.target, drafter, rule, **size).generate([prompt], SAMPLED)
    assert sum(step.accepted for output in outputs for step in output.steps) > SAMPLED.n / 4
    return goodness((output.token_ids for output in outputs), law)


def test_three_tokens_of_a_cut_vocabulary_follow_their_joint_law(real: SimpleNamespace) -> None:
    """And the commonest mistake does not: after a rejection, a token of p instead of the residual."""
    assert p_value(real, RejectionVerifier()) > LEVEL
    assert p_value(real, NO_RESIDUAL) < LEVEL


# ---------------------------------------------------------------- chats

SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds 2.", "parameters": SCHEMA}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}
ASK, SAY = {"role": "user", "content": "What is 2 + 2? 🙂"}, {"role": "assistant", "content": "Let me see."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASK],
    "several turns": [{"role": "system", "content": "Be brief."}, ASK, SAY, {"role": "user", "content": "Well?"}],
    "tools": [ASK, SAY | {"tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
    "a begun answer": [ASK, SAY],
}


def as_clients_send(message: dict[str, Any]) -> dict[str, Any]:
    """Contents in parts, and the arguments of calls as JSON."""
    sent = copy.deepcopy(message) | {"content": [{"type": "text", "text": text} for text in message["content"]]}
    for call in sent.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_chats_are_apply_chat_templates(name: str, chat: str, tmp_path: Path) -> None:
    """In the library, at the endpoint and in a dataset: with the special tokens that the template writes, and once."""
    tokenizer: Any = AutoTokenizer.from_pretrained(at_hand(name))
    messages, tools = CHATS[chat], [TOOL] if chat == "tools" else None
    sent = [as_clients_send(message) for message in messages]
    body = {"messages": sent, "max_tokens": 8} | ({"tools": tools} if tools else {})
    refused = None if tokenizer.chat_template else "no chat template"
    if tools and not refused and "tools" not in tokenizer.chat_template:
        refused = "does not read 'tools'"
    if refused:
        with pytest.raises(RequestError, match=refused):
            understand(body, tokenizer, GREEDY, chat=True, most=8)
        return
    goes_on = messages[-1]["role"] == "assistant"
    ends = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    wanted = tokenizer.apply_chat_template(messages, tools=tools, **ends)["input_ids"]
    assert wanted.count(tokenizer.bos_token_id) == tokenizer.decode(wanted).count(tokenizer.bos_token)
    assert encode_chat(tokenizer, messages, {"tools": tools} if tools else {}) == wanted
    assert understand(body, tokenizer, GREEDY, chat=True, most=8).prompts == [wanted]
    if not goes_on:
        (tmp_path / "rows.jsonl").write_text(json.dumps(body | {"id": 1}) + "\n")
        (prompt,) = Jsonl(file=str(tmp_path / "rows.jsonl")).load()
        assert list(render(prompt, tokenizer)) == wanted
