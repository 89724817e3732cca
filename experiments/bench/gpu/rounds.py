"""Rounds of an 8B shape with random weights: plain, with a 1B, with an EAGLE-3 head, with prompt lookup."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from drafters import ModelDrafter, NGramDrafter
from drafters.round_costs import STAGES, begin, now
from experiments.bench.gpu.drafters import eagle3
from experiments.bench.gpu.outcome import Outcome, counts
from experiments.bench.models import make_target, repetitive
from experiments.bench.timing import Budget
from specdec.drafting.builders import ExpansionTree
from specdec.engine.engine import Engine
from specdec.engine.rounds import RECORD_AFTER
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree_parts import common_sizes
from verifiers.rejection import RejectionVerifier


class Case(NamedTuple):
    """The sizes: shapes by name, the weights' dtype, tokens of a prompt, and rounds that are timed.

    Then tokens in the cache where attention is timed, lengths of prompts that are, and rows of forwards beyond one.
    """

    large: str = "llama-8b"
    small: str = "llama-1b"
    dtype: torch.dtype = torch.bfloat16
    context: int = 1024
    rounds: int = 40
    contexts: tuple[int, int] = (32768, 4096)
    prompts: tuple[int, ...] = (2048, 512, 8192)
    batches: tuple[int, ...] = (8, 32)

    @classmethod
    def of(cls, outcome: Outcome) -> "Case":
        """Return the sizes of a part; tiny ones for a rehearsal."""
        if not outcome.rehearsal:
            return cls()
        return cls("tiny", "tiny", torch.float32, 32, 3, (64, 48), (32, 16), (2,))


class Method(NamedTuple):
    """A drafter, the temperature (with top-p where it is not 0), and how rounds are recorded."""

    name: str
    temperature: float = 0.0
    recording: str = "rounds"

    def __str__(self) -> str:
        return f"{self.name} at temperature {self.temperature:g}, recording={self.recording}"


METHODS = (
    Method("plain"), Method("eagle3"), Method("chain"), Method("ngram"), Method("plain", 1.0),
    Method("plain", 0.0, "off"), Method("chain", 1.0), Method("ngram", 1.0), Method("eagle3", 1.0),
    Method("eagle3", 0.0, "off"),
)  # fmt: skip
"""The most telling ones first."""
WARM = RECORD_AFTER + 2
"""Rounds before those that count: what a warm-up has not met is recorded in them."""


def drafter_of(name: str, case: Case, target: Target) -> Drafter | None:
    """Return the drafter of a method; None for plain decoding."""
    if name == "plain":
        return None
    if name == "ngram":
        return NGramDrafter(max_draft_tokens=8, branches=1)
    if name == "eagle3":
        return eagle3(target, ExpansionTree())
    return ModelDrafter(make_target(case.small, target.device, case.dtype, seed=1).model, 4, sampling="iid")


@torch.no_grad()
def with_few_words(target: Target, context: int) -> Target:
    """Let a target's output layer say the tokens of its prompts alone, so that prompt lookup finds something."""
    said = sorted(set(repetitive(context, target.vocab_size)))
    output: Any = target.model.get_output_embeddings()
    rows = 20 * output.weight[said]
    output.weight.zero_()[said] = rows
    return target


@contextmanager
def playing(case: Case, target: Target, method: Method) -> Iterator[Engine]:
    """Yield an engine with one request, whose rounds are recorded."""
    drafter = drafter_of(method.name, case, target)
    deepest = 1 if drafter is None else drafter.max_depth + 1
    tokens = min(target.max_length - case.context - 1, deepest * (2 * case.rounds + 20))
    sampling = SamplingParams(
        temperature=method.temperature, top_p=0.9 if method.temperature else 1.0, ignore_eos=True, seed=0,
        max_new_tokens=tokens,
    )  # fmt: skip
    rule, most = None if drafter is None else RejectionVerifier(), case.context + tokens + 1
    with Engine(target, drafter, rule, max_length=most, recording=method.recording) as engine:
        engine.warm_up(common_sizes(0 if drafter is None else drafter.max_nodes), sampling=sampling, positions=most)
        begin(engine, [repetitive(case.context, target.vocab_size)], [sampling])
        for _ in range(WARM):
            engine.step()
        yield engine


def measure_rounds(outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    """Time rounds of every method: as they come, then by stage."""
    for method in METHODS:
        if budget.spent(f"rounds of {method}"):
            continue
        with outcome.going_on(f"rounds of {method}"), playing(case, target, method) as engine:
            outcome.add("rounds", **method._asdict(), **_timed(engine, case.rounds))
            outcome.figures |= figures_of(outcome.records["rounds"])
    outcome.table("Rounds; outside: without draft and verify", "rounds")


def _timed(engine: Engine, rounds: int) -> dict[str, Any]:
    device, before = engine.target.device, engine.recording_counts
    start = now(device)
    steps = [step for _ in range(rounds) for step in engine.step()]
    seconds = (now(device) - start) / rounds
    after = engine.recording_counts
    engine.timer.enabled = True
    staged = [step for _ in range(rounds) for step in engine.step()]
    engine.timer.enabled = False
    stages = {name: sum(step.seconds.get(name, 0.0) for step in staged) / len(staged) for name in STAGES}
    replayed = (after.replayed - before.replayed) / (after.rounds - before.rounds)
    return {
        "seconds": seconds,
        **{f"{name}_seconds": taken for name, taken in stages.items()},
        "outside_seconds": seconds - stages["draft"] - stages["verify"],
        "nodes": sum(step.proposed_nodes for step in steps) / len(steps),
        "tokens": sum(step.accepted + 1 for step in steps) / len(steps),
        "replayed": None if engine.recording == "off" else replayed,
        "replays": after.replays,
        "refused": sum(map(len, after.refused.values())),
        "reasons": after.refused,
    }


def figures_of(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return what is expected of rounds. Prompt lookup drafts on the host, which takes a time of its own."""
    seconds = {tuple(each[name] for name in Method._fields): each["seconds"] for each in records}
    device = [each for each in records if each["recording"] != "off" and each["name"] != "ngram"]
    plain, eagle, eager = (seconds.get(method) for method in (METHODS[0], METHODS[1], METHODS[5]))
    return {
        **counts(records),
        "outside": max((1000 * each["outside_seconds"] for each in device), default=None),
        "eagle3": None if eagle is None else 1000 * eagle,
        "eager": None if plain is None or eager is None else eager / plain,
    }
