"""Invariant mode: a token's logits are the same bits in any forward, and so any drafter's output is plain decoding's.

All comparisons here are of bits. What would be wrong without a part of the mode is shown by mutants beside the tests:
ordinary attention, keys in the order of the cache, and blocks of the size that the forward has.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention import logical_order
from specdec.attention.logical_order import Nodes
from specdec.batch import ForwardBatch, Wants
from specdec.cache.slot_cache import SlotCache
from specdec.engine.engine import Engine
from specdec.execution.invariant import ROWS, InvariantExecutor
from specdec.modeling import invariance
from specdec.modeling.invariance import _alike
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.quantization import quantize
from specdec.requests import SamplingParams
from specdec.topology import Topology
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.architectures import tiny
from tests.components import DRAFTERS, fitting
from tests.forwards import prefill, verify
from tests.models import ARCHITECTURES, tiny_model
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

VOCAB = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEQUENCE = 28
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 1, 0)])
PATH = torch.nonzero(Topology.of_shape(SHAPE, torch.device("cpu")).ancestors[0, -1])[:, 0].tolist()
"""The path to the deepest node, with other nodes in between."""


def model_in(dtype: torch.dtype, architecture: str = "llama", **more: Any) -> PreTrainedModel:
    return tiny_model(architecture, vocab_size=VOCAB, **more).to(dtype)  # type: ignore[arg-type]


def runner_for(model: PreTrainedModel, *, slots: int = 3, length: int = SEQUENCE + 8) -> ModelRunner:
    nodes = SHAPE.num_nodes
    return ModelRunner(model, max_batch_size=slots, max_length=length, max_nodes=nodes, invariant=True)


def tokens(count: int = SEQUENCE, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def chain(runner: ModelRunner, given: Tensor, *, start: int = 0, slot: int = 0) -> Tensor:
    """Logits of a line of tokens behind the first ``start`` of a slot."""
    host_slots, host_lengths = np.array([slot]), np.array([start])
    batch = ForwardBatch(
        tokens=given[None],
        slots=torch.from_numpy(host_slots).to(given.device),
        lengths=torch.from_numpy(host_lengths).to(given.device),
        topology=Topology.chain(len(given), given.device),
        host_slots=host_slots,
        host_lengths=host_lengths,
    )
    return runner.run(batch).scores[0]


def one_by_one(runner: ModelRunner, given: Tensor) -> Tensor:
    """Logits as plain decoding computes them."""
    return torch.cat([chain(runner, given[i : i + 1], start=i) for i in range(len(given))])


def trees(runner: ModelRunner, given: Tensor, starts: Sequence[int], slots: Sequence[int], seed: int = 1) -> Tensor:
    """Logits of one tree per slot, whose deepest path holds the sequence's tokens and whose other nodes are random."""
    for slot, start in zip(slots, starts, strict=True):
        prefill(runner, given[None, :start], np.zeros(1, dtype=np.int64), slots=[slot])
    drafted = torch.randint(0, VOCAB, (len(slots), SHAPE.num_nodes + 1), generator=torch.Generator().manual_seed(seed))
    drafted = drafted.to(given.device)
    for row, start in enumerate(starts):
        drafted[row, PATH] = given[start : start + len(PATH)]
    return verify(runner, DraftTree.from_shape(SHAPE, drafted), starts, slots=slots).scores


def same(logits: Tensor, wanted: Tensor) -> bool:
    return torch.equal(logits.view(torch.uint8), wanted.view(torch.uint8))


# ---------------------------------------------------------------- bits


