"""Attention over the cache against its definition in float64, and backends behind whole models."""

import itertools
from dataclasses import replace

import pytest
import torch

from drafters.model import ModelDrafter
from specdec import Engine, ModelRunner, SamplingParams, Target
from specdec.attention import BACKENDS, call
from specdec.kernels.attention import DTYPES
from specdec.kernels.tiles import Tiles, choose_tiles
from specdec.target.facts import find
from tests.attention import CASES, TOLERANCE, Case, Problem, error, launch, paged, path_to, problem, quantized
from tests.components import DISTANCE, TREE, fitting, perturbed
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.verifiers.cases import complete

SMALL = Tiles(16, 16, 4, 1)
SHOWN = {
    *("one tree for all rows", "groups of three", "heads of 80", "bfloat16", "softcap, sinks and scaling", "chunks"),
    *("several words of ancestors", "the last level, in a window", "slots apart", "the window of a mixed block"),
}
"""By default, in the interpreter. The others are like one of these, and a GPU takes them all."""


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "grouped") for name in CASES),
        *((name, "native") for name, case in CASES.items() if case.dtype is not torch.float16),
        *(complete(name, "triton", strong=name in SHOWN) for name in CASES),
    ],
)
@torch.inference_mode()
def test_a_backend_computes_what_attention_is(name: str, backend: str) -> None:
    given = problem(CASES[name])
    assert error(given.output(BACKENDS[backend]), given.expected()) < TOLERANCE[given.case.dtype]


@torch.inference_mode()
def test_a_context_in_more_pieces_than_there_are_blocks_of_keys() -> None:
    given = problem(Case(lengths=(33,), nodes=9, kv_heads=1, shape="chain", softcap=2.0))
    given.output(BACKENDS["grouped"])  # writes the new keys
    assert error(launch(given, tiles=SMALL, pieces=7), given.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [None, torch.int8, complete(torch.float8_e4m3fn, strong=False)], ids=str)
@torch.inference_mode()
def test_pages_in_any_order_also_of_quantized_keys_and_values(dtype: torch.dtype | None) -> None:
    """Compared with the numbers that they stand for, so that only rounding is left."""
    given = problem(Case(lengths=(45, 7), slots=(2, 0), nodes=6, window=30))
    given.output(BACKENDS["grouped"])
    stored, meant = (given.cache.stored(0), given) if dtype is None else quantized(given, dtype)
    seen, expected = given.seen(), meant.expected()
    stored, table = paged(stored, seen.table, 8)
    assert table.shape[1] > 1
    seen = replace(seen, table=table)
    assert error(launch(given, stored=stored, seen=seen, tiles=SMALL, pieces=2), expected) < TOLERANCE[torch.float32]
    wrong = replace(seen, table=table.flip(1))
    assert error(launch(given, stored=stored, seen=wrong, tiles=SMALL), expected) > 0.1
    if stored.key_scales is not None:
        doubled = stored._replace(key_scales=stored.key_scales * 1.1)
        assert error(launch(given, stored=doubled, seen=seen, tiles=SMALL), expected) > 0.02


WINDOWED = Case(lengths=(17, 6), nodes=7, window=8, sinks=True, kv_heads=1)
MISTAKES = {
    "a node sees a stranger": lambda seen, given: {"seen": replace(seen, words=_flipped(seen.words, 6, 0, given))},
    "a node misses its parent": lambda seen, given: {"seen": replace(seen, words=_flipped(seen.words, 6, 1, given))},
    "one position too many": lambda seen, given: {"seen": replace(seen, lengths=seen.lengths + 1)},
    "one position too few": lambda seen, given: {"seen": replace(seen, lengths=seen.lengths - 1)},
    "other depths": lambda seen, given: {"seen": replace(seen, depth=seen.depth.roll(1, 1))},
    "every cell up to its own": lambda seen, given: {"seen": replace(seen, words=None)},
    "rows exchanged": lambda seen, given: {"seen": replace(seen, table=seen.table.flip(0))},
    "a wider window": lambda seen, given: {"window": 9},
    "chunks": lambda seen, given: {"window": None, "chunk": 3},
    "no sinks": lambda seen, given: {"sinks": None},
    "another scale": lambda seen, given: {"scaling": 0.3},
    "a softcap": lambda seen, given: {"softcap": 2.0},
}


def _flipped(words: torch.Tensor, query: int, mark: int, given: Problem) -> torch.Tensor:
    """Flips a query's first mark that is 0, or its last but one that is 1 (a node's own is the last)."""
    changed = words.clone()
    path = set(path_to(given.parents[0], query))
    cell = max(path - {query}) if mark else min(set(range(query)) - path)
    changed[0, query, 0] ^= 1 << cell
    return changed


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
@torch.inference_mode()
def test_the_comparison_notices_a_mistake(mistake: str | None) -> None:
    given = problem(WINDOWED)
    given.output(BACKENDS["grouped"])
    seen = given.seen()
    options = MISTAKES[mistake](seen, given) if mistake else {}
    wrong = error(launch(given, tiles=SMALL, **options), given.expected())
    assert wrong > 0.01 if mistake else wrong < TOLERANCE[torch.float32]


