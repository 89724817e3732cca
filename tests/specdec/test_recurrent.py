"""Recurrent layers: found by a trial, and right at every node of ragged, growing rows with a tree of its own for each.

Every node's logits are compared with a plain forward over its path, without a cache. The measure of rounding is the
model's own decoding, token by token, with a cache of transformers: it is as far from plain forwards. Models that do
one thing wrong must be found. Then targets and drafting models with such layers: token for token, and in law.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters import EagleDrafter, MarginalDrafter, ModelDrafter, PARDDrafter
from specdec import Drafter, DraftTree, Engine, ForwardBatch, ModelRunner, Paging, SamplingParams, Target
from specdec.cache import states as states_module
from specdec.cache.states import Pending, States
from specdec.drafting.builders import ExpansionTree
from specdec.memory import NoRoomError
from specdec.quantization import quantize
from specdec.recurrent import recurrence
from specdec.recurrent.recurrence import Call, calls_of
from specdec.target import facts
from tests.architectures import MODEL_TYPES, VOCAB, own_error, tiny
from tests.components import DRAFTERS
from tests.forwards import prefill, verify
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.shapes import shapes_unchecked
from tests.specdec.test_pages import Fitting
from tests.test_distribution import LEVEL, SAMPLINGS, p_value
from tests.test_distribution import VOCAB as FEW
from tests.test_lossless import prompts
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("untried"),
]
TRIAL = facts._trial  # before the fixture has taken it away

SLOTS, NODES, ROUNDS = 4, 5, 6

FOUND: dict[str, tuple[str, bool]] = {
    "falcon_h1": ("FalconH1Mixer", False),
    "jamba": ("JambaMambaMixer", True),
    "kimi_linear": ("KimiLinearDeltaAttention", False),
    "lfm2": ("Lfm2ShortConv", False),
    "lfm3": ("Lfm3ShortConv", False),
    "mamba": ("MambaMixer", True),
    "mamba2": ("Mamba2Mixer", False),
    "minimax": ("MiniMaxLightningAttention", False),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", False),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", False),
    "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", True),
    "zaya": ("ZayaCCAProjection", False),
}
"""The class of a type's recurrent layers, and whether they take one token at a time behind a state: one type of each
kind of layer (``test_architectures`` has every type)."""

FAST = ("qwen3_next", "mamba", "recurrent_gemma", "zaya")
"""Convolutions beside a matrix of states; states one by one; states in attributes; a layer that gives three tensors."""


def plain(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@torch.inference_mode()
def error(model: PreTrainedModel, *, chunk: int) -> float:
    """The largest error of any node over some rounds, relative to the largest logit.

    Four slots, of which each round has some; prompts of all lengths (one has nothing before its root), in pieces;
    random trees that differ from row to row; a random path of each is accepted, or none.
    """
    runner = ModelRunner(model, max_batch_size=SLOTS, max_length=64, max_nodes=NODES)
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, VOCAB, length).tolist() for length in (1, 9, 2, 6)]
    starts, counts = np.zeros(SLOTS, dtype=np.int64), np.array([len(row) - 1 for row in rows])
    while (starts < counts).any():
        due = np.flatnonzero(starts < counts)
        pieces = np.minimum(counts - starts, chunk)[due]
        tokens = torch.from_numpy(generator.integers(0, VOCAB, (len(due), int(pieces.max()))))  # padding is any token
        for row, (slot, count) in enumerate(zip(due, pieces, strict=True)):
            tokens[row, :count] = torch.tensor(rows[slot][starts[slot] : starts[slot] + count])
        prefill(runner, tokens, starts[due], slots=due.tolist(), counts=pieces)
        starts[due] += pieces
    errors, largest = [], 0.0
    for _ in range(ROUNDS):
        slots = np.sort(generator.permutation(SLOTS)[: generator.integers(1, SLOTS + 1)])
        parents = np.array([[-1, *(generator.integers(0, node) for node in range(1, NODES + 1))] for _ in slots])
        tokens = generator.integers(0, VOCAB, parents.shape)
        tokens[:, 0] = [rows[slot][-1] for slot in slots]
        tree = DraftTree.build(torch.from_numpy(tokens), torch.from_numpy(parents))
        lengths = np.array([len(rows[slot]) - 1 for slot in slots])
        logits = verify(runner, tree, lengths, slots=slots.tolist()).scores
        paths = np.full((len(slots), NODES), -1)
        for row, slot in enumerate(slots):
            for node in range(NODES + 1):
                above = tree.ancestors[row, node].nonzero()[:, 0].tolist()
                wanted = plain(model, rows[slot][:-1] + tokens[row, above].tolist())[-1]
                errors.append(float((logits[row, node] - wanted).abs().max()))
                largest = max(largest, float(wanted.abs().max()))
            chosen = tree.ancestors[row, generator.integers(0, NODES + 1)].nonzero()[1:, 0].tolist()
            paths[row, : len(chosen)] = chosen
            rows[slot] += [*tokens[row, chosen].tolist(), int(generator.integers(0, VOCAB))]
        index = torch.from_numpy(slots)
        runner.cache.commit(index, torch.from_numpy(lengths), torch.from_numpy(paths))
    return max(errors) / largest


def tolerance(model: PreTrainedModel) -> float:
    """Thrice what the model's own decoding is off by; weights are wide here, and rounding grows with them."""
    return min(max(3 * own_error(model), 2e-6), 1e-4)


