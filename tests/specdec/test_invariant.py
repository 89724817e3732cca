"""Invariant mode: a token's logits are the same bits in any forward; models that cannot keep that are refused."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec import DraftSampling, DraftTree, Engine, ForwardBatch, ModelRunner, SamplingParams, Target, Wants
from specdec.attention import logical_order
from specdec.execution.invariant import ROWS
from specdec.native import native_library
from specdec.quantization import quantize
from specdec.recurrent import recurrence
from specdec.recurrent.recurrence import Call, calls_one_by_one
from specdec.target import invariance
from tests.architectures import tiny
from tests.components import DRAFTERS, fitting
from tests.forwards import verify
from tests.models import ARCHITECTURES, tiny_model
from tests.specdec.invariant_forwards import PATH, PROMPTS, SHAPE, chain, one_by_one, runner_for, same, tokens, trees
from tests.verifiers.cases import complete


def model_in(dtype: torch.dtype, architecture: str = "llama") -> PreTrainedModel:
    return tiny_model(architecture).to(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma2", torch.float32),  # a window, softcaps
        ("lfm2", torch.bfloat16),  # states
        complete("llama", torch.float16, strong=False),
        *(complete(each, torch.float32, strong=False) for each in ARCHITECTURES if each != "gemma2"),
        *(complete(each, torch.bfloat16, strong=False) for each in ("mistral_sliding", "qwen2_mixed_sliding", "gpt2")),
        *(complete(each, torch.bfloat16, strong=False) for each in ("qwen3_5_text", "mamba", "olmo_hybrid")),
        *(complete(each, torch.bfloat16, strong=False) for each in ("mixtral", "gpt_oss")),  # experts; sinks
    ],
)
def test_a_tokens_logits_do_not_depend_on_the_forward(architecture: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(logical_order, "BLOCK", 16)  # so that a short sequence has blocks, and trees cross their ends
    model = model_in(dtype, architecture) if architecture in ARCHITECTURES else tiny(architecture).to(dtype)
    given = tokens()
    runner: Any = runner_for(model)
    assert architecture != "mixtral" or runner.executor.rows == 1, "experts run alone"
    plain = one_by_one(runner, given)
    if dtype is torch.float32:
        with torch.inference_mode():
            assert torch.allclose(plain, model(given[None]).logits[0], atol=1e-5), "they are the model's own"
    assert same(chain(runner, given, slot=1), plain), "all at once"
    stored = [each[:, :2, : len(given)] for each in runner.cache.tensors]
    stored += [] if runner.cache.states is None else [each[:, :2, 0] for each in runner.cache.states.tensors]
    assert all(torch.equal(each[:, 0], each[:, 1]) for each in stored)
    pieces = [chain(runner, given[a:b], start=a, slot=2) for a, b in ((0, 7), (7, 25), (25, len(given)))]
    assert same(torch.cat(pieces), plain), "in pieces"
    # Trees that end within a block, cross its end, and begin with one; of other slots, in other places of the batch.
    for starts, slots in (((22, 13, 3), (2, 0, 1)), ((16,), (1,)), ((15, 1), (0, 2))):
        found = trees(runner, given, starts, slots)
        for row, start in enumerate(starts):
            assert same(found[row, PATH], plain[start : start + len(PATH)]), f"in a tree at {start}"


def test_quantized_weights_have_one_way_of_rounding_and_nan_spoils_its_own_row() -> None:
    runner, given = runner_for(quantize(model_in(torch.bfloat16), "int8")), tokens()
    plain = one_by_one(runner, given)
    assert same(chain(runner, given, slot=1), plain)
    assert same(trees(runner, given, [20], [2])[0, PATH], plain[20:25])
    drafted = DraftTree.from_shape(SHAPE, tokens(2 * (SHAPE.num_nodes + 1)).view(2, -1))
    wants = Wants(logits=2, hidden_layers=(1, -1), top_k=3)
    whole, last = verify(runner, drafted, [9, 11]), verify(runner, drafted, [9, 11], wants=wants)
    assert torch.equal(last.scores, whole.scores[:, -2:]) and last.top_tokens is not None
    assert torch.equal(last.scores.gather(-1, last.top_tokens), last.scores.topk(3).values)
    hidden = runner.model.lm_head(last.hidden_states[-1])[:, -2:]
    assert torch.allclose(hidden.float(), last.scores.float(), atol=0.1), "in the order of its nodes"
    for tensor in runner.cache.tensors:
        tensor[:, 0, 3] = torch.nan
    spoilt = verify(runner, drafted, [9, 11]).scores
    assert spoilt[0].isnan().all() and same(spoilt[1], whole.scores[1])


def test_states_of_another_parent_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(batch: ForwardBatch, chosen: np.ndarray) -> list[Call]:
        found = calls_one_by_one(batch, chosen)
        if batch.counts is not None:
            return found
        return [each if each.before is None else each._replace(before=each.before.clamp(max=1)) for each in found]

    monkeypatch.setattr(recurrence, "calls_one_by_one", calls)
    with pytest.raises(ValueError, match=r"invariant=True: lfm2 .* a token gets other bits in a tree than in a line"):
        runner_for(tiny("lfm2"))


class Changing(nn.Module):
    """A layer behind which numbers differ a little by what a function says of its inputs."""

    def __init__(self, share: Callable[[Tensor], Any]):
        super().__init__()
        self.share = share

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + 1e-3 * self.share(inputs))


def with_layer(share: Callable[[Tensor], Any], model: PreTrainedModel | None = None) -> PreTrainedModel:
    model = model_in(torch.float32) if model is None else model
    model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, Changing(share))
    return model


def test_products_that_round_in_another_way_for_every_number_of_rows() -> None:
    """As some libraries' do: the ordinary engine is told apart."""
    model, given = with_layer(lambda inputs: inputs.flatten(0, -2).shape[0]), tokens()
    for options in ({"invariant": True}, {"optimize": False, "attention": "grouped"}):
        runner = ModelRunner(model, max_batch_size=3, max_length=48, max_nodes=SHAPE.num_nodes, **options)
        plain = one_by_one(runner, given)
        paths = {start: trees(runner, given, [start], [1])[0, PATH] for start in (5, 14, 20)}
        alike = all(same(path, plain[start : start + len(PATH)]) for start, path in paths.items())
        assert alike is ("invariant" in options)