@torch.inference_mode()
def test_the_sight_of_a_mixed_block_would_be_missed() -> None:
    given = problem(CASES["the window of a mixed block"])
    output = given.output(BACKENDS["grouped"])
    for change in ({"shape": "block"}, {"shape": "chain"}, {"window": 4}):
        assert error(output, given.expected(**change)) > 0.01, change


@torch.inference_mode()
def test_nothing_is_read_behind_a_row() -> None:
    """What lies behind a row's tree is of no influence, even if it is not a number."""
    given = problem(Case(lengths=(3, 9), nodes=4, bound=20))
    expected = given.expected()
    for b, length in enumerate(given.case.lengths):
        given.cache.stored(0).keys[b, :, length + 4 :] = torch.nan
        given.cache.stored(0).values[b, :, length + 4 :] = torch.nan
    assert error(given.output(BACKENDS["triton"]), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("room", [99 * 1024, 227 * 1024], ids=["a consumer's card", "H100"])
def test_tiles_fit_into_shared_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.tiles.shared_memory", lambda device: room)
    widths = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)]
    for dtype, (head_dim, value_dim), queries in itertools.product(DTYPES, widths, [1, 8, 64, 256, 4096]):
        tiles = choose_tiles(queries, head_dim, value_dim, dtype, torch.device("cpu"))
        needed = (tiles.queries * head_dim + tiles.stages * tiles.keys * (head_dim + value_dim)) * dtype.itemsize
        fits_nowhere = dtype is torch.float32 and head_dim == 576 and room < 100 * 1024
        assert needed <= room or fits_nowhere, (dtype, head_dim, queries)
        assert min(tiles.queries, tiles.keys) >= 16  # what tensor cores multiply at least
        assert tiles.queries & (tiles.queries - 1) == tiles.keys & (tiles.keys - 1) == 0


PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 4]


@pytest.mark.parametrize(("architecture", "layers"), [("llama", 1), complete("gemma2", 2, strong=False)])
def test_the_kernel_decodes_as_the_model_itself(architecture: str, layers: int) -> None:
    """Prompts longer than the windows, a slot that is used twice, and a drafter with the kernel, level by level."""
    model = tiny_model(architecture, layers=layers)
    made = ModelDrafter(perturbed(model, DISTANCE), TREE, sampling="deterministic", attention="triton")
    engine = Engine(Target(model), made, fitting(made), max_batch_size=2, max_length=32, attention="triton")
    assert engine.runner.backend is BACKENDS["triton"]
    sampling = SamplingParams(max_new_tokens=4)
    outputs = engine.generate(PROMPTS, sampling)
    wanted = [reference_decode(model, prompt, sampling) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(step.accepted for output in outputs for step in output.steps) > 0  # trees were kept, too


class _Failing(type(BACKENDS["grouped"])):
    """A backend that gives wrong numbers: it lets every query see all keys of its row."""

    def prepare(self, *args):
        view = super().prepare(*args)
        return type(view)(view.cache, [torch.zeros_like(mask) for mask in view.masks])


def test_auto_says_why_others_were_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = _Failing()
    absent.check = lambda model: "it is not installed"
    backends = {"absent": absent, "wrong": _Failing(), **{name: BACKENDS[name] for name in ("grouped", "eager")}}
    monkeypatch.setattr("specdec.target.facts.BACKENDS", backends)
    found = find(tiny_model(), attention="eager")
    assert (found.name, found.reason) == ("eager", "eager")
    found = find(tiny_model())
    assert found.name == "grouped"
    assert found.reason.startswith("grouped (auto; not absent: it is not installed; not wrong: its logits ")


def test_what_the_kernel_is_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention='triton': .*float64.*; use attention='auto'"):
        ModelRunner(tiny_model(layers=1).double(), max_batch_size=1, max_length=8, attention="triton")


@pytest.mark.parametrize(("change", "words"), [("key", "changes keys or values"), ("mask", "changes the mask")])
def test_a_model_that_goes_behind_the_cache_is_noticed(change: str, words: str, monkeypatch) -> None:
    """The kernel reads the cache, so what a model does to keys or masks afterwards would be lost without a word."""
    model = tiny_model(layers=1)
    function = call.attention

    def changing(module, query, key, value, attention_mask, **kwargs):
        key, mask = (key * 2, attention_mask) if change == "key" else (key, attention_mask + 1)
        return function(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(call.AttentionInterface._global_mapping, call.NAME, changing)
    with pytest.raises(ValueError, match=words):
        ModelRunner(model, max_batch_size=1, max_length=8, attention="triton")