def run_again(patch: pytest.MonkeyPatch) -> None:
    """Memory has no room for a state of every node."""
    short = states_module._short
    patch.setattr(
        states_module, "_short", lambda layers, _, nodes, *more: None if nodes else short(layers, 2**50, nodes, *more)
    )


@pytest.mark.parametrize("name", [complete(each, strong=each in FAST) for each in FOUND if each in MODEL_TYPES])
def test_every_node_is_as_in_a_plain_forward_over_its_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_trial", TRIAL)
    model = tiny(name)
    kind, one_by_one = FOUND[name]
    mixers = ModelRunner(model, max_batch_size=1, max_length=32).facts.mixers
    assert {type(model.get_submodule(mixer.name)).__name__ for mixer in mixers} == {kind}
    assert {mixer.one_by_one for mixer in mixers} == {one_by_one}
    bound = tolerance(model)
    assert error(model, chunk=3) < bound
    assert error(model, chunk=64) < bound
    run_again(monkeypatch)
    assert error(model, chunk=3) < bound, "paths that run again"


def forgotten(patch: pytest.MonkeyPatch) -> None:
    """Only the root of a round enters the states."""
    patch.setattr(Pending, "commit", lambda *args: None)


def wrong_parent(patch: pytest.MonkeyPatch) -> None:
    """Nodes start from the root's state, as if a tree were a star."""

    def calls(batch: ForwardBatch, *, one_by_one: bool) -> list[Call]:
        found = calls_of(batch, one_by_one=one_by_one)
        if batch.counts is not None:
            return found
        root = [each for each in found if not int(each.columns.max())]
        return [*root, *(each._replace(before=torch.ones_like(each.after)) for each in found[len(root) :])]

    patch.setattr(recurrence, "calls_of", calls)


