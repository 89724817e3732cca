"""The memory of a run from its configuration: what is planned agrees with what the components then are."""

from dataclasses import fields

import pytest

from experiments.config.checking import in_words
from experiments.config.sections import build
from experiments.config.settings import EngineSettings
from experiments.measuring.meters import held_by
from experiments.planning.memory import RunMemory
from experiments.session.memory import plan_memory
from specdec.cache.formats import FORMATS
from specdec.engine.engine import Engine
from tests.experiments.runs import Configure


@pytest.mark.parametrize(
    "words",
    [
        ["drafter=model", "tree=expansion"],
        ["drafter=eagle", "tree=sampled"],
        ["drafter=block", "drafter.shape=3"],
        ["drafter=choice"],
    ],
    ids=" ".join,
)
def test_nodes_of_drafts_are_those_of_the_drafter(words: list[str], configure: Configure) -> None:
    config = configure("run", *words, "method=m")
    planned = plan_memory(config, {"m": "drafter"})
    assert isinstance(planned, RunMemory)
    served, drafter = planned.methods["m"], build(config, "drafter")
    assert served.drafted == drafter.max_nodes
    assert not planned.unknown


@pytest.mark.parametrize("drafter", ["eagle", pytest.param("block", marks=pytest.mark.full)])
def test_a_drafter_holds_what_is_planned(drafter: str, configure: Configure) -> None:
    """Weights but for norms and small vectors, and caches to the byte."""
    config = configure("run", f"drafter={drafter}", "method=m", "engine.max_batch_size=3", "engine.max_length=50")
    planned = plan_memory(config, {"m": "drafter"})
    assert isinstance(planned, RunMemory)
    target, rule = build(config, "target"), build(config, "verifier")
    with Engine(target, build(config, "drafter"), rule, max_batch_size=3, max_length=50) as engine:
        held = held_by([engine])
    memory = planned.planned
    assert (memory.kv, memory.drafter_kv, memory.scratch) == (held.kv, held.drafter_kv, held.scratch)
    assert memory.weights == pytest.approx(held.weights, rel=0.005)
    assert memory.drafter == pytest.approx(held.drafter, rel=0.005)


def test_methods_may_have_targets_of_their_own(configure: Configure) -> None:
    words = ["drafter=none", "+drafter@methods.a=ngram", "+drafter@methods.b=ngram"]
    own = "+setups.b={target:{quantization:int8},engine:{max_batch_size:3}}"
    methods = {"a": "methods.a", "b": "methods.b"}
    one, two = (plan_memory(configure("run", *words, *more), methods) for more in ([], [own]))
    assert isinstance(one, RunMemory) and isinstance(two, RunMemory)
    assert one.planned.weights < two.planned.weights < 2 * one.planned.weights
    assert two.planned.kv == 2 * one.planned.kv, "a row, and three"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target.device_map=auto"], "memory is not planned with target.device_map: the model is on several devices"),
        (["target.name=/nowhere"], "memory is not planned: "),
    ],
)
def test_why_nothing_is_planned(words: list[str], said: str, configure: Configure) -> None:
    """Loading says what is wrong, if anything is."""
    found = plan_memory(configure("run", "drafter=none", "method=m", *words), {"m": "drafter"})
    assert isinstance(found, str) and found.startswith(said)


def test_the_settings_know_all_formats() -> None:
    """They have the names without importing PyTorch."""
    (kind,) = (field.type for field in fields(EngineSettings) if field.name == "kv_cache")
    assert in_words(kind) == f"one of {', '.join(FORMATS)}, or null"