BITS_BY_DEFAULT = {(name, torch.bfloat16) for name in ("mistral_sliding", "gemma2", "qwen2_mixed_sliding", "gpt2")}
"""Beside those of the Llama: one window, softcaps, layers of two kinds, learned positions."""


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        complete(architecture, dtype, strong=architecture == "llama" or (architecture, dtype) in BITS_BY_DEFAULT)
        for architecture in ARCHITECTURES
        for dtype in DTYPES
    ],
)
def test_a_tokens_logits_do_not_depend_on_the_forward(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logical_order, "BLOCK", 16)  # so that a short sequence has blocks, and trees cross their ends
    runner = runner_for(model_in(dtype, architecture))
    given = tokens()
    plain = one_by_one(runner, given)
    assert same(chain(runner, given, slot=1), plain), "all at once"
    stored = [each[:, :2, :SEQUENCE] for each in runner.cache.tensors]
    assert all(torch.equal(each[:, 0], each[:, 1]) for each in stored)
    pieces = [chain(runner, given[a:b], start=a, slot=2) for a, b in ((0, 7), (7, 25), (25, SEQUENCE))]
    assert same(torch.cat(pieces), plain), "in pieces"
    # Trees that end within a block, cross its end, and begin with one; of other slots, in other places of the batch.
    for starts, slots in (((22, 13, 3), (2, 0, 1)), ((16,), (1,)), ((15, 1), (0, 2))):
        found = trees(runner, given, starts, slots)
        for row, start in enumerate(starts):
            assert same(found[row, PATH], plain[start : start + len(PATH)]), f"in a tree at {start}"


@pytest.mark.parametrize("scheme", ["int8", "int8_compact"])
def test_quantized_weights_have_one_way_of_rounding(scheme: str) -> None:
    """The int8 kernel for up to four rows rounds otherwise than the products for more."""
    runner = runner_for(quantize(model_in(torch.bfloat16), scheme))
    given = tokens()
    plain = one_by_one(runner, given)
    assert same(chain(runner, given, slot=1), plain)
    assert same(trees(runner, given, [20], [2])[0, PATH], plain[20:25])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_logits_are_the_models_own(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical_order, "BLOCK", 16)
    model = model_in(torch.float32, architecture)
    given = tokens()
    with torch.inference_mode():
        own = model(given[None]).logits[0]
    assert torch.allclose(chain(runner_for(model), given), own, atol=1e-5)


def test_blocks_of_the_size_that_is_used() -> None:
    """Across the end of the first block as it is, 128 positions."""
    runner = runner_for(model_in(torch.bfloat16, layers=2), length=150)
    given = tokens(135)
    plain = chain(runner, given)
    single = torch.cat([chain(runner, given[i : i + 1], start=i) for i in range(125, len(given))])
    assert same(single, plain[125:])
    for start in (logical_order.BLOCK - 3, logical_order.BLOCK - 1, logical_order.BLOCK):
        assert same(trees(runner, given, [start], [2])[0, PATH], plain[start : start + len(PATH)])


def test_the_path_of_the_example() -> None:
    """The drawing at the top of the file: p0 p1, then a root with children a and b."""
    cache = SlotCache({}, max_batch_size=1, max_length=4, max_nodes=4, device=torch.device("cpu"))
    shape = TreeShape.from_paths([(0,), (1,)])
    tree = DraftTree.from_shape(shape, torch.zeros(1, 3, dtype=torch.long))
    nodes = Nodes(ForwardBatch.of_tree(tree, host_slots=np.array([0]), host_lengths=np.array([2])), cache)
    assert nodes.cells.tolist() == [2, 3, 4]
    assert nodes.positions.tolist() == [2, 3, 3]
    path_of_b, path_of_a = nodes.pieces(np.arange(3))
    assert path_of_b.cells[:5].tolist() == [0, 1, 2, 4, 4]
    assert path_of_b.queries.tolist() == [True, False, True], "the root is served by whichever path comes first"
    assert path_of_a.cells[:5].tolist() == [0, 1, 2, 3, 3]
    assert path_of_a.queries.tolist() == [False, True, False]


