"""Token for token with a quantized cache: every method equals plain decoding of the model *with that cache*.

The reference is written the obvious way: the whole sequence through transformers' model and cache for every token, each
key and value rounded to the format. float32.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

import specdec.cache.paged
from drafters.model import ModelDrafter
from specdec import Engine, ModelRunner, Noise, Target
from specdec.cache.formats import FORMATS
from specdec.cache.layout import Segment
from specdec.cache.storage import Cache
from tests.components import DRAFTERS, STRONGEST, TREE, VERIFIERS, perturbed
from tests.test_lossless import SAMPLING, prompts, reference, target_model
from tests.verifiers.cases import complete

pytestmark = pytest.mark.usefixtures("untried")
MAIN = "qwen3"  # whose outputs every format changes
formats = pytest.mark.parametrize("kv_cache", FORMATS)


def decoded(kv_cache: str, architecture: str = MAIN, **options: object) -> list[list[int]]:
    """Plain decoding's output, with refilled slots and prompts in pieces."""
    target = Target(target_model(architecture))
    engine = Engine(target, max_batch_size=3, max_length=64, prefill_chunk=7, kv_cache=kv_cache, **options)  # type: ignore[arg-type]
    return [list(output.token_ids) for output in engine.generate(prompts(), SAMPLING)]


@pytest.mark.parametrize(
    ("architecture", "kv_cache"),
    [
        complete(architecture, kv_cache, strong=architecture == MAIN or kv_cache == "int8")
        for architecture, kv_cache in product([MAIN, "mistral_sliding", "gemma2"], FORMATS)
    ],
)
def test_plain_decoding_equals_the_reference(architecture: str, kv_cache: str) -> None:
    wanted = reference(architecture, kv_cache=kv_cache)
    assert decoded(kv_cache, architecture) == wanted
    if architecture == MAIN:
        assert wanted != reference(architecture), "the comparison would not notice a cache that is not quantized"


STRONG = {
    "int8": [
        ("model_tree_without_replacement", "traversal"),
        ("model_tree_coupled", "shared_noise"),
        ("medusa", "rejection"),
    ],
    "fp8": [("model_tree_without_replacement", "rejection"), ("ngram", "rejection")],
}
"""What is tried by default."""
PAIRS = dict.fromkeys(
    [(drafter, verifier) for verifier, drafter in STRONGEST.items()]
    + [(name, "rejection") for name in ("ngram", "medusa")]
)


@pytest.mark.parametrize(
    ("kv_cache", "drafter", "verifier"),
    [
        complete(kv_cache, drafter, verifier, strong=(drafter, verifier) in STRONG.get(kv_cache, ()))
        for kv_cache, (drafter, verifier) in product(FORMATS, PAIRS)
        if kv_cache == "int8" or verifier == "rejection"
    ],
)
def test_speculation_equals_the_reference(kv_cache: str, drafter: str, verifier: str) -> None:
    model = target_model(MAIN)
    made, rule = DRAFTERS[drafter](model), VERIFIERS[verifier]()
    if isinstance(made, ModelDrafter):
        made.kv_cache = kv_cache
    engine = Engine(Target(model), made, rule, max_batch_size=3, max_length=64, prefill_chunk=7, kv_cache=kv_cache)
    outputs = engine.generate(prompts(), SAMPLING)
    for output, sampling, expected in zip(outputs, SAMPLING, reference(MAIN, rule.noise, kv_cache), strict=True):
        if sampling.greedy or rule.noise is Noise.SHARED:
            assert list(output.token_ids) == expected
    steps = [step for o, p in zip(outputs, SAMPLING, strict=True) if p.greedy for step in o.steps]
    assert sum(step.proposed_nodes for step in steps) > 0
    assert drafter in ("ngram", "medusa") or sum(step.accepted for step in steps) > len(steps) / 2


class Fresh(Cache):
    """A mistake: a forward's nodes see each other's keys and values as they were computed, not as they are stored."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().write(layer, keys, values)
        self.fresh = keys, values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._renewed(super().read(layer), slice(None))

    def read_segment(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        return self._renewed(super().read_segment(layer, segment), segment.rows)

    def _renewed(self, found: tuple[Tensor, Tensor], which: slice) -> tuple[Tensor, Tensor]:
        if self._start >= 0:
            cells = torch.arange(self.fresh[0].shape[2])[None] + self._start
        else:
            (index,) = self._indices.values()
            cells = index[1]
        keys, values = (each + 0 for each in found)
        rows = torch.arange(len(keys))[:, None]
        for each, fresh in zip((keys, values), self.fresh, strict=True):
            each.transpose(1, 2)[rows, cells[which]] = fresh[which].transpose(1, 2)
        return keys, values


@formats
def test_unrounded_keys_of_the_forwards_own_nodes_would_be_noticed(kv_cache: str, monkeypatch) -> None:
    monkeypatch.setattr(specdec.cache.paged, "Cache", Fresh)
    models = (MAIN, "gemma2", "mistral_sliding", "qwen2")  # until the first whose outputs hang on it
    assert any(decoded(kv_cache, name, optimize=False) != reference(name, kv_cache=kv_cache) for name in models)


@formats
def test_the_drafters_cache_does_not_change_greedy_outputs(kv_cache: str) -> None:
    model = target_model(MAIN)
    drafter = ModelDrafter(perturbed(model, 0.1), TREE, sampling="without_replacement", kv_cache=kv_cache)
    engine = Engine(Target(model), drafter, VERIFIERS["rejection"](), max_batch_size=3, max_length=64)
    assert engine.session is not None
    (runner,) = engine.session.models
    assert isinstance(runner, ModelRunner) and runner.cache.quantized
    assert not engine.runner.cache.quantized
    outputs = engine.generate(prompts(), SAMPLING)
    for output, sampling, expected in zip(outputs, SAMPLING, reference(MAIN), strict=True):
        assert not sampling.greedy or list(output.token_ids) == expected
