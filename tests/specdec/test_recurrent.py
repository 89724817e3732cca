"""Recurrent layers: found by a trial, and right at every node of ragged, growing rows with a tree of its own for each.

Every node's logits are compared with a plain forward over its path, without a cache. The measure of rounding is the
model's own decoding, token by token, with a cache of transformers: it is as far from plain forwards. Models that do
one thing wrong must be found.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import DraftTree, ForwardBatch, ModelRunner
from specdec.cache import states as states_module
from specdec.cache.states import Pending, States
from specdec.memory import NoRoomError
from specdec.quantization import quantize
from specdec.recurrent import recurrence
from specdec.recurrent.recurrence import Call, calls_of
from tests.architectures import MODEL_TYPES, VOCAB, own_error, tiny
from tests.forwards import prefill, verify

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

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


def of_types(names: Sequence[str]) -> list[Any]:
    """Parameters for every type that this transformers knows; all but a few are left for the full tests."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in names if name in MODEL_TYPES]


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


Replace = Callable[[pytest.MonkeyPatch], None]


def run_again(patch: pytest.MonkeyPatch) -> None:
    """Memory has no room for a state of every node."""
    short = states_module._short

    def shorter(layers: Any, places: int, nodes: int, *sizes: Any) -> NoRoomError | None:
        return None if nodes else short(layers, 2**50, nodes, *sizes)

    patch.setattr(states_module, "_short", shorter)


@pytest.mark.parametrize("name", of_types(sorted(FOUND)))
def test_every_node_is_as_in_a_plain_forward_over_its_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def twice(patch: pytest.MonkeyPatch) -> None:
    """A path is run over once more: the root is its first node again."""
    commit = Pending.commit

    def again(self: Pending, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        commit(self, slots, path, counts)
        if path.shape[1]:
            self.path[slots, 0] = 0

    patch.setattr(Pending, "commit", again)


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


def padding(patch: pytest.MonkeyPatch) -> None:
    """All tokens of a padded piece go through the layers."""

    def calls(batch: ForwardBatch, *, one_by_one: bool) -> list[Call]:
        counts = None if batch.counts is None else np.full_like(batch.counts, batch.nodes)
        return calls_of(replace(batch, counts=counts), one_by_one=one_by_one)

    patch.setattr(recurrence, "calls_of", calls)


def zeros(patch: pytest.MonkeyPatch) -> None:
    """A slot in which nothing came before begins with a state of zeros."""

    def calls(batch: ForwardBatch, *, one_by_one: bool) -> list[Call]:
        found = calls_of(batch, one_by_one=one_by_one)
        return [each._replace(before=torch.zeros_like(each.after)) if each.before is None else each for each in found]

    patch.setattr(recurrence, "calls_of", calls)


MUTANTS: dict[str, tuple[str, Replace]] = {
    "a wrong parent's state": ("qwen3_next", wrong_parent),
    "a commit without the root": ("qwen3_next", without_root),
    "padding that reaches a layer": ("qwen3_next", padding),
    "a fresh slot of zeros": ("zaya", zeros),
    "a path that does not run again": ("qwen3_next", forgotten),
    "a path that runs twice": ("qwen3_next", twice),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, mutant = MUTANTS[name]
    # A slot of zeros is no fresh one where a layer has a bias.
    model = tiny(kind, attention_bias=True)
    bound = tolerance(model)
    if mutant in (forgotten, twice):
        run_again(monkeypatch)
    assert error(model, chunk=64) < bound
    mutant(monkeypatch)
    monkeypatch.setattr("specdec.target.facts._trial", lambda *args: None)
    assert error(model, chunk=64) > 100 * bound


def test_a_mistake_is_found_when_a_runner_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_parent(monkeypatch)
    with pytest.raises(ValueError, match="its logits differ by"):
        ModelRunner(tiny("qwen3_next"), max_batch_size=1, max_length=32)


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
