"""A forward as a value: any slots in any order, any topology, tokens or embeddings, and only what is wanted."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, T5Config, T5ForConditionalGeneration

import specdec.execution.replay
from specdec.forward import ForwardBatch, Wants, slot_index
from specdec.host import without_looking
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.tree import DraftTree, TreeShape
from tests.forwards import prefill, verify
from tests.models import COMMON, tiny_model

LENGTHS = [9, 4, 12, 6]
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def rows_of(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def filled(model, slots: list[int], *, max_batch_size: int = 6, **kwargs: object) -> tuple[ModelRunner, list[Tensor]]:
    """A runner with ragged rows in some slots."""
    runner = ModelRunner(model, max_batch_size=max_batch_size, max_length=40, max_nodes=8, **kwargs)  # type: ignore[arg-type]
    rows = rows_of(LENGTHS[: len(slots)])
    tokens = torch.zeros(len(slots), max(LENGTHS), dtype=torch.long)
    for row, prompt in enumerate(rows):
        tokens[row, : len(prompt)] = prompt
    prefill(runner, tokens, np.zeros(len(slots), dtype=np.int64), slots=slots)
    return runner, rows


def drafted(batch: int) -> DraftTree:
    generator = torch.Generator().manual_seed(2)
    return DraftTree.from_shape(SHAPE, torch.randint(0, 64, (batch, SHAPE.num_nodes + 1), generator=generator))


@torch.inference_mode()
def plainly(model, row: Tensor, tree: DraftTree, b: int, node: int) -> Tensor:
    path = tree.ancestors[b, node].nonzero()[:, 0]
    return model(torch.cat([row, tree.tokens[b, path]])[None]).logits[0, -1]


@pytest.mark.parametrize(
    ("architecture", "slots", "way"),
    [
        ("llama", [5, 0, 3, 1], "captured"),
        ("gemma2", [2, 3, 5, 0], "eager"),
        ("mistral_sliding", [4], "own attention"),
        ("gpt2", [5, 0, 3, 1], "unknown lengths"),
        ("llama", [0, 1, 2, 3], "unknown lengths"),
    ],
)
def test_slots_may_stand_in_any_order(
    architecture: str, slots: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", 1 if way == "captured" else 10**9)
    model = tiny_model(architecture)
    runner, rows = filled(model, slots, attention="eager" if way == "own attention" else "auto")
    tree, lengths = drafted(len(slots)), np.array(LENGTHS[: len(slots)])
    for _ in range(2):  # the second time by the capture
        batch = ForwardBatch.of_tree(tree, host_slots=np.array(slots), host_lengths=lengths)
        if way == "unknown lengths":
            batch = ForwardBatch(tokens=tree.tokens, slots=batch.slots, lengths=batch.lengths, topology=tree.topology)
        with without_looking() if way == "unknown lengths" else nullcontext():
            logits = runner.run(batch).scores
    for b, row in enumerate(rows):
        for node in range(tree.width):
            torch.testing.assert_close(logits[b, node], plainly(model, row, tree, b, node), **CLOSE)
    # A commit goes to these slots, and to no others.
    before = [tensor.clone() for tensor in runner.cache.tensors]
    path = torch.tensor([[2, 5]]).expand(len(slots), -1)
    runner.cache.commit(slot_index(np.array(slots), runner.device), torch.from_numpy(lengths), path)
    others = [slot for slot in range(6) if slot not in slots]
    for tensor, was in zip(runner.cache.tensors, before, strict=True):
        assert torch.equal(tensor[:, others], was[:, others])
    root = DraftTree.root_only(torch.full((len(slots),), 7))
    after = verify(runner, root, lengths + 3, slots=slots).scores
    for b, row in enumerate(rows):
        with torch.inference_mode():
            whole = torch.cat([row, tree.tokens[b, [0, 2, 5]], torch.tensor([7])])
            torch.testing.assert_close(after[b, 0], model(whole[None]).logits[0, -1], **CLOSE)


@pytest.mark.parametrize(
    ("architecture", "hidden_layers", "capture_after"),
    [("llama", (), 1), ("gpt2", (-1, 2), 10**9), ("gemma2", (-1, 2), 1)],
)
def test_only_what_is_wanted_comes_back(
    architecture: str, hidden_layers: tuple[int, ...], capture_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", capture_after)
    runner, _ = filled(tiny_model(architecture), [0, 2])
    tree = drafted(2)
    for _ in range(2):
        all_of_it = verify(runner, tree, LENGTHS[:2], slots=[0, 2], wants=Wants(hidden_layers=(-1, 2), top_k=3))
        some = verify(runner, tree, LENGTHS[:2], slots=[0, 2], wants=Wants(logits=2, hidden_layers=hidden_layers))
        none = verify(runner, tree, LENGTHS[:2], slots=[0, 2], wants=Wants(logits=0, hidden_layers=hidden_layers))
    assert all_of_it.top_tokens is not None
    assert torch.equal(all_of_it.top_tokens, all_of_it.scores.topk(3).indices)
    assert some.scores.shape[1] == 2 and some.top_tokens is None
    torch.testing.assert_close(some.scores, all_of_it.scores[:, -2:], **CLOSE)
    assert none.logits is None
    for output in (some, none):
        assert set(output.hidden_states) == set(hidden_layers)
        for layer in hidden_layers:
            torch.testing.assert_close(output.hidden_states[layer], all_of_it.hidden_states[layer], **CLOSE)


def test_what_makes_no_forward_is_refused() -> None:
    tree, zero = drafted(1), torch.zeros(1, dtype=torch.long)
    chain, embeds = Topology.chain(2, torch.device("cpu")), torch.zeros(1, 6, 4)
    for message, tokens, given, topology in (
        ("either tokens or embeds", None, None, tree.topology),
        ("either tokens or embeds", tree.tokens, embeds, tree.topology),
        ("6 nodes per row and its topology 2", tree.tokens, None, chain),
    ):
        with pytest.raises(ValueError, match=message):
            ForwardBatch(tokens=tokens, embeds=given, topology=topology, slots=zero, lengths=zero)


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1)), "t5: encoder-decoder"),
        (lambda: AutoModel.from_config(LlamaConfig(vocab_size=8, **COMMON)), "llama: LlamaModel"),
        (tiny_model, "max_length=300"),
        (
            lambda: AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8, **COMMON, rope_parameters=ROPE)),
            "dynamic RoPE",
        ),
    ],
)
def test_models_that_cannot_run_are_refused(make, words: str) -> None:
    """Other types: ``tests/test_architectures.py``."""
    with pytest.raises(ValueError, match=words):
        ModelRunner(make(), max_batch_size=1, max_length=300 if "300" in words else 200)