def without_root(patch: pytest.MonkeyPatch) -> None:
    """Where nothing was accepted, nothing is committed: the root never enters the state."""
    commit = States.commit

    def some(self: States, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        accepted = (path >= 0).any(1)
        moved = counts.where(accepted | (path.shape[1] == 0), 0)
        commit(self, slots, path, moved)
        self.lengths[slots] += counts - moved

    patch.setattr(States, "commit", some)


@pytest.mark.parametrize("mutant", [wrong_parent, without_root, forgotten])
def test_a_mistake_is_found(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_next")
    bound = tolerance(model)
    if mutant is forgotten:
        run_again(monkeypatch)
    assert error(model, chunk=64) < bound
    mutant(monkeypatch)
    if mutant is wrong_parent:
        monkeypatch.setattr(facts, "_trial", TRIAL)
        with pytest.raises(ValueError, match="its logits differ by"):
            ModelRunner(model, max_batch_size=1, max_length=32)
        monkeypatch.setattr(facts, "_trial", lambda *args: None)
    assert error(model, chunk=64) > 100 * bound


def test_layers_are_found_in_half_precision_and_quantized_and_the_model_is_left_as_it_was() -> None:
    for name in ("recurrent_gemma", "qwen3_next"):
        mixers = ModelRunner(tiny(name).bfloat16(), max_batch_size=1, max_length=32).facts.mixers
        assert {mixer.one_by_one for mixer in mixers} == {FOUND[name][1]}
    quantized = ModelRunner(quantize(tiny("qwen3_next"), "int8", check=False), max_batch_size=1, max_length=32)
    assert {mixer.projections for mixer in quantized.facts.mixers} == {("in_proj_qkvz", "in_proj_ba")}
    model = tiny("recurrent_gemma")
    before = plain(model, [1, 2, 3])
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    runner = ModelRunner(model, max_batch_size=1, max_length=32, max_nodes=1)
    verify(runner, DraftTree.root_only(torch.tensor([5])), [0])
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items() if "state" in key)
    assert torch.equal(plain(model, [1, 2, 3]), before)


def test_states_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Those of all nodes are not needed, and one line says that they do not fit."""
    model = tiny("qwen3_next")
    runner = ModelRunner(model, max_batch_size=2, max_length=32, max_nodes=6)
    states = runner.cache.states
    assert sum(each.nbytes for each in states.tensors) == 2 * (6 + 2) * states.bytes_per_state
    monkeypatch.setattr("specdec.cache.states.free_memory", lambda device: 17 * states.bytes_per_state)
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_length": 32}
    few = ModelRunner(model, **sizes, max_nodes=14).cache.states
    assert few.short is not None
    # Two places in every slot, and one of three layers' at the nodes.
    assert 3 * few.bytes == 2 * (3 * 2 + 14) * few.bytes_per_state
    (line,) = [each.message for each in caplog.records if "recurrent" in each.message]
    assert line.startswith("accepted tokens go through recurrent layers again, because the memory for states of")
    monkeypatch.setattr("specdec.cache.states.free_memory", lambda device: 10 * states.bytes_per_state)
    with pytest.raises(NoRoomError, match=r"states of .*, of one layer for every node,.* max_batch_size=1 with"):
        ModelRunner(model, **sizes, max_nodes=14)


def test_outputs_do_not_depend_on_schedules_where_accepted_tokens_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests lose their slots at random, and begin again; nothing is shared."""
    target = Target(tiny("qwen3_next"))
    greedy, asked = SamplingParams(max_new_tokens=8), [*prompts()[:3], prompts()[0]]
    drafter = DRAFTERS["recycling"](target.model)
    alone = Engine(target, drafter, RejectionVerifier(), max_length=64).generate(asked, greedy)
    with pytest.raises(ValueError, match="qwen3_next has recurrent layers, whose states no requests share"):
        Engine(target, max_length=64, cache=Paging(shared=True))
    run_again(monkeypatch)
    policy, paging = Fitting(np.random.default_rng(0)), Paging(page_size=4)
    sizes: dict[str, Any] = {"max_batch_size": 3, "max_length": 64, "prefill_chunk": 5}
    engine = Engine(target, drafter, RejectionVerifier(), cache=paging, scheduler=policy, recording="rounds", **sizes)
    assert engine.recording == "decisions"
    for _ in range(2):
        outputs = engine.generate(asked, greedy)
        assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]
    states = engine.runner.cache.states
    assert states.short is not None and states.pending.inputs
    assert engine.page_counts.preempted == policy.preempted > 0 and engine.page_counts.recomputed > 0


