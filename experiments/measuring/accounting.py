"""The work of a call of the engine, and the time that it should have taken: computed after the call, from its steps.

Nothing of this runs while the engine does. A step says how many nodes were verified and accepted, and how long the
stages of its round took; the rest is arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drafters.block import BlockDrafter
from experiments.measuring.conditions import drafter_name, shape_of
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.shape import Attention, ModelShape
from specdec.physics.step_cost import StepSize
from specdec.target.runner import ModelRunner
from specdec.types import Completion

STAGES = ("draft", "verify", "accept", "commit")
"""The stages of a round."""


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
        shape: The model.
        weight_bytes: Weights that a forward reads (with a mixture of experts: all of them).
        kv_bytes: Keys and values per position that a layer without a window sees.
    """

    shape: ModelShape
    weight_bytes: float
    kv_bytes: float

    @classmethod
    def of(cls, runner: ModelRunner) -> "ModelWork | None":
        """Returns the work of a runner's model; None if its shape is not known."""
        shape = shape_of(runner.model)
        if shape is None:
            return None
        return cls(shape=shape, weight_bytes=float(runner.weight_bytes(1)), kv_bytes=float(runner.bytes_per_token))

    @property
    def every_weight(self) -> float:
        """Numbers in all matrices that forwards read, the output layer's included."""
        return float(self.shape.layer_weights + self.shape.other_weights + self.shape.output_weights)

    def weights_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the bytes of weights that forwards of so many tokens read; of experts, those that are chosen."""
        left_out = [
            self.shape.expert_weights - self.shape.experts_read(count) if self.shape.is_mixture else 0.0
            for count in tokens.tolist()
        ]
        return self.weight_bytes * (1 - np.array(left_out) / self.every_weight)

    def kv_of(self, context: np.ndarray) -> np.ndarray:
        """Returns the bytes of keys and values that rows behind so many positions read."""
        kept = self.shape.kept_per_position
        return self._attending(context, lambda part: part.kept) * (self.kv_bytes / kept if kept else 0.0)

    def attention_of(self, queries: np.ndarray, visible: np.ndarray, *, prefill: bool = False) -> np.ndarray:
        """Returns the operations of attention for so many queries, each of which sees so many positions."""
        return queries * self._attending(visible, lambda part: part.prefill_pair_flops if prefill else part.pair_flops)

    def _attending(self, positions: np.ndarray, each: Callable[[Attention], float]) -> np.ndarray:
        """Returns sums over all layers of a number per position, of the positions within their windows."""
        parts = [(count, part) for layer, count in self.shape.groups for part in layer.attending]
        ends = [np.inf if part.window is None else part.window for _, part in parts]
        found = [
            count * each(part) * np.minimum(positions, end) for (count, part), end in zip(parts, ends, strict=True)
        ]
        return np.sum(found, axis=0) if found else np.zeros(len(positions))

    @property
    def token_flops(self) -> float:
        """Operations per token in products with weights, logits included."""
        return 2.0 * (self.shape.active_weights + self.shape.output_weights)


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
        """Returns the accountant of an engine.

        Args:
            engine: The engine.
            speculate: Whether it drafts.
            costs: Calibrated costs. With another drafter than theirs, nothing is predicted.
        """
        drafter = _inner(engine.drafter) if speculate else None
        if costs is not None and drafter is not None and costs.conditions.drafter != drafter_name(drafter):
            costs = None  # nothing is known of what this one takes
        models = () if drafter is None or engine.session is None else engine.session.models
        runner = next((model for model in models if isinstance(model, ModelRunner)), None)
        return cls(
            target=ModelWork.of(engine.runner),
            drafter=None if runner is None else ModelWork.of(runner),
            at_once=isinstance(drafter, BlockDrafter),
            chunk=engine.prefill_chunk,
            costs=costs,
        )

    def of_call(self, completions: Sequence[Completion]) -> Account:
        """Returns the account of a call, whose requests ran together from its beginning.

        Args:
            completions: What it returned, one per request.
        """
        rounds = _Rounds.of(completions)
        if not rounds.seconds:
            return Account()
        work = self._work(rounds, completions)
        times = rounds.seconds_by_stage()
        measured = np.sum([times[stage] for stage in STAGES], axis=0)
        seconds = tuple(tuple(float(measured[number]) for number in row) for row in rounds.numbers)
        if self.costs is None:
            return Account(work=work, seconds=seconds)
        predicted, more = self._predict(self.costs, rounds, times, completions)
        return Account(
            work={**work, **more},
            seconds=seconds,
            predicted=tuple(tuple(predicted[number] for number in row) for row in rounds.numbers),
        )

    def _work(self, rounds: "_Rounds", completions: Sequence[Completion]) -> dict[str, float]:
        nodes, committed = rounds.nodes + 1, rounds.committed
        work = {"verified": float(nodes.sum()), "committed": float(committed.sum())}
        target = self.target
        if target is not None:
            visible = rounds.context + 1 + np.minimum(rounds.depth, rounds.nodes) / 2
            tokens = rounds.per_round(nodes)
            work["verify_forwards"] = float(len(rounds.seconds))
            moved = target.kv_of(rounds.context).sum() + target.kv_bytes * nodes.sum()
            work["verify_bytes"] = float(target.weights_of(tokens).sum() + moved)
            work["verify_flops"] = float(target.token_flops * nodes.sum() + target.attention_of(nodes, visible).sum())
            useful = target.token_flops * committed.sum() + target.attention_of(committed, rounds.context + 1).sum()
            work["useful_flops"] = float(useful)
            work |= self._prefill_work(target, completions)
        if self.drafter is not None:
            own, depth = self.drafter, rounds.depth
            forwards = np.minimum(depth, 1) if self.at_once else depth
            # What must be done at least: every forward reads the weights once for all rows, and one token per row.
            most = rounds.most_per_round(forwards)
            work["draft_forwards"] = float(most.sum())
            work["draft_bytes"] = float(own.weight_bytes * most.sum() + (forwards * own.kv_of(rounds.context)).sum())
            tokens = depth.sum()
            work["draft_flops"] = float(
                own.token_flops * tokens + own.attention_of(depth, rounds.context + 1 + depth / 2).sum()
            )
        return work

    def _prefill_work(self, target: ModelWork, completions: Sequence[Completion]) -> dict[str, float]:
        lengths = np.array([len(done.prompt_ids) - 1 for done in completions])
        pieces = list(_pieces(lengths.tolist(), self.chunk))
        if not pieces:
            return {}
        starts = np.array([start for _, start, _ in pieces], dtype=float)
        rows = np.array([len(counts) for counts, _, _ in pieces], dtype=float)
        tokens = np.array([sum(counts) for counts, _, _ in pieces], dtype=float)
        flops = 2.0 * target.shape.active_weights * tokens.sum()
        for counts, start, _ in pieces:
            each = np.array(counts, dtype=float)
            flops += target.attention_of(each, start + (each + 1) / 2, prefill=True).sum()
        # Logits are not computed, so that the output layer is not read.
        share = target.shape.output_weights / target.every_weight
        weights = target.weights_of(tokens).sum() * (1 - share)
        moved = (rows * target.kv_of(starts)).sum() + target.kv_bytes * tokens.sum()
        return {
            "prefill_forwards": float(len(pieces)),
            "prefill_bytes": float(weights + moved),
            "prefill_flops": float(flops),
        }

    def _predict(
        self,
        costs: CalibratedRounds,
        rounds: "_Rounds",
        times: Mapping[str, np.ndarray],
        completions: Sequence[Completion],
    ) -> tuple[list[float | None], dict[str, float]]:
        """Returns the predicted seconds of every round, and the totals by stage of those that were predicted."""
        rows, widths, depths = rounds.rows, rounds.most_per_round(rounds.nodes), rounds.most_per_round(rounds.depth)
        contexts = rounds.per_round(rounds.context) / np.maximum(rows, 1)
        predicted: list[float | None] = []
        totals: dict[str, float] = {}

        def add(name: str, value: float) -> None:
            totals[name] = totals.get(name, 0.0) + value

        for number, (row, width, depth, context) in enumerate(
            zip(rows.tolist(), widths.tolist(), depths.tolist(), contexts.tolist(), strict=True)
        ):
            if not _inside(costs, row, width, context):
                predicted.append(None)
                add("unpredicted_rounds", 1)
                continue
            size = {"levels": depth, "tokens": row * width, "positions": row * context}
            parts = {
                "draft": costs.drafting.seconds(**size) if costs.drafting is not None and width else 0.0,
                "verify": costs.target.seconds(StepSize.of(rows=row, queries=width + 1, context=context)),
                "judge": costs.judging.seconds(**size),
            }
            taken = {
                "draft": float(times["draft"][number]),
                "verify": float(times["verify"][number]),
                "judge": float(times["accept"][number] + times["commit"][number]),
            }
            for name, value in parts.items():
                add(f"predicted_{name}", value)
                add(f"measured_{name}", taken[name])
            add("predicted_rounds", 1)
            predicted.append(sum(parts.values()))
        prefill = _prefill_seconds(costs, [len(done.prompt_ids) - 1 for done in completions], self.chunk)
        if prefill is not None:
            totals["predicted_prefill"] = prefill
            totals["measured_prefill"] = sum(each.get("prefill", 0.0) for each in rounds.seconds)
        return predicted, totals


@dataclass(frozen=True, eq=False)
class _Rounds:
    """The rounds of a call: one entry per request and round in the arrays, which ``number`` says the round of.

    Attributes:
        numbers: For every request, the numbers of its rounds.
        number: The round.
        context: Positions in the row's cache before it.
        nodes: Drafted nodes that were verified.
        depth: Their depth.
        committed: Tokens that became final.
        seconds: The stages of every round.
    """

    numbers: tuple[tuple[int, ...], ...]
    number: np.ndarray
    context: np.ndarray
    nodes: np.ndarray
    depth: np.ndarray
    committed: np.ndarray
    seconds: list[Mapping[str, float]]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "_Rounds":
        """Returns the rounds of requests that ran together: rows of one round share one mapping of seconds."""
        known: dict[int, int] = {}
        seconds: list[Mapping[str, float]] = []
        numbers: list[tuple[int, ...]] = []
        rows: list[tuple[int, int, int, int, int]] = []
        for done in completions:
            context, own = len(done.prompt_ids) - 1, []
            for step in done.steps:
                decided = step.error is None and step.finish_reason != "error"
                number = known.setdefault(id(step.seconds), len(known))
                if number == len(seconds):
                    seconds.append(step.seconds)
                emitted = step.accepted + 1 if decided else 0
                rows.append((number, context, step.proposed_nodes, step.proposed_depth, emitted))
                context += emitted
                if decided:
                    own.append(number)
            numbers.append(tuple(own))
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return cls(tuple(numbers), table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4], seconds)

    @property
    def rows(self) -> np.ndarray:
        """The number of rows of every round."""
        return np.bincount(self.number, minlength=len(self.seconds))

    def per_round(self, values: np.ndarray) -> np.ndarray:
        """Returns sums over the rows of every round."""
        return np.bincount(self.number, weights=values, minlength=len(self.seconds))

    def most_per_round(self, values: np.ndarray) -> np.ndarray:
        """Returns the largest value of every round's rows."""
        most = np.zeros(len(self.seconds), dtype=np.int64)
        np.maximum.at(most, self.number, values)
        return most

    def seconds_by_stage(self) -> dict[str, np.ndarray]:
        """Returns the seconds of the stages of every round."""
        return {stage: np.array([each.get(stage, 0.0) for each in self.seconds]) for stage in STAGES}


