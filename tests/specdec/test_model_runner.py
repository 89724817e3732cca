"""The runner against plain forwards of the unmodified model: ragged rows, chunked prefill, trees, commits."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from tests.forwards import prefill, verify
from tests.models import ARCHITECTURES, COMMON, tiny_model

LENGTHS = [11, 4, 17]
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def prefilled(model: PreTrainedModel, *, attention: str = "auto", chunk: int = 5, **kwargs: object):
    """A runner with three ragged rows, and the rows' tokens."""
    runner = ModelRunner(model, max_batch_size=3, max_length=64, max_nodes=8, attention=attention, **kwargs)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, runner.vocab_size, (length,), generator=generator) for length in LENGTHS]
    starts = np.zeros(3, dtype=np.int64)
    while (starts < LENGTHS).any():
        counts = np.clip(np.array(LENGTHS) - starts, 0, chunk)
        tokens = torch.zeros(3, counts.max(), dtype=torch.long)
        for b, row in enumerate(rows):
            tokens[b, : counts[b]] = row[starts[b] : starts[b] + counts[b]]
        prefill(runner, tokens, starts)
        starts = starts + counts
    return runner, rows


def drafted(runner: ModelRunner) -> DraftTree:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, runner.vocab_size, (3, SHAPE.num_nodes + 1), generator=generator)
    return DraftTree.from_shape(SHAPE, tokens)


@pytest.mark.parametrize("attention", ["grouped", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_every_node_sees_its_own_path(architecture: str, attention: str) -> None:
    model = tiny_model(architecture)
    runner, rows = prefilled(model, attention=attention)
    tree = drafted(runner)
    output = verify(runner, tree, LENGTHS, wants=Wants(hidden_layers=(-1, 2)))
    for b, row in enumerate(rows):
        for node in range(tree.width):
            path = tree.ancestors[b, node].nonzero()[:, 0]
            plain = model(torch.cat([row, tree.tokens[b, path]])[None], output_hidden_states=True)
            torch.testing.assert_close(output.scores[b, node], plain.logits[0, -1], atol=1e-5, rtol=1e-5)
            for layer in (-1, 2):
                hidden = output.hidden_states[layer][b, node]
                torch.testing.assert_close(hidden, plain.hidden_states[layer][0, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_commit_equals_recomputation(architecture: str) -> None:
    model = tiny_model(architecture)
    runner, rows = prefilled(model)
    tree = drafted(runner)
    lengths = torch.tensor(LENGTHS)
    verify(runner, tree, LENGTHS)
    path = torch.tensor([[1, 4, -1], [2, 5, -1], [-1, -1, -1]])
    runner.cache.commit(torch.arange(3), lengths, path)
    longer = lengths + 1 + (path >= 0).sum(1)
    roots = torch.tensor([3, 5, 7])
    output = verify(runner, DraftTree.root_only(roots), longer)
    for b, row in enumerate(rows):
        kept = torch.cat([torch.zeros(1, dtype=torch.long), path[b][path[b] >= 0]])
        plain = model(torch.cat([row, tree.tokens[b, kept], roots[b : b + 1]])[None]).logits[0, -1]
        torch.testing.assert_close(output.scores[b, 0], plain, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_commit_of_the_wrong_path_is_noticed() -> None:
    model = tiny_model()
    runner, rows = prefilled(model)
    tree = drafted(runner)
    lengths = torch.tensor(LENGTHS)
    verify(runner, tree, LENGTHS)
    runner.cache.commit(torch.arange(3), lengths, torch.tensor([[1, 3, 6]] * 3))  # the path that should be: 2, 5
    longer = lengths + 3
    output = verify(runner, DraftTree.root_only(torch.tensor([3, 5, 7])), longer)
    plain = model(torch.cat([rows[0], tree.tokens[0, [0, 2, 5]], torch.tensor([3])])[None]).logits[0, -1]
    assert (output.scores[0, 0] - plain).abs().max() > 1e-3


@torch.inference_mode()
def test_prefill_is_the_same_whatever_the_chunk() -> None:
    model = tiny_model()
    outputs = []
    for chunk in (1, 5, 100):
        runner, _ = prefilled(model, chunk=chunk)
        outputs.append(verify(runner, drafted(runner), LENGTHS).scores)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-5, rtol=1e-5)


def test_the_users_model_is_left_as_it_was() -> None:
    model = tiny_model()
    before = model.config._attn_implementation
    prefilled(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            "t5: encoder-decoder",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)),
            "mamba: its recurrent state",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)),
            "bloom: ALiBi",
        ),
        (lambda: AutoModel.from_config(LlamaConfig(vocab_size=8, **COMMON)), "llama: LlamaModel has no output layer"),
    ],
)
def test_what_cannot_be_supported_is_refused(model, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelRunner(model(), max_batch_size=1, max_length=8)


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match=r"max_length=300 is beyond the 256 positions"):
        ModelRunner(tiny_model(), max_batch_size=1, max_length=300)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = LlamaConfig(vocab_size=8, **COMMON, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"dynamic RoPE scales with the longest row"):
        ModelRunner(model, max_batch_size=1, max_length=200)