def small() -> PreTrainedModel:
    model = tiny("qwen3_next", vocab_size=FEW, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    model.get_output_embeddings().weight.data.mul_(2.0)
    model.get_submodule("model.layers.0.linear_attn.out_proj").weight.data.mul_(8.0)  # the state matters
    return model


def law(slots: int | None, drafter: str = "eagle_tree_without_replacement", samples: int = 2000) -> float:
    return p_value(small(), drafter, RejectionVerifier(), SAMPLINGS["temperature 1"], samples=samples, slots=slots)


def test_outputs_follow_the_target() -> None:
    """Three tokens together, as exact enumeration of the target's has them; with refilled slots."""
    assert law(500) > LEVEL
    assert law(250, "model_tree_without_replacement", 1000) > LEVEL, "drafted by another hybrid model"


keep = States.commit


def only_prompts(self: States, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Mutant of ``States.commit``: a round's states are dropped; prompts' are kept."""
    if path.shape[1]:
        self.lengths[slots] += counts
    else:
        keep(self, slots, path, counts)


def test_states_that_are_not_committed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "commit", only_prompts)
    assert law(None, samples=1000) < LEVEL


FEW_PROMPTS = [[3], *(np.random.default_rng(2).integers(1, 24, length).tolist() for length in (2, 5, 14))]
"""Also one before whose root there is nothing."""

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


def engine_of(target: Target, drafter: Drafter, **options: Any) -> Engine:
    return Engine(target, drafter, RejectionVerifier(), max_length=64, prefill_chunk=4, **options)


def rejected(engine: Engine) -> int:
    """Return how many greedy drafts were not accepted to their end, after comparing outputs with plain decoding."""
    outputs = engine.generate(FEW_PROMPTS, GREEDY)
    plain = engine.generate(FEW_PROMPTS, GREEDY, speculate=False)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    steps = [step for output in outputs for step in output.steps]
    assert sum(step.proposed_depth for step in steps) > len(steps)
    return sum(step.accepted < step.proposed_depth for step in steps)


SHAPES = {"tree": (2, 2, 1), "expansion": ExpansionTree(12, 2, 3)}
"""The expansion goes on from all nodes: a deeper one leaves some out, where the most probable path may end."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("qwen3_next", "tree"),
        ("lfm2", "expansion"),
        *(complete(kind, "expansion", strong=False) for kind in ("mamba", "recurrent_gemma", "falcon_h1", "zaya")),
    ],
)
def test_a_model_accepts_its_own_drafts(kind: str, shape: str) -> None:
    """With fewer slots than requests, prompts in pieces, and one before whose root there is nothing."""
    target = Target(tiny(kind))
    assert not rejected(engine_of(target, ModelDrafter(target.model, SHAPES[shape]), max_batch_size=3))


def test_it_follows_what_others_drafted_and_slots_that_are_lost() -> None:
    """Its rounds alternate with a look-up's, some rows draft nothing, and requests begin again; nothing is shared."""
    target = Target(tiny("qwen3_next"))
    made = DRAFTERS["choice"](target.model, 0.0)
    assert rejected(engine_of(target, made, max_batch_size=3)) <= 8  # of the look-up's
    paging, policy = Paging(page_size=4, pages=48, swap=2**20, reserve=0.5), Fitting(np.random.default_rng(0))
    drafter = ModelDrafter(target.model, 3)
    assert not rejected(engine_of(target, drafter, max_batch_size=3, scheduler=policy, cache=paging))
    assert policy.preempted
    attention = Target(tiny_model("llama", vocab_size=64))
    paging = Paging(page_size=4, pages=48, shared=True, reserve=0.5)
    rejected(engine_of(attention, drafter, max_batch_size=3, cache=paging))


def test_states_of_other_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("qwen3_next"))
    engine = engine_of(target, ModelDrafter(target.model, (2, 2, 1)))
    states = engine.session.scorer.runner.cache.states
    monkeypatch.setattr(states, "commit", partial(only_prompts, states))
    assert rejected(engine) > 10


def test_what_a_model_with_recurrent_layers_is_refused_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that run again do so in pieces, which round in another way; and trees grow from level to level."""
    target = Target(tiny("lfm2"))
    for model, drafter, said in (
        (target.model, MarginalDrafter(2, samples=2), "attention alone"),
        (tiny_model(vocab_size=64), PARDDrafter(target.model, 3, mask_token_id=7), "fill masks with"),
    ):
        with pytest.raises(ValueError, match=rf"lfm2 has recurrent layers.*{said}"):
            Engine(Target(model), drafter, RejectionVerifier(), max_length=40)
    run_again(monkeypatch)
    with pytest.raises(ValueError, match=r"of which every node has one"):
        Engine(target, DRAFTERS["recycling"](target.model), RejectionVerifier(), max_length=32, invariant=True)
    with pytest.raises(NoRoomError, match="the KV caches of target and drafter need"):
        Engine(target, ModelDrafter(target.model, 3), RejectionVerifier(), max_length=32)


TEXTS = ("import os\n\n\ndef read_lines(path):\n", "class Stack:\n    def __init__(self):\n", "    for name in ")


def test_the_hybrid_writes_what_its_own_forwards_give() -> None:
    """Ragged prompts, one slot fewer than requests; and the head knows the target, or it would draft for nothing."""
    target = Target.from_pretrained("bundled/hybrid", dtype="float32", device="cpu")
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    drafter = EagleDrafter.from_pretrained("bundled/hybrid_eagle3", shape=5)
    with shapes_unchecked(), Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        wanted = [reference_decode(target.model, text, greedy) for text in texts]
        outputs = engine.generate(texts, greedy)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(map(len, wanted)) > 2 * sum(len(output.steps) for output in outputs)
