"""The work of a call of the engine: bytes and operations, computed from its steps after the call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas

from experiments.measuring.conditions import shape_of, without_policy
from experiments.results.metrics import decided
from specdec.engine.engine import Engine
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.physics.work import StepWork, prompts_work, step_work, weights_read
from specdec.target.runner import ModelRunner
from specdec.types import Completion


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
        return cls.of(shape, weight_bytes=runner.weights_read().bytes, kv_bytes=runner.cache.bytes_per_position)

    def rows(self, **sizes: Any) -> StepWork:
        """Return the work of rows, one by one, with all weights for each; sizes as in ``step_work``."""
        return step_work(self.shape, self.precision, **{"batch": 1, **sizes})

    def weights(self, tokens: np.ndarray) -> float:
        """Return the bytes of weights that forwards of so many tokens read; of experts, those that are chosen."""
        return float(np.sum(weights_read(self.shape, self.precision, tokens, 1) * np.ones(len(tokens))))


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Works out what one method's calls had to do, by the work of target and drafter, where it is known.

    ``at_once``: one forward of the drafting model drafts everything; ``chunk``: the largest piece of a prompt.
    """

    target: ModelWork | None
    drafter: ModelWork | None = None
    at_once: bool = False
    chunk: int = 512

    @classmethod
    def of(cls, engine: Engine, *, speculate: bool) -> "Accountant":
        """Return the accountant of an engine that drafts or does not."""
        drafter = without_policy(engine.drafter) if speculate else None
        models = () if drafter is None or engine.session is None else engine.session.models
        return cls(
            target=ModelWork.of_runner(engine.runner),
            drafter=ModelWork.of_runner(next((model for model in models if isinstance(model, ModelRunner)), None)),
            at_once=drafter is not None and drafter.describe().at_once,
            chunk=engine.prefill_chunk,
        )

    def of_call(self, completions: Sequence[Completion]) -> dict[str, float]:
        """Return the totals of a call that returned these, whose requests ran together from its beginning.

        They are bytes and operations of every stage, nodes that were verified and tokens that were committed. A stage
        about which nothing is known has no entry.
        """
        rounds = _rounds_of(completions)
        if rounds.empty:
            return {}
        number, context, drafted, depth, committed, shared = (rounds[name].to_numpy() for name in rounds)
        nodes, count = drafted + 1, int(number.max()) + 1
        work = {"verified": float(nodes.sum()), "committed": float(committed.sum())}
        if (target := self.target) is not None:
            own = shared == 0  # the others are the prefill's, which their first tokens hardly make longer
            verify = target.rows(context=context, drafted=drafted, depth=np.minimum(depth, drafted))
            several = np.bincount(number[own], weights=nodes[own], minlength=count)
            work["verify_forwards"] = float(np.sum(several > 0))
            work["verify_bytes"] = target.weights(several[several > 0]) + float(np.sum(verify.attention.bytes * own))
            work["verify_flops"] = float(np.sum(verify.total.flops * own))
            useful = target.rows(batch=committed, context=context).total
            work["useful_flops"] = float(np.sum(useful.flops * own))
        if (drafter := self.drafter) is not None:
            forwards = np.minimum(depth, 1) if self.at_once else depth
            # What must be done at least: every forward reads the weights once for all rows, and one token per row.
            most = np.zeros(count, dtype=np.int64)
            np.maximum.at(most, number, forwards)
            cached = drafter.rows(batch=forwards, context=context).kv_read_bytes
            work["draft_forwards"] = float(most.sum())
            work["draft_bytes"] = drafter.weights(np.ones(1)) * float(most.sum()) + float(np.sum(cached))
            work["draft_flops"] = float(np.sum(drafter.rows(batch=depth, context=context + depth / 2).total.flops))
        return work | self._prefill_work([len(done.prompt_ids) - 1 for done in completions])

    def _prefill_work(self, prompts: Sequence[int]) -> dict[str, float]:
        target, forwards = self.target, -(-max(prompts, default=0) // self.chunk)
        if target is None or not forwards:
            return {}
        work = prompts_work(target.shape, target.precision, prompts, self.chunk).total
        return {"prefill_forwards": float(forwards), "prefill_bytes": work.bytes, "prefill_flops": work.flops}


def _rounds_of(completions: Sequence[Completion]) -> pandas.DataFrame:
    """A row per round of requests that ran together; the rows of a batch share one mapping of seconds in a round.

    The round's ``number``, positions in the row's cache before it (``context``), drafted ``nodes`` that were verified,
    their ``depth``, the tokens that became final (``committed``), and whether a prompt ``shared`` the round's forward.
    """
    numbers: dict[int, int] = {}
    rows: list[tuple[int, ...]] = []
    for done in completions:
        context = len(done.prompt_ids) - 1
        for step in done.steps:
            number = numbers.setdefault(id(step.seconds), len(numbers))
            emitted = step.accepted + 1 if decided([step]) else 0
            shared = "prefill" in step.seconds and "verify" not in step.seconds
            rows.append((number, context, step.proposed_nodes, step.proposed_depth, emitted, shared))
            context += emitted
    return pandas.DataFrame(
        rows, columns=["number", "context", "nodes", "depth", "committed", "shared"], dtype=np.int64
    )