@pytest.mark.parametrize(
    ("drafter", "scheme"),
    [
        ("model_tree_without_replacement", "int8"),
        ("model_tree_coupled", None),
        *(complete(each, None, strong=False) for each in ("ngram", "medusa", "eagle3_expansion")),
    ],
)
def test_any_drafters_greedy_output_is_plain_decodings(drafter: str, scheme: str | None, monkeypatch) -> None:
    """In bfloat16, with two rows at a time; also of one row at a time, in other pieces, in recorded rounds."""
    monkeypatch.setattr("specdec.engine.recording.RECORD_AFTER", 2)
    full = tiny_model(layers=2)
    made = DRAFTERS[drafter](full)
    target = Target(full.bfloat16() if scheme is None else quantize(full.bfloat16(), scheme))
    rule, coupled = fitting(made), DraftSampling.COUPLED in made.laws
    sampling = [
        SamplingParams(max_new_tokens=4 + 4 * (row % 3), temperature=float(coupled and row % 2))
        for row in range(len(PROMPTS))
    ]
    found = []
    for given, options in (
        (made, {"max_batch_size": 2, "prefill_chunk": 7}),
        (None, {"max_batch_size": 3, "recording": "rounds"}),  # slots have a gap
        (None, {}),
    ):
        engine = Engine(target, given, rule, max_length=64, invariant=True, **options)
        found.append([each.token_ids for each in engine.generate(PROMPTS, sampling)])
    assert found[0] == found[1] == found[2]


def test_rows_that_touch_each_other_run_alone_from_the_change_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, given = model_in(torch.float32), tokens()
    runner: Any = runner_for(model)
    assert runner.executor.rows == ROWS
    with_layer(lambda inputs: inputs.mean(0, keepdim=True), model)
    with caplog.at_level(logging.INFO):
        runner.weights_changed()
        assert same(chain(runner, given, slot=1), one_by_one(runner, given))
    assert runner.executor.rows == 1
    assert "a token alone gets other bits" in caplog.text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny("gptj"), "attention function"),
        (lambda: tiny("deepseek_v32"), "indexer"),
        (lambda: tiny("deepseek_v3"), "changes keys or values"),
        (lambda: with_layer(lambda inputs: torch.rand(())), "a token alone gets other bits than one among"),
    ],
)
def test_models_that_are_refused(make: Callable[[], PreTrainedModel], reason: str) -> None:
    with pytest.raises(ValueError, match=f"invariant=True: .*{reason}"):
        runner_for(make())


def test_fewer_threads_where_theirs_would_end_within_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads at which the promise was tried stays, whatever torch is told later."""
    monkeypatch.setattr(invariance, "_GRAIN", 300)  # so that the tiny model's 768 numbers are divided into three
    torch.set_num_threads(3)
    runner: Any = runner_for(model_in(torch.float32))
    seen = set[int]()
    assert runner.executor.threads == 2, "three parts of 256 are whole vectors, but those of 1,024 numbers are not"
    runner.model.lm_head.register_forward_hook(lambda *call: seen.add(torch.get_num_threads()))
    chain(runner, tokens(3))
    assert (seen, torch.get_num_threads()) == ({2}, 3)


@pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")
@pytest.mark.parametrize(("dtype", "scheme"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")])
def test_a_line_and_a_trees_path_have_the_bits_of_one_token_at_a_time(dtype: torch.dtype, scheme: str | None) -> None:
    """The ordinary engine on a CPU: in any pieces, beside other rows, in trees across the ends of blocks of keys."""
    model = tiny("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16).to(dtype)
    model = model if scheme is None else quantize(model, scheme)
    sizes, given = {"max_batch_size": 3, "max_length": 96, "max_nodes": SHAPE.num_nodes}, tokens(76)
    runner, other = (ModelRunner(model, **sizes, **more) for more in ({}, {"optimize": False, "attention": "grouped"}))

    def parts(runner: ModelRunner) -> int:
        found = 0
        for starts in ((62, 13), (61, 64), (63, 60), (1, 59)):
            logits = trees(runner, given, starts, (2, 0))[:, PATH]
            wanted = torch.stack([one[start : start + len(PATH)] for start in starts])
            found += not torch.equal(logits, wanted)
        return found

    one = one_by_one(runner, given)
    for pieces in ([76], [5] * 16, [7, 1, 9, 2, 21, 36]):
        starts = np.cumsum([0, *pieces[:-1]]).tolist()
        found = [
            chain(runner, given[at : at + size], start=at, slot=1) for at, size in zip(starts, pieces, strict=True)
        ]
        assert torch.equal(torch.cat(found), one), pieces
    assert parts(runner) == 0
    theirs = chain(other, given)
    assert (theirs - one).norm() / one.norm() < (1e-4 if dtype is torch.float32 else 0.1), "the model's own numbers"
    assert parts(other) > 0, "keys in the order of the cells are told apart"
