"""The work of a call of the engine, and the time that it should have taken: computed after the call, from its steps.

Nothing of this runs while the engine does. A step says how many nodes were verified and accepted, and how long the
stages of its round took; the rest is arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.measuring.conditions import drafter_name, shape_of, without_policy
from experiments.measuring.round_costs import STAGES
from specdec.engine.engine import Engine
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import StepSize
from specdec.physics.shape import Attention, ModelShape
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
        predicted: For every request, the predicted seconds of each round; None where costs say nothing. Empty
            without costs.
    """

    work: Mapping[str, float] = field(default_factory=dict)
    seconds: tuple[tuple[float, ...], ...] = ()
    predicted: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """The bytes and operations of a model's forwards, for sums over many of them.

    Attributes:
        weight_bytes: Weights that a forward reads (with a mixture of experts: all of them).
        kv_bytes: Keys and values per position that a layer without a window sees.
    """

    shape: ModelShape
    weight_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, runner: ModelRunner | None) -> "ModelWork | None":
        """Return the work of a runner's model; None without one, or if its shape is not known."""
        shape = None if runner is None else shape_of(runner.model)
        if runner is None or shape is None:
            return None
        return cls(shape=shape, weight_bytes=float(runner.weight_bytes()), kv_bytes=float(runner.bytes_per_token))

    @property
    def every_weight(self) -> float:
        """The number of weights in all matrices that forwards read."""
        return float(self.shape.dense_weights + self.shape.expert_weights + self.shape.output_weights)

    def weights_of(self, tokens: Numbers) -> float:
        """Return the bytes of weights that forwards of so many tokens read; of experts, those that are chosen."""
        left_out = 0.0
        if self.shape.is_mixture:
            left_out = sum(self.shape.expert_weights - self.shape.experts_read(count) for count in tokens.tolist())
        return self.weight_bytes * (len(tokens) - left_out / self.every_weight)

    def kv_of(self, context: Numbers) -> Numbers:
        """Return the bytes of keys and values that rows behind so many positions read."""
        kept = self.shape.kept_per_position
        return self._attending(context, lambda part: part.kept) * (self.kv_bytes / kept if kept else 0.0)

    def flops_of(self, tokens: Numbers, visible: Numbers) -> float:
        """Return the operations of so many tokens, logits included, each of which sees so many positions."""
        products = 2.0 * (self.shape.active_weights + self.shape.output_weights)
        return float(products * tokens.sum() + (tokens * self._attending(visible, lambda part: part.pair_flops)).sum())

    def prefill_flops(self, tokens: Numbers, visible: Numbers) -> float:
        """Return the operations of so many tokens of prompts, each of which sees so many positions, without logits."""
        pairs = self._attending(visible, lambda part: part.prefill_pair_flops)
        return float(2.0 * self.shape.active_weights * tokens.sum() + (tokens * pairs).sum())

    def _attending(self, positions: Numbers, each: Callable[[Attention], float]) -> Numbers:
        """Return sums over all layers of a number per position, of the positions within their windows."""
        parts = [(count, part) for layer, count in self.shape.groups for part in layer.attending]
        found = [count * each(part) * np.minimum(positions, part.window or np.inf) for count, part in parts]
        return np.sum(found, axis=0) if found else np.zeros(len(positions))


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Works out the accounts of one method's calls.

    Attributes:
        target: The target's work; None if it is not known.
        drafter: The drafting model's; None where none drafts, or nothing is known of it.
        at_once: Whether one forward of the drafting model drafts everything.
        chunk: The largest piece of a prompt.
        costs: Calibrated costs; None for no predictions.
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
            target=ModelWork.of(engine.runner),
            drafter=ModelWork.of(next((model for model in models if isinstance(model, ModelRunner)), None)),
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
            prefill = _prefill_seconds(self.costs, prompts, self.chunk)
            if prefill is not None:
                work["predicted_prefill"] = prefill
                work["measured_prefill"] = sum(stages.get("prefill", 0.0) for stages in rounds.seconds)
            predicted = tuple(tuple(each[number] for number in row) for row in rounds.numbers)
        measured = np.sum(list(rounds.stages.values()), axis=0)
        seconds = tuple(tuple(float(measured[number]) for number in row) for row in rounds.numbers)
        return Account(work=work, seconds=seconds, predicted=predicted)

    def _work(self, rounds: "_Rounds") -> dict[str, float]:
        nodes, committed, context, depth = rounds.nodes + 1, rounds.committed, rounds.context, rounds.depth
        work = {"verified": float(nodes.sum()), "committed": float(committed.sum())}
        if (target := self.target) is not None:
            visible = context + 1 + np.minimum(depth, rounds.nodes) / 2
            moved = target.kv_of(context).sum() + target.kv_bytes * nodes.sum()
            work["verify_forwards"] = float(len(rounds.seconds))
            work["verify_bytes"] = float(target.weights_of(rounds.per_round(nodes)) + moved)
            work["verify_flops"] = target.flops_of(nodes, visible)
            work["useful_flops"] = target.flops_of(committed, context + 1)
        if (own := self.drafter) is not None:
            forwards = np.minimum(depth, 1) if self.at_once else depth
            # What must be done at least: every forward reads the weights once for all rows, and one token per row.
            most = rounds.most_per_round(forwards).sum()
            work["draft_forwards"] = float(most)
            work["draft_bytes"] = float(own.weight_bytes * most + (forwards * own.kv_of(context)).sum())
            work["draft_flops"] = own.flops_of(depth, context + 1 + depth / 2)
        return work

    def _prefill_work(self, prompts: Sequence[int]) -> dict[str, float]:
        pieces, target = list(_pieces(prompts, self.chunk)), self.target
        if target is None or not pieces:
            return {}
        tokens = np.concatenate([counts for counts, _ in pieces])
        starts = np.concatenate([np.full(len(counts), start) for counts, start in pieces])
        # Logits are not computed, so that the output layer is not read.
        read = 1 - target.shape.output_weights / target.every_weight
        weights = target.weights_of(np.array([counts.sum() for counts, _ in pieces])) * read
        return {
            "prefill_forwards": float(len(pieces)),
            "prefill_bytes": float(weights + target.kv_of(starts).sum() + target.kv_bytes * tokens.sum()),
            "prefill_flops": target.prefill_flops(tokens, starts + (tokens + 1) / 2),
        }


