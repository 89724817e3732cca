"""The work of a call of the engine, and the time that it should have taken: computed after the call, from its steps.

Nothing of this runs while the engine does. A step says how many nodes were verified and accepted, and how long the
stages of its round took; the rest is arithmetic.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.measuring.conditions import drafter_name, shape_of, without_policy
from experiments.measuring.rounds import STAGES
from specdec.engine.engine import Engine
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import StepSize
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.physics.work import StepWork, prompts_work, step_work, weights_read
from specdec.target.runner import ModelRunner
from specdec.types import Completion

Numbers = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Account:
    """The work and the times of one call.

    Attributes:
        work: Totals of the call: bytes and operations of every stage, nodes that were verified, tokens that were
            committed, and seconds that were predicted. A stage about which nothing is known has no entry.
        seconds: For every request, the measured seconds of each of its rounds, which the batch shares.
        predicted: Likewise; None where costs say nothing. Empty without costs.
    """

    work: Mapping[str, float] = field(default_factory=dict)
    seconds: tuple[tuple[float, ...], ...] = ()
    predicted: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """A model's shape, and the bytes of its weights and of its cache as a runner keeps them."""

    shape: ModelShape
    precision: Precision

    @classmethod
    def of(cls, shape: ModelShape, *, weight_bytes: float, kv_bytes: float) -> "ModelWork":
        """Return the work of a model by the bytes of all weights that forwards read, and of a position in the cache."""
        each = weight_bytes / (shape.dense_weights + shape.expert_weights + shape.output_weights)
        kept = shape.kept_per_position
        # Activations, logits and rows of tables are not counted: they are small, and most of them stay in the caches.
        nothing = dict.fromkeys(("tables", "activations", "logits"), 0.0)
        return cls(
            shape=shape, precision=Precision(weights=each, output=each, kv=kv_bytes / kept if kept else 0.0, **nothing)
        )

    @classmethod
    def of_runner(cls, runner: ModelRunner | None) -> "ModelWork | None":
        """Return the work of a runner's model; None without one, or if its shape is not known."""
        shape = None if runner is None else shape_of(runner.model)
        if shape is None or runner is None:
            return None
        return cls.of(shape, weight_bytes=runner.weight_bytes(), kv_bytes=runner.bytes_per_token)

    def rows(self, **sizes: Any) -> StepWork:
        """Return the work of rows, one by one, with all weights for each; sizes as in ``step_work``."""
        return step_work(self.shape, self.precision, **{"batch": 1, **sizes})

    def weights(self, tokens: Numbers) -> float:
        """Return the bytes of weights that forwards of so many tokens read; of experts, those that are chosen."""
        return float(np.sum(weights_read(self.shape, self.precision, tokens, 1) * np.ones(len(tokens))))


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Works out the accounts of one method's calls, by the work of target and drafter, where it is known.

    ``at_once``: one forward of the drafting model drafts everything; ``chunk``: the largest piece of a prompt.
    """

    target: ModelWork | None
    drafter: ModelWork | None = None
    at_once: bool = False
    chunk: int = 512
    costs: CalibratedRounds | None = None

    @classmethod
    def of(cls, engine: Engine, *, speculate: bool, costs: CalibratedRounds | None = None) -> "Accountant":
        """Return the accountant of an engine that drafts or does not; costs of another drafter predict nothing."""
        drafter = without_policy(engine.drafter) if speculate else None
        if costs is not None and drafter is not None and costs.conditions.drafter != drafter_name(drafter):
            costs = None
        models = () if drafter is None or engine.session is None else engine.session.models
        return cls(
            target=ModelWork.of_runner(engine.runner),
            drafter=ModelWork.of_runner(next((model for model in models if isinstance(model, ModelRunner)), None)),
            at_once=drafter is not None and drafter.describe().at_once,
            chunk=engine.prefill_chunk,
            costs=costs,
        )

    def of_call(self, completions: Sequence[Completion]) -> Account:
        """Return the account of what a call returned, whose requests ran together from its beginning."""
        rounds = _Rounds(completions)
        if not rounds.seconds:
            return Account()
        prompts = [len(done.prompt_ids) - 1 for done in completions]
        work, predicted = self._work(rounds) | self._prefill_work(prompts), ()
        if self.costs is not None:
            each, totals = _predict(self.costs, rounds)
            work |= totals
            with suppress(ValueError):  # some of it is outside of what was calibrated
                work["predicted_prefill"] = self.costs.prompts_seconds(prompts, self.chunk)
                work["measured_prefill"] = sum(stages.get("prefill", 0.0) for stages in rounds.seconds)
            predicted = tuple(tuple(each[number] for number in row) for row in rounds.numbers)
        measured = np.sum(list(rounds.stages.values()), axis=0)
        seconds = tuple(tuple(float(measured[number]) for number in row) for row in rounds.numbers)
        return Account(work=work, seconds=seconds, predicted=predicted)

    def _work(self, rounds: "_Rounds") -> dict[str, float]:
        nodes, committed, context, depth = rounds.nodes + 1, rounds.committed, rounds.context, rounds.depth
        work = {"verified": float(nodes.sum()), "committed": float(committed.sum())}
        if (target := self.target) is not None:
            verify = target.rows(context=context, drafted=rounds.nodes, depth=np.minimum(depth, rounds.nodes))
            work["verify_forwards"] = float(len(rounds.seconds))
            work["verify_bytes"] = target.weights(rounds.per_round(nodes)) + float(np.sum(verify.attention.bytes))
            work["verify_flops"] = float(np.sum(verify.total.flops))
            work["useful_flops"] = float(np.sum(target.rows(batch=committed, context=context).total.flops))
        if (own := self.drafter) is not None:
            forwards = np.minimum(depth, 1) if self.at_once else depth
            # What must be done at least: every forward reads the weights once for all rows, and one token per row.
            most = rounds.most_per_round(forwards).sum()
            read = own.rows(batch=forwards, context=context).kv_read_bytes
            work["draft_forwards"] = float(most)
            work["draft_bytes"] = own.weights(np.ones(1)) * float(most) + float(np.sum(read))
            work["draft_flops"] = float(np.sum(own.rows(batch=depth, context=context + depth / 2).total.flops))
        return work

    def _prefill_work(self, prompts: Sequence[int]) -> dict[str, float]:
        target, forwards = self.target, -(-max(prompts, default=0) // self.chunk)
        if target is None or not forwards:
            return {}
        work = prompts_work(target.shape, target.precision, prompts, self.chunk).total
        return {"prefill_forwards": float(forwards), "prefill_bytes": work.bytes, "prefill_flops": work.flops}


def _predict(costs: CalibratedRounds, rounds: "_Rounds") -> tuple[list[float | None], dict[str, float]]:
    """Return the predicted seconds of every round, and the totals by stage of those that were predicted."""
    rows, width, depth = rounds.rows, rounds.most_per_round(rounds.nodes), rounds.most_per_round(rounds.depth)
    context, box, stages = rounds.per_round(rounds.context) / np.maximum(rows, 1), costs.box, rounds.stages
    ends = (rows, box.batch), (width, box.drafted), (context, box.context)
    inside = np.all([(least <= size) & (size <= most) for size, (least, most) in ends], axis=0)
    size: Any = {"levels": depth, "tokens": rows * width, "positions": rows * context}
    drafting = 0.0 if costs.drafting is None else costs.drafting.seconds(**size)
    predicted = {
        "draft": np.where(width > 0, drafting, 0.0),
        "verify": costs.target.seconds(StepSize.of(rows=rows, queries=width + 1, context=context)),
        "judge": costs.judging.seconds(**size),
    }
    measured = {"draft": stages["draft"], "verify": stages["verify"], "judge": stages["accept"] + stages["commit"]}
    totals = {"unpredicted_rounds": float((~inside).sum())} if not inside.all() else {}
    if inside.any():
        totals["predicted_rounds"] = float(inside.sum())
        for kind, parts in (("predicted", predicted), ("measured", measured)):
            totals |= {f"{kind}_{name}": float(seconds[inside].sum()) for name, seconds in parts.items()}
    whole = np.sum(list(predicted.values()), axis=0)
    return [float(seconds) if known else None for seconds, known in zip(whole, inside, strict=True)], totals


class _Rounds:
    """The rounds of requests that ran together, whose rows share one mapping of seconds in a round.

    Arrays have an entry per request and round: positions in the row's cache before it, drafted nodes that were
    verified, their depth, and the tokens that became final.

    Attributes:
        numbers: For every request, the numbers of its rounds.
        seconds: The stages of every round.
        stages: The seconds of every stage, by round.
    """

    def __init__(self, completions: Sequence[Completion]):
        known: dict[int, int] = {}
        self.seconds: list[Mapping[str, float]] = []
        self.numbers: list[list[int]] = []
        entries: list[tuple[int, int, int, int, int]] = []
        for done in completions:
            context, own = len(done.prompt_ids) - 1, []
            for step in done.steps:
                number = known.setdefault(id(step.seconds), len(known))
                if number == len(self.seconds):
                    self.seconds.append(step.seconds)
                decided = step.error is None and step.finish_reason != "error"
                emitted = step.accepted + 1 if decided else 0
                entries.append((number, context, step.proposed_nodes, step.proposed_depth, emitted))
                context += emitted
                own += [number] if decided else []
            self.numbers.append(own)
        columns = np.array(entries, dtype=np.int64).reshape(-1, 5).T
        self._number, self.context, self.nodes, self.depth, self.committed = columns
        self.stages = {stage: np.array([each.get(stage, 0.0) for each in self.seconds]) for stage in STAGES}

    @property
    def rows(self) -> Numbers:
        return np.bincount(self._number, minlength=len(self.seconds))

    def per_round(self, values: Numbers) -> Numbers:
        return np.bincount(self._number, weights=values, minlength=len(self.seconds))

    def most_per_round(self, values: Numbers) -> Numbers:
        most = np.zeros(len(self.seconds), dtype=np.int64)
        np.maximum.at(most, self._number, values)
        return most