def test_hidden_states_and_the_last_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward returns besides logits comes in the order of its nodes, over several blocks."""
    model = model_in(torch.float32)
    runner = runner_for(model)
    tree = DraftTree.from_shape(SHAPE, tokens(3 * (SHAPE.num_nodes + 1)).view(3, -1))
    wants = Wants(logits=2, hidden_layers=(1, -1), top_k=3)
    ours = verify(runner, tree, [0, 0, 0], wants=wants)
    ordinary = ModelRunner(model, max_batch_size=3, max_length=48, max_nodes=SHAPE.num_nodes)
    theirs = verify(ordinary, tree, [0, 0, 0], wants=wants)
    assert torch.allclose(ours.scores, theirs.scores, atol=1e-4)
    assert ours.top_tokens is not None and theirs.top_tokens is not None
    assert torch.equal(ours.top_tokens, theirs.top_tokens)
    for layer in wants.hidden_layers:
        assert torch.allclose(ours.hidden_states[layer], theirs.hidden_states[layer], atol=1e-4)


def test_a_sequence_of_nan_spoils_no_other() -> None:
    runner = runner_for(model_in(torch.float32), slots=2)
    given = tokens(20)
    plain = trees(runner, given, [9, 11], [0, 1])
    for tensor in runner.cache.tensors:
        tensor[:, 0, 3] = torch.nan
    drafted = torch.zeros(2, SHAPE.num_nodes + 1, dtype=torch.long)
    drafted[:, PATH] = torch.stack([given[9:14], given[11:16]])
    spoilt = verify(runner, DraftTree.from_shape(SHAPE, drafted), [9, 11]).scores
    assert spoilt[0].isnan().all()
    assert same(spoilt[1, PATH], plain[1, PATH])


# ---------------------------------------------------------------- mutants


def parted(runner: ModelRunner, starts: Sequence[int] = range(5, 23, 3)) -> int:
    """How many places of how a tree computes its deepest path differ from plain decoding."""
    given = tokens()
    plain = one_by_one(runner, given)
    found = 0
    for start in starts:
        logits = trees(runner, given, [start], [1])[0, PATH]
        wanted = plain[start : start + len(PATH)]
        assert torch.allclose(logits.float(), wanted.float(), atol=1.0), "a mutant rounds otherwise; it is not wrong"
        found += sum(not same(a, b) for a, b in zip(logits, wanted, strict=True))
    return found


def test_the_ordinary_engine_is_told_apart() -> None:
    model = model_in(torch.bfloat16)
    assert parted(runner_for(model)) == 0
    ordinary = ModelRunner(model, max_batch_size=3, max_length=48, max_nodes=SHAPE.num_nodes)
    assert parted(ordinary) > 0


def test_keys_in_the_order_of_the_cache_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical_order, "BLOCK", 16)

    def in_cell_order(self: Nodes, block: int, length: int, path: Any) -> tuple[np.ndarray, np.ndarray]:
        cells = np.arange(block * 16, (block + 1) * 16)
        if path is None:
            return cells, np.minimum(cells, self._last)
        positions = np.where(cells < length, cells, 10**6)  # a node beside the path is beyond what anybody sees
        for depth, node in enumerate(path):
            positions[cells == length + node] = length + depth
        return positions, np.minimum(cells, self._last)

    def as_far_as_the_tree(self: Nodes, chosen: np.ndarray) -> list[logical_order.Piece]:
        positions = self.positions
        self.positions = np.full_like(positions, int(self.cells.max()))  # whose blocks reach as far as its cells do
        try:
            return pieces(self, chosen)
        finally:
            self.positions = positions

    pieces = Nodes.pieces
    monkeypatch.setattr(Nodes, "_block", in_cell_order)
    monkeypatch.setattr(Nodes, "pieces", as_far_as_the_tree)
    monkeypatch.setattr(invariance, "_trial", lambda plan, executor: "")
    runner = runner_for(model_in(torch.float32))
    assert parted(runner) > 0


def test_blocks_of_the_forwards_size_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as there are nodes, which changes nothing on a machine whose products round alike for any number."""
    run = InvariantExecutor.run

    def as_many_rows_as_nodes(self: InvariantExecutor, plan: Any, batch: ForwardBatch, cache: Any) -> Any:
        self.rows = batch.batch * batch.nodes
        return run(self, plan, batch, cache)

    model = model_in(torch.float32)
    weight, inputs = model.lm_head.weight, torch.randn(9, 32)
    monkeypatch.setattr(InvariantExecutor, "run", as_many_rows_as_nodes)
    monkeypatch.setattr(invariance, "_trial", lambda plan, executor: "")
    found = parted(runner_for(model))
    if torch.equal(nn.functional.linear(inputs, weight)[:1], nn.functional.linear(inputs[:1], weight)) and not found:
        pytest.skip("this machine's products round alike for one row and for nine")
    assert found > 0


