"""Any decoder-only model: equal to its own plain forwards over the slot cache, or refused with its type and the reason.

The named ones are here for what is special about them, and a test says that it is there; ``make test-full`` tries every
type of the installed transformers against the table of types.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import specdec.attention.masks
import specdec.target.facts
from specdec import DraftTree, ModelRunner
from specdec.attention import BACKENDS
from specdec.attention.facts import Reach
from specdec.cache.transformers_cache import CACHE
from specdec.native import native_library
from tests import architectures
from tests.architectures import LENGTHS, MAX_LENGTH, MODEL_TYPES, SHAPE, TOLERANCE, VERSION, VOCAB, disagreement, tiny
from tests.forwards import verify
from tests.launches import counted


class Named(NamedTuple):
    model_type: str
    fields: dict[str, Any]
    shows: Callable[[ModelRunner], object]
    attention: str = "grouped" if native_library() is None else "native"


def kv_heads(runner: ModelRunner) -> int:
    return runner.cache.keys[0].shape[3]


def has(*names: str) -> Callable[[ModelRunner], bool]:
    """The model has parameters whose names end so."""

    def look(runner: ModelRunner) -> bool:
        found = [name for name, _ in runner.model.named_parameters()]
        return all(any(name.endswith(wanted) for name in found) for wanted in names)

    return look


def windows(*sizes: int | None) -> Callable[[ModelRunner], bool]:
    return lambda runner: {reach.window or reach.chunk for reach in runner.facts.reaches.values()} == set(sizes)


NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}

SUPPORTED: dict[str, Named] = {
    "Llama": Named("llama", {}, lambda runner: kv_heads(runner) == 2),
    "OPT, learned positions behind an offset": Named("opt", {}, has("embed_positions.weight")),
    "GPT-J, attention of its own": Named("gptj", {}, has("q_proj.weight"), "eager"),
    "Falcon, one KV head": Named("falcon", {}, lambda runner: kv_heads(runner) == 1, "eager"),
    "Falcon, repeated KV heads": Named("falcon", NEW_FALCON, lambda runner: kv_heads(runner) == 4, "eager"),
    "Qwen2, full and sliding layers": Named("qwen2", {}, windows(6, None)),
    "Gemma-2, softcaps": Named("gemma2", {}, lambda runner: runner.model.config.attn_logit_softcapping == 5.0),
    "Gemma-3n, layers that share keys": Named(
        "gemma3n_text", {}, lambda runner: sum(len(keys) for keys in runner.cache.keys) == 2
    ),
    "Gemma-4, layers of different width": Named("gemma4_text", {}, lambda runner: len(runner.cache.keys) == 2, "dense"),
    "Llama-4, chunks": Named("llama4_text", {}, windows(6, None)),
    "gpt-oss, attention sinks": Named("gpt_oss", {}, has("self_attn.sinks", "experts.gate_up_proj_bias")),
    "DeepSeek-V3, compressed keys and values": Named(
        "deepseek_v3", {}, lambda runner: runner.cache.keys[0].shape[4] != runner.cache.values[0].shape[4], "dense"
    ),
    "DeepSeek-V3.2, selected keys": Named("deepseek_v32", {}, lambda runner: runner.cache.indexer_keys, "eager"),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_and_equal(name: str) -> None:
    case = SUPPORTED[name]
    error, runner = disagreement(tiny(case.model_type, **case.fields))
    assert case.shows(runner), f"{name}: the model has nothing of the kind"
    assert runner.backend is BACKENDS[case.attention]
    assert error < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "ALiBi derives positions from the mask's columns"),
        ("rwkv", "its states are in one object that goes through the whole model"),
        ("inkling_text", "its layers count positions from the length of the cache"),
        ("minimax_m3_vl_text", "no tree mask for layers of type minimax_m3_sparse"),
        ("bart", "takes no position_ids, so that a tree's tokens cannot be placed"),
        ("openai-gpt", r"takes no cache \(past_key_values\)"),
        ("roberta", "it numbers positions from its padding token's id on"),
    ],
)
def test_refused_with_its_type_and_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{model_type}: .*{reason}"):
        ModelRunner(tiny(model_type), max_batch_size=1, max_length=MAX_LENGTH)


class WrittenOut(nn.Module):
    """Attention as an author of research would write it out, without transformers' attention functions."""

    def forward(self, hidden_states: Tensor, *, attention_mask: Tensor, **kwargs: Any):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        value = value * value.sigmoid()
        if kwargs[CACHE] is not None:
            key, value = kwargs[CACHE].update(key, value, self.layer_idx)
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        weights = (query @ key.mT * self.scaling + attention_mask).softmax(-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2)), weights


