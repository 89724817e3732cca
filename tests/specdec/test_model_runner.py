"""The runner against plain forwards of the unmodified model: ragged rows, chunked prefill, trees, commits."""

from typing import Any

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
from tests.models import COMMON, tiny_model
from tests.verifiers.cases import complete

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


BY_DEFAULT = {("llama", "eager"), ("llama_mqa_tied", "grouped"), ("gemma3", "grouped"), ("phi3", "grouped")}
"""Four others: ``test_forward.py``."""


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [*sorted(BY_DEFAULT), *(complete(each, "grouped", strong=False) for each in ("qwen2", "qwen3", "mistral_full"))],
)
@torch.inference_mode()
def test_every_node_sees_its_own_path_and_what_was_committed(architecture: str, attention: str) -> None:
    model = tiny_model(architecture)
    runner, rows = prefilled(model, attention=attention)
    tree, path = drafted(runner), torch.tensor([[1, 4, -1], [2, 5, -1], [-1, -1, -1]])
    output = verify(runner, tree, LENGTHS, wants=Wants(hidden_layers=(-1, 2)))
    for b, row in enumerate(rows):
        for node in range(tree.width):
            own = tree.ancestors[b, node].nonzero()[:, 0]
            plain = model(torch.cat([row, tree.tokens[b, own]])[None], output_hidden_states=True)
            torch.testing.assert_close(output.scores[b, node], plain.logits[0, -1], atol=1e-5, rtol=1e-5)
            for layer in (-1, 2):
                hidden = output.hidden_states[layer][b, node]
                torch.testing.assert_close(hidden, plain.hidden_states[layer][0, -1], atol=1e-5, rtol=1e-5)
    runner.cache.commit(torch.arange(3), torch.tensor(LENGTHS), path)
    roots = torch.tensor([3, 5, 7])
    after = verify(runner, DraftTree.root_only(roots), torch.tensor(LENGTHS) + 1 + (path >= 0).sum(1)).scores
    for b, row in enumerate(rows):
        kept = torch.cat([torch.zeros(1, dtype=torch.long), path[b][path[b] >= 0]])
        plain = model(torch.cat([row, tree.tokens[b, kept], roots[b : b + 1]])[None]).logits[0, -1]
        torch.testing.assert_close(after[b, 0], plain, atol=1e-5, rtol=1e-5)
        wrong = model(torch.cat([row, tree.tokens[b, kept.roll(1)], roots[b : b + 1]])[None]).logits[0, -1]
        assert len(kept) == 1 or (after[b, 0] - wrong).abs().max() > 1e-3, "another path would be noticed"


@torch.inference_mode()
def test_prefill_is_the_same_whatever_the_chunk_and_the_users_model_is_left_as_it_was() -> None:
    model = tiny_model()
    before, outputs = model.config._attn_implementation, []
    for chunk in (1, 5, 100):
        runner, _ = prefilled(model, chunk=chunk)
        outputs.append(verify(runner, drafted(runner), LENGTHS).scores)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == before


SMALL: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1)), "t5: encoder-decoder"),
        (lambda: AutoModelForCausalLM.from_config(MambaConfig(**SMALL, num_hidden_layers=1)), "mamba: its recurrent"),
        (lambda: AutoModelForCausalLM.from_config(BloomConfig(**SMALL, n_layer=1, n_head=2)), "bloom: ALiBi"),
        (lambda: AutoModel.from_config(LlamaConfig(vocab_size=8, **COMMON)), "llama: LlamaModel"),
    ],
)
def test_what_cannot_be_supported_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelRunner(make(), max_batch_size=1, max_length=8)


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match=r"max_length=300"):
        ModelRunner(tiny_model(), max_batch_size=1, max_length=300)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = LlamaConfig(vocab_size=8, **COMMON, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"dynamic RoPE"):
        ModelRunner(model, max_batch_size=1, max_length=200)