def _predict(costs: CalibratedRounds, rounds: "_Rounds") -> tuple[list[float | None], dict[str, float]]:
    """Return the predicted seconds of every round, and the totals by stage of those that were predicted."""
    rows, widths, depths = rounds.rows, rounds.most_per_round(rounds.nodes), rounds.most_per_round(rounds.depth)
    contexts = rounds.per_round(rounds.context) / np.maximum(rows, 1)
    box, stages = costs.box, rounds.stages
    measured = {"draft": stages["draft"], "verify": stages["verify"], "judge": stages["accept"] + stages["commit"]}
    predicted: list[float | None] = []
    totals: dict[str, float] = {}
    sizes = zip(rows.tolist(), widths.tolist(), depths.tolist(), contexts.tolist(), strict=True)
    for number, (row, width, depth, context) in enumerate(sizes):
        ends = (row, box.batch), (width, box.drafted), (context, box.context)
        if not all(least <= size <= most for size, (least, most) in ends):
            predicted.append(None)
            totals["unpredicted_rounds"] = totals.get("unpredicted_rounds", 0.0) + 1
            continue
        size = {"levels": depth, "tokens": row * width, "positions": row * context}
        parts = {
            "draft": costs.drafting.seconds(**size) if costs.drafting is not None and width else 0.0,
            "verify": costs.target.seconds(StepSize.of(rows=row, queries=width + 1, context=context)),
            "judge": costs.judging.seconds(**size),
        }
        more = {f"predicted_{name}": value for name, value in parts.items()}
        more |= {f"measured_{name}": float(each[number]) for name, each in measured.items()}
        for name, value in {**more, "predicted_rounds": 1.0}.items():
            totals[name] = totals.get(name, 0.0) + value
        predicted.append(sum(parts.values()))
    return predicted, totals


def _pieces(lengths: Sequence[int], chunk: int) -> Iterator[tuple[Numbers, int]]:
    """Yield the prefill's forwards: the tokens of each row, and where they begin."""
    for start in range(0, max(lengths, default=0), chunk):
        yield np.array([min(chunk, length - start) for length in lengths if length > start]), start


def _prefill_seconds(costs: CalibratedRounds, lengths: Sequence[int], chunk: int) -> float | None:
    """Return the predicted seconds of a batch's prefill; None if some of it is outside of the box."""
    if costs.prefill is None:
        return None
    total, (least, most) = 0.0, costs.box.chunk
    for counts, start in _pieces(lengths, chunk):
        if not least <= len(counts) * counts.max() <= most or start > costs.box.context[1]:
            return None
        total += costs.prefill.seconds(StepSize.of(rows=len(counts), queries=float(counts.max()), context=start))
    return total


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
        """The number of rows of every round."""
        return np.bincount(self._number, minlength=len(self.seconds))

    def per_round(self, values: Numbers) -> Numbers:
        """Return sums over the rows of every round."""
        return np.bincount(self._number, weights=values, minlength=len(self.seconds))

    def most_per_round(self, values: Numbers) -> Numbers:
        """Return the largest value of every round's rows."""
        most = np.zeros(len(self.seconds), dtype=np.int64)
        np.maximum.at(most, self._number, values)
        return most