class CountsItsCache(LlamaForCausalLM):
    """A research model that places tokens by the length of the cache, whatever positions it is given."""

    def forward(self, input_ids: Tensor, position_ids=None, past_key_values=None, **kwargs: Any):
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        positions = start + torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=positions, past_key_values=past_key_values, **kwargs)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # its name before 5.24
def test_a_model_nobody_has_named_is_equal_or_refused() -> None:
    own, counts = tiny("llama"), tiny("llama")
    for layer in own.model.layers:
        layer.self_attn.__class__ = WrittenOut
    error, _ = disagreement(own)
    assert error < TOLERANCE
    counts.__class__ = CountsItsCache
    with pytest.raises(ValueError, match=r"^llama: not supported, because a trial forward .* logits differ by \d+%"):
        ModelRunner(counts, max_batch_size=1, max_length=MAX_LENGTH)


def test_the_trial_refuses_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every node sees all nodes before it, as in a chain."""
    mask = specdec.attention.masks.tree_mask

    def chain(starts: Tensor, visible: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return mask(starts, torch.ones_like(visible).tril(visible.shape[2] - visible.shape[1]), *args, **kwargs)

    monkeypatch.setattr(specdec.attention.masks, "tree_mask", chain)
    with pytest.raises(ValueError, match=r"logits differ by \d+%"):
        ModelRunner(tiny("llama"), max_batch_size=1, max_length=MAX_LENGTH, attention="grouped")


@pytest.mark.parametrize("model_type", ["mistral", "llama4_text"])
def test_a_window_that_is_off_by_one_is_noticed(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the trial waves through a window, or a chunk, that is one too long; the comparison does not."""
    own = specdec.target.facts.reaches

    def longer(*args: Any) -> dict[str, Reach]:
        return {
            name: Reach(reach.window and reach.window + 1, reach.chunk and reach.chunk + 1)
            for name, reach in own(*args).items()
        }

    monkeypatch.setattr(specdec.target.facts, "reaches", longer)
    monkeypatch.setattr(specdec.target.facts, "differs", lambda *args, **kwargs: None)
    error, _ = disagreement(tiny(model_type))
    assert error > 100 * TOLERANCE


def synchronizations(runner: ModelRunner) -> Counter[str]:
    """Operations after which a host would wait for a GPU."""
    tree = DraftTree.from_shape(SHAPE, torch.randint(0, VOCAB, (3, SHAPE.num_nodes + 1)))
    with counted() as work:
        verify(runner, tree, LENGTHS)
    assert not any("grouped_mm_fallback" in name for name in work.operations), "a loop over experts on the host"
    return work.reads - Counter(["tolist"])  # of the host's own lengths


@pytest.mark.parametrize("loaded_with", ["eager", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_do_not_synchronize(model_type: str, loaded_with: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(model_type)
    model.set_experts_implementation(loaded_with)
    # As on a GPU, where no weights are packed and looked at.
    runner = ModelRunner(model, max_batch_size=3, max_length=MAX_LENGTH, max_nodes=SHAPE.num_nodes, optimize=False)
    assert not synchronizations(runner)
    assert model.config._experts_implementation == loaded_with, "the user's model is left as it was"
    # The loop that was avoided is seen by the counter: several times in every layer.
    monkeypatch.setattr(runner.executor, "facts", replace(runner.facts, experts="eager"))
    assert sum(synchronizations(runner).values()) >= 2 * model.config.num_hidden_layers - 1


_ROWS = architectures.read_table()[1]


def test_the_table_has_every_type_of_this_version() -> None:
    if not any(VERSION in row for row in _ROWS.values()):
        pytest.skip(f"the table has no column for transformers {VERSION}")
    known = {name for name, row in _ROWS.items() if row.get(VERSION)}
    assert known == set(MODEL_TYPES), "write the column anew: python -m tests.architectures"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # old models' code has warnings of its own
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_type_is_as_the_table_says(model_type: str) -> None:
    cell, reason = architectures.outcome(model_type)
    listed = _ROWS.get(model_type, {}).get(VERSION)
    if listed is None:
        assert reason or cell in ("yes", "eager")
    else:
        assert cell == listed, reason