# ---------------------------------------------------------------- the engine


PROMPTS = [tokens(count, seed).tolist() for seed, count in enumerate((5, 1, 30, 9))]
GREEDY = SamplingParams(max_new_tokens=10)


BY_DEFAULT = ("ngram", "medusa", "model_tree_without_replacement", "model_tree_coupled")


@pytest.mark.parametrize(
    ("drafter", "scheme"),
    [
        complete(drafter, scheme, strong=drafter in BY_DEFAULT and (scheme is None or "without" in drafter))
        for drafter in DRAFTERS
        for scheme in (None, "int8")
    ],
)
def test_any_drafters_greedy_output_is_plain_decodings(drafter: str, scheme: str | None) -> None:
    """In bfloat16, with two rows at a time; also of one row at a time, and of prompts in other pieces."""
    full = tiny_model(vocab_size=VOCAB, layers=2)
    made = DRAFTERS[drafter](full)
    model = full.bfloat16() if scheme is None else quantize(full.bfloat16(), scheme)
    rule = fitting(made)
    sampled = SamplingParams(max_new_tokens=10, temperature=1.0)
    coupled = DraftSampling.COUPLED in made.laws
    sampling = [sampled if coupled and row % 2 else GREEDY for row in range(len(PROMPTS))]
    with Engine(Target(model), made, rule, max_batch_size=2, max_length=64, prefill_chunk=7, invariant=True) as engine:
        outputs = [each.token_ids for each in engine.generate(PROMPTS, sampling)]
        plain = [each.token_ids for each in engine.generate(PROMPTS, sampling, speculate=False)]
    assert outputs == plain
    with Engine(Target(model), verifier=rule, max_length=64, invariant=True) as engine:
        assert [each.token_ids for each in engine.generate(PROMPTS, sampling)] == plain


# ---------------------------------------------------------------- the promise


class Beside(nn.Module):
    """A layer whose output for a row depends a little on the rows beside it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1e-3 * inputs.mean(0, keepdim=True)


class Counting(nn.Module):
    """A layer that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs * (1 + 1e-5 * self.calls)


def with_layer(layer: nn.Module, at: int = 2) -> PreTrainedModel:
    model = model_in(torch.float32)
    mlp = model.model.layers[at].mlp
    mlp.act_fn = nn.Sequential(mlp.act_fn, layer)
    return model


def test_rows_that_touch_each_other_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = runner_for(with_layer(Beside()))
    assert executor_of(runner).rows == 1
    assert "not invariant in blocks of 16: model.layers.2.mlp.act_fn.1 gives other bits" in caplog.text
    given = tokens()
    assert same(chain(runner, given, slot=1), one_by_one(runner, given))


def test_a_model_that_cannot_promise_it_is_refused_by_the_part() -> None:
    with pytest.raises(ValueError, match=r"llama cannot be run so, because model.layers.2.mlp.act_fn.1 gives other"):
        runner_for(with_layer(Counting()))


def test_experts_run_alone() -> None:
    runner = runner_for(tiny("mixtral").bfloat16())
    assert executor_of(runner).rows == 1
    given = tokens(20)
    assert same(chain(runner, given, slot=1), one_by_one(runner, given))


