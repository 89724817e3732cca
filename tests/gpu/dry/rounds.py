"""Rounds of every drafter, rule and cache on a GPU that is not there.

    python -m tests.gpu.dry.rounds [1/2] [words that cases must have in their names]

plays rounds of several kinds in turn on one engine, and prints a line for every case: its graphs, the kernels of its
stages, and what is wrong. 1/2 plays the first, the third and so on alone. In a process of its own: constants of torch
are made for the GPU.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from torch import Tensor

import specdec.engine.recording
import tests.gpu.dry.fake_tensors as fake_tensors_module
from specdec.cache.pages import Paging
from specdec.drafting.scored import ScoredSession
from specdec.engine.engine import Engine
from specdec.execution import recorder
from specdec.interfaces import Drafter, Laws, Verifier
from specdec.requests import Grammar, SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from tests.components import DRAFTERS, READS_NODES, fitting
from tests.gpu.dry.fake_cuda import Device, fake_cuda, move
from tests.gpu.dry.fake_tensors import ROOT
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

GREEDY = SamplingParams(max_new_tokens=60)
SAMPLED = SamplingParams(max_new_tokens=60, temperature=1.0, top_p=0.9, seed=0)
FREE = replace(GREEDY, grammar=Grammar(regex="a", mask_drafts=False))
MASKED = replace(SAMPLED, grammar=Grammar(regex="a"))
PHASES = {
    "plain": (GREEDY, SAMPLED),
    "greedy": (GREEDY, GREEDY),
    "sampled": (SAMPLED, SAMPLED),
    "mixed": (GREEDY, SAMPLED),
    "free under a grammar": (FREE, SAMPLED),
    "masked by a grammar": (MASKED, SAMPLED),
}
DRAWN, AGAIN = ("sampled", "mixed"), ("sampled", "masked by a grammar")
"""Phases that are played for rules and caches, and for drafters that have the parts of an earlier one."""
CACHES: dict[str, dict[str, Any]] = {
    "pages": {"cache": Paging(page_size=16)},
    "pages, shared": {"cache": Paging(page_size=16, shared=True)},
    "int8": {"kv_cache": "int8"},
    "fp8, pages": {"kv_cache": "fp8", "cache": Paging(page_size=16)},
}
CHAIN, TREES = "model_chain_iid", ("model_tree_iid", "model_tree_without_replacement", "model_paths_iid")
"""Drafts that every rule is tried with; of the trees, the first that it takes."""
ON_THE_HOST = ("transport",)
"""Rules that need numbers on the host, which nothing has here."""


@dataclass(frozen=True)
class Case:
    """One engine: a drafter, a rule, and options."""

    name: str
    drafter: str | None
    rule: Callable[[], Verifier] | None = None
    phases: tuple[str, ...] = DRAWN
    options: dict[str, Any] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """Yields every drafter with the usual rule, every rule with a chain and a tree, and every cache."""
    seen = set()
    for name in [name for name in DRAFTERS if name not in READS_NODES]:
        made = _drafter(name)
        parts = type(made), *(type(getattr(made, part, None)) for part in ("tree", "policy"))
        yield Case(name, name, phases=AGAIN if parts in seen else tuple(PHASES))
        seen.add(parts)
    for file in sorted((ROOT / "conf" / "verifier").glob("*.yaml")):
        rule = _rule(file)
        if file.stem in ON_THE_HOST:
            continue
        drafters = [name for name in (CHAIN, *TREES, "model_tree_coupled") if _fits(rule(), name)]
        chain, trees = [name for name in drafters if name == CHAIN], [name for name in drafters if name != CHAIN]
        yield from (Case(f"{file.stem}, {name}", name, rule) for name in chain + trees[:1])
    for form, options in CACHES.items():
        for name in ("model_tree_iid", "eagle3_chain_iid"):
            yield Case(f"{form}, {name}", name, options=options)


def _rule(file: Path) -> Callable[[], Verifier]:
    settings = yaml.safe_load(file.read_text())
    module, _, name = settings.pop("_target_").rpartition(".")
    return lambda: getattr(import_module(module), name)(**settings)


@cache
def _drafter(name: str) -> Drafter:
    return DRAFTERS[name](tiny_model(layers=2))


def _fits(rule: Verifier, name: str) -> bool:
    try:
        rule.check(_drafter(name))
    except ValueError:
        return False
    return True


def play(case: Case) -> tuple[list[str], Device]:
    """Return what is wrong with a case's rounds, and their work."""
    torch.manual_seed(0)
    model = tiny_model(layers=2)
    drafter = None if case.drafter is None else DRAFTERS[case.drafter](model)
    rule = case.rule() if case.rule is not None else None if drafter is None else fitting(drafter)
    move([model, drafter])
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    recorder.logger.addHandler(handler)
    problems: list[str] = []
    with fake_cuda() as device, patch.object(specdec.engine.recording, "RECORD_AFTER", 3):
        try:
            engine = Engine(Target(model), drafter, rule, max_batch_size=2, max_length=128, **case.options)
            # A policy of nodes, or a tree that may end early, tells the host how many nodes to verify.
            scored = engine.session if isinstance(engine.session, ScoredSession) else None
            allowed = 1 + (scored is not None and (scored.policy is not None or scored.tree.ends))
            for phase in case.phases:
                problems += [f"{phase}: {each}" for each in _phase(engine, device, phase, allowed)]
                if phase == "greedy" and case.drafter == CHAIN:
                    engine.weights_changed()  # all that was recorded is dropped
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    recorder.logger.removeHandler(handler)
    problems += warnings + [f"outputs overlap themselves (stride 0): {each}" for each in device.overlapping]
    return [*dict.fromkeys(problems)], device


