"""Forwards on a GPU: attention, invariant mode, the kernels' numbers, and programs in rounds and in graphs."""

import itertools
from dataclasses import replace

import pytest
import torch

from specdec import DraftSampling, Engine, SamplingParams, Target, Topology
from specdec.attention import BACKENDS
from specdec.execution.forwards import FusedExecutor
from specdec.kernels import Stored
from specdec.kernels.attention import Seen, tree_attention
from specdec.target.facts import find
from tests.attention import CASES, TOLERANCE, Case, error, launch, paged, problem, quantized
from tests.components import DRAFTERS, fitting
from tests.models import ARCHITECTURES, tiny_model
from tests.plain_kernels import plain_add_norm, plain_gated, plain_rotate
from tests.reference import reference_decode
from tests.specdec.invariant_forwards import PATH, PROMPTS, VOCAB, chain, one_by_one, runner_for, same, tokens, trees

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tokens_logits_do_not_depend_on_the_forward(dtype: torch.dtype) -> None:
    runner = runner_for(tiny_model(vocab_size=VOCAB).to(dtype).cuda())  # type: ignore[arg-type]
    given = tokens().cuda()
    plain = one_by_one(runner, given)
    assert same(chain(runner, given, slot=1), plain)
    starts, slots = (22, 13, 3), (2, 0, 1)
    found = trees(runner, given, starts, slots)
    for row, start in enumerate(starts):
        assert same(found[row, PATH], plain[start : start + len(PATH)])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_drafters_greedy_output_is_plain_decodings(drafter: str) -> None:
    full = tiny_model(vocab_size=VOCAB).cuda()
    made = DRAFTERS[drafter](full)
    coupled = DraftSampling.COUPLED in made.laws
    sampling = [
        SamplingParams(max_new_tokens=10, temperature=float(coupled and row % 2)) for row in range(len(PROMPTS))
    ]
    target = Target(full.bfloat16())
    with Engine(target, made, fitting(made), max_batch_size=2, max_length=64, invariant=True) as engine:
        outputs = [each.token_ids for each in engine.generate(PROMPTS, sampling)]
        assert outputs == [each.token_ids for each in engine.generate(PROMPTS, sampling, speculate=False)]


layers = pytest.importorskip("specdec.kernels.layers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["32", "16", "b16"])
def test_kernels_at_the_sizes_of_an_8b(dtype: torch.dtype) -> None:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
        few = 1e-5 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, atol=few, rtol=few)

    for rows in (1, 60, 1920):
        x, residual, weight = drawn(1, rows, 4096), drawn(1, rows, 4096), drawn(4096)
        for form in ((True, 0.0), (False, 1.0)):
            found = layers.add_norm(x, residual, weight, 1e-5, *form)
            expected = plain_add_norm(x, residual, weight, 1e-5, *form)
            assert torch.equal(found[1], expected[1])
            assert_close(found[0], expected[0])
        gate, up = drawn(1, rows, 14336), drawn(1, rows, 14336)
        for activation in layers.ACTIVATIONS:
            found_gate = layers.gated(gate, up, activation)
            assert_close(found_gate, plain_gated(gate, up, activation))
        query, key, value = (drawn(1, rows, count, 128).transpose(1, 2) for count in (32, 8, 8))
        given = query, key, value, drawn(1, 1, rows, 128), drawn(1, 1, rows, 128), None, None, None
        for one, other in zip(layers.rotate(*given), plain_rotate(*given), strict=True):
            assert_close(one, other)


RAGGED = [[1, 2, 3, 1, 2], [7], [9, 8] * 10]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.inference_mode()
def test_the_kernel_computes_what_attention_is(case: Case) -> None:
    given = problem(case, "cuda")
    assert error(given.output(BACKENDS["triton"]), given.expected()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [None, 8])
@torch.inference_mode()
def test_quantized_keys_and_values(dtype: torch.dtype, page_size: int | None) -> None:
    if dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    given = problem(Case(lengths=(300, 4), nodes=6, head_dim=64), "cuda")
    given.output(BACKENDS["grouped"])  # writes the new keys
    stored, meant = quantized(given, dtype)
    seen = given.seen()
    if page_size is not None:
        stored, table = paged(stored, seen.table, page_size)
        seen = replace(seen, table=table)
    assert error(launch(given, stored=stored, seen=seen, pieces=2), meant.expected()) < TOLERANCE[torch.float32]


@torch.inference_mode()
def test_a_context_of_32k() -> None:
    """Eight rows of about 32 thousand positions, trees of 16 nodes, the heads of an 8B model."""
    rows, nodes, positions, kind = 8, 16, 32768 + 64, {"device": "cuda", "dtype": torch.bfloat16}
    stored = Stored(torch.randn(rows, 8, positions, 128, **kind), torch.randn(rows, 8, positions, 128, **kind))
    query = torch.randn(rows, 32, nodes, 128, **kind)
    parents = torch.tensor([[-1, *(int(torch.randint(0, n, ())) for n in range(1, nodes))] for _ in range(rows)])
    topology = Topology.from_parents(parents.cuda())
    lengths = 32768 - torch.arange(rows, device="cuda") * 997
    table = torch.arange(rows, device="cuda").flip(0)[:, None]
    seen = Seen(lengths, table, topology.ancestor_words, topology.depth, positions)
    output = tree_attention(query, stored, seen)
    for row in range(len(query)):
        length, slot = int(seen.lengths[row]), int(seen.table[row, 0])
        keys = stored.keys[slot, :, : length + 16].double().repeat_interleave(4, 0)
        values = stored.values[slot, :, : length + 16].double().repeat_interleave(4, 0)
        scores = query[row].double() @ keys.transpose(1, 2) * 128**-0.5
        scores[:, :, length:].masked_fill_(~topology.ancestors[row], -torch.inf)
        expected = (scores.softmax(-1) @ values).transpose(0, 1)
        # A mean of many values is small: what matters is the error relative to it.
        assert float((output[row].double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_auto_picks_the_kernel(architecture: str) -> None:
    assert find(tiny_model(architecture).cuda()).reason == "triton (auto)"


@pytest.mark.parametrize(
    ("drafter", "architecture", "attention"),
    [
        *itertools.product(DRAFTERS, ["llama"], ["auto"]),
        *itertools.product(DRAFTERS, ["gemma2"], ["triton"]),
        *itertools.product(["ngram"], ["qwen3", "gemma3"], ["auto"]),
    ],
)
def test_it_decodes_as_the_model_itself(drafter: str, architecture: str, attention: str) -> None:
    model = tiny_model(architecture).cuda()
    made = DRAFTERS[drafter](model)
    engine = Engine(Target(model), made, fitting(made), max_batch_size=2, max_length=64, attention=attention)
    sampling = SamplingParams(max_new_tokens=20)
    outputs = [list(output.token_ids) for output in engine.generate(RAGGED, sampling)]
    assert outputs == [reference_decode(model, prompt, sampling) for prompt in RAGGED]
    executor = engine.runner.executor
    assert isinstance(executor, FusedExecutor) and not executor.recordings.refused