def _inner(drafter: Drafter | None) -> Drafter | None:
    """Returns the drafter beside a policy."""
    inner = getattr(drafter, "drafter", None)
    return inner if isinstance(inner, Drafter) else drafter


def _pieces(lengths: Sequence[int], chunk: int) -> "list[tuple[list[int], int, int]]":
    """Returns the prefill's forwards: the tokens of each row, where they begin, and the widest row."""
    found, start = [], 0
    while any(length > start for length in lengths):
        counts = [min(chunk, length - start) for length in lengths if length > start]
        found.append((counts, start, max(counts)))
        start += chunk
    return found


def _inside(costs: CalibratedRounds, rows: float, nodes: float, context: float) -> bool:
    box = costs.box
    sizes = ((rows, box.batch), (nodes, box.drafted), (context, box.context))
    return all(least <= size <= most for size, (least, most) in sizes)


def _prefill_seconds(costs: CalibratedRounds, lengths: Sequence[int], chunk: int) -> float | None:
    """Returns the predicted seconds of a batch's prefill; None if some of it is outside of the box."""
    if costs.prefill is None:
        return None
    total = 0.0
    for counts, start, widest in _pieces(lengths, chunk):
        if not costs.box.chunk[0] <= len(counts) * widest <= costs.box.chunk[1] or start > costs.box.context[1]:
            return None
        total += costs.prefill.seconds(StepSize.of(rows=len(counts), queries=widest, context=start))
    return total