def test_attention_sinks() -> None:
    runner = runner_for(tiny("gpt_oss").bfloat16())
    given = tokens(20)
    plain = one_by_one(runner, given)
    assert same(trees(runner, given, [9], [1])[0, PATH], plain[9:14])


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gptj", "gptj does not take an attention function"),
        ("deepseek_v32", "deepseek_v32 selects keys by an indexer"),
        ("deepseek_v3", "its layers change keys or values between the cache and the attention function"),
        ("doge", "its layers change the mask on its way to the attention function"),
    ],
)
def test_models_that_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"invariant=True: .*{reason}.*; leave invariant at False"):
        runner_for(tiny(model_type))


def test_another_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention='eager' with invariant=True.*leave attention at 'auto'"):
        ModelRunner(model_in(torch.float32), max_batch_size=1, max_length=8, attention="eager", invariant=True)


def test_a_changed_model_is_tried_again() -> None:
    model = model_in(torch.float32)
    runner = runner_for(model)
    assert executor_of(runner).rows == ROWS
    model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, Beside())
    given = tokens()
    assert same(chain(runner, given, slot=1), one_by_one(runner, given))
    assert executor_of(runner).rows == 1


def test_changed_weights_are_used() -> None:
    model = model_in(torch.float32)
    runner, given = runner_for(model), tokens(12)
    before = chain(runner, given)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert torch.allclose(chain(runner, given), 2 * before, rtol=1e-5)


# Elementwise functions: which sizes are computed by one code throughout.


@pytest.mark.parametrize(
    ("numbers", "threads", "alike"),
    [
        (16, 1, True),  # one number for each of 16 rows: less than any vector, or a whole one
        (16 * 48, 1, True),
        (16 * 45, 1, False),
        (16 * 2048, 2, True),  # the smallest that is divided, into one part
        (16 * 11008, 2, True),
        (16 * 11008, 4, True),
        (16 * 11008, 6, False),  # parts of 29,355 numbers, which end within a vector
    ],
)
def test_sizes_that_end_with_a_whole_vector(numbers: int, threads: int, alike: bool) -> None:
    assert _alike(numbers, threads) is alike


def test_a_function_that_ends_within_a_vector_is_not_put_into_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """A layer of width 45: the last of 16 x 45 numbers are computed by other code, whose silu rounds otherwise."""
    torch.manual_seed(0)
    model = model_in(torch.float32)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            projection = getattr(layer.mlp, name)
            projection.weight = nn.Parameter(projection.weight[:45].clone())
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight[:, :45].clone())
    with caplog.at_level(logging.INFO):
        runner = runner_for(model)
    assert executor_of(runner).rows == 1
    assert "an elementwise function of 720 numbers does not end with a whole vector" in caplog.text


def test_fewer_threads_where_theirs_would_end_within_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads at which the promise was tried stays, whatever torch is told later."""
    monkeypatch.setattr(invariance, "_GRAIN", 300)  # so that the tiny model's 768 numbers are divided into three
    torch.set_num_threads(3)
    runner = runner_for(model_in(torch.float32))
    assert executor_of(runner).threads == 2, "three parts of 256 are whole vectors, but those of 1,024 numbers are not"
    seen: list[int] = []
    runner.model.lm_head.register_forward_hook(lambda *call: seen.append(torch.get_num_threads()))
    chain(runner, tokens(3))
    assert (set(seen), torch.get_num_threads()) == ({2}, 3)


def executor_of(runner: ModelRunner) -> InvariantExecutor:
    assert isinstance(runner.executor, InvariantExecutor)
    return runner.executor


def test_an_ordinary_engine_afterwards() -> None:
    """Nothing of the mode is left behind: an ordinary engine on the same model runs as before."""
    model = model_in(torch.float32)
    before = Engine(Target(model), max_length=64).generate(PROMPTS, GREEDY)
    Engine(Target(model), DRAFTERS["ngram"](model), RejectionVerifier(), max_length=64, invariant=True).generate(
        PROMPTS, GREEDY
    )
    after = Engine(Target(model), max_length=64).generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in before] == [each.token_ids for each in after]