def _phase(engine: Engine, device: Device, phase: str, allowed: int) -> Iterator[str]:
    sampling = PHASES[phase]
    requests = [engine.submit([1, 2, 3] * 5, each, speculate=phase != "plain") for each in sampling]
    before = device.captured, engine.recording_counts.replayed
    for _ in range(6):
        device.waits.clear()
        engine.step()
    allowed += any(each.grammar is not None for each in sampling)  # the masks of what is judged
    if phase == "masked by a grammar" and engine.session is not None and engine.session.models:
        twice = isinstance(engine.session, ScoredSession) and engine.session.tree.asks_twice
        allowed += 1 + (1 + twice) * (engine.drafter.max_depth if engine.drafter is not None else 0)  # of every level
    if device.waits.total() > allowed:
        yield f"the host waits {device.waits.total()} times in a round: {dict(device.waits)}"
    if (device.captured, engine.recording_counts.replayed) == before:
        yield "nothing was captured or replayed"
    for request in requests:
        engine.abort(request)


class Changed(RejectionVerifier):
    """Does something wrong on the way to the laws of rejection."""

    recordable = True

    def __init__(self, wrong: Callable[[Tensor], object]):
        self.wrong = wrong

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        self.wrong(target_probs)
        return super().laws(tree, target_probs)


class Unrecorded(Changed):
    """The same in stages that are not recorded."""

    recordable = False


def _wrong(kind: type[Changed], wrong: Callable[[Tensor], object]) -> Case:
    return Case("a mutant", CHAIN, lambda: kind(wrong))


_ONE, _KEPT = (lambda tensor: tensor[:1].expand(tensor.shape)), (lambda recorder: None)
MUTANTS: dict[str, tuple[Case, Any, str]] = {
    "a read in a stage": (_wrong(Changed, lambda p: int(p.argmax())), nullcontext(), "makes the host wait"),
    "a copy from the host in a stage": (
        _wrong(Changed, lambda p: torch.tensor([0.5], device=p.device)), nullcontext(), "makes the host wait"
    ),
    "a copy from the host that nobody waits for": (
        _wrong(Changed, lambda p: torch.from_numpy(np.ones(1)).to(p.device, non_blocking=True)),
        nullcontext(), "not repeated by a replay",
    ),
    "a second wait in a round": (_wrong(Unrecorded, lambda p: int(p.argmax())), nullcontext(), "waits 2 times"),
    "a tensor of the host": (_wrong(Changed, lambda p: p + torch.ones(1)), nullcontext(), "two devices"),
    "outputs whose rows are one": (
        Case("a mutant", CHAIN), patch.object(fake_tensors_module, "_contiguous", _ONE), "stride 0"
    ),
    "a pool that is kept when its graphs are dropped": (
        Case("a mutant", CHAIN, phases=("greedy", "sampled")),
        patch.object(recorder.CudaGraphRecorder, "clear", _KEPT), "graphs that are all gone",
    ),
}  # fmt: skip
"""What must not pass: a case, what is changed meanwhile, and words of the problem that is to be found."""


def main(words: list[str]) -> int:
    """Play the cases and the mutants whose names have all words; returns how many went wrong."""
    torch.set_num_threads(1)
    first, _, step = next((word for word in words if word[0].isdecimal()), "1/1").partition("/")
    words = [word for word in words if not word[0].isdecimal()]
    part = slice(int(first) - 1, None, int(step))
    failed = 0
    for case in [*cases()][part]:
        if all(word in case.name for word in words):
            problems, device = play(case)
            failed += bool(problems)
            kernels = ", ".join(f"{stage} {count.total()}" for stage, count in device.kernels.items() if stage)
            print(f"{case.name:55s} {device.captured} graphs ({kernels})", *problems, sep="\n    ", flush=True)
    for name, (case, change, reason) in [*MUTANTS.items()][part]:
        if all(word in f"mutant: {name}" for word in words):
            with change:
                rejected = any(reason in problem for problem in play(case)[0])
            failed += not rejected
            print(f"mutant: {name:47s} {'rejected' if rejected else 'NOT REJECTED'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
