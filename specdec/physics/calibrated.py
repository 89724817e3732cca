"""Costs of rounds that were fitted to measurements, as a file: with what was measured, where, and how well it fits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from jaxtyping import Shaped

from specdec.drafting.costs import KIND, Conditions, RoundCosts
from specdec.physics.costs import Errors, PartCost, Sizes, StepCost, StepSize
from specdec.physics.rounds import round_seconds


@dataclass(frozen=True, kw_only=True)
class Box:
    """The smallest and the largest sizes that costs were measured for; outside of them nothing is known."""

    batch: tuple[int, int]
    context: tuple[int, int]
    drafted: tuple[int, int]
    chunk: tuple[int, int] = (1, 1)

    def check(self, **sizes: float) -> None:
        for name, size in sizes.items():
            least, most = getattr(self, name)
            if not least <= size <= most:
                raise ValueError(
                    f"{name} {size:g} is outside of what was measured ({least} to {most}), where fitted costs say "
                    f"nothing: calibrate with a larger grid, or ask for a size inside"
                )


@dataclass(frozen=True, kw_only=True)
class CalibratedRounds:
    """Rounds by constants that were fitted to measured ones, as a ``RoundCost`` and as ``RaggedCosts``.

    Attributes:
        host: Seconds of a round that no stage has.
        depths: Numbers of drafted nodes and how deep such drafts are; empty where every node is a level, as in a chain.
        deepest: The deepest drafts whose drafting was measured; 0 where no drafter was.
        errors: Of every part, at the points that it was fitted to (``fit``) and at others (``held_out``).
        measured: Every measured forward: batch, context, drafted, seconds, predicted seconds, whether it was held out.
    """

    padded = True  # drafts of one size were measured, to which the engine pads the others
    conditions: Conditions
    box: Box
    target: StepCost
    prefill: StepCost | None = None
    drafting: PartCost | None = None
    judging: PartCost = field(default_factory=lambda: PartCost(fixed=0.0))
    host: float = 0.0
    depths: tuple[tuple[int, int], ...] = ()
    deepest: int = 0
    errors: Mapping[str, Mapping[str, Errors]] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    measured: tuple[tuple[float, ...], ...] = ()
    note: str = ""

    @property
    def joined(self) -> float:
        """Seconds that a piece of a prompt saves where it shares its round's pass over the weights: on CPUs."""
        pass_over = self.prefill_seconds(StepSize.of(rows=0, queries=0, context=0))
        return pass_over if self.conditions.executor == "ReplayExecutor" else 0.0

    # ---------------------------------------------------------------- as RoundCost

    def verify(self, *, batch: int, drafted: int, context: float) -> float:
        self.box.check(batch=batch, context=context, drafted=drafted)
        return self.target.seconds(StepSize.of(rows=batch, queries=drafted + 1, context=context))

    def draft(self, *, batch: int, drafted: int, context: float, depth: float | None = None) -> float:
        """Return the seconds that a draft adds: drafting, and deciding. ``depth`` None is that of trees of this size.

        Raises ValueError: the size is outside of the box, or such deep drafts were not measured.
        """
        self.box.check(batch=batch, context=context, drafted=drafted)
        if not drafted:
            return 0.0
        nodes, depths = self._trees
        levels = float(np.interp(drafted, nodes, depths)) if depth is None else depth
        self.check_depth(levels)
        size = {"levels": levels, "tokens": batch * drafted, "positions": batch * context}
        drafting = 0.0 if self.drafting is None else self.drafting.seconds(**size)
        return drafting + self.judging.seconds(**size) - self.judging.fixed

    @property
    def outside(self) -> float:
        """Seconds of everything else in a round, whether or not it drafts."""
        return self.judging.fixed + self.host

    def prefill_seconds(self, size: StepSize) -> float:
        """Return the seconds of a forward over pieces of prompts, also outside of the box."""
        return (self.prefill or self.target).seconds(size)

    def prompts_seconds(self, lengths: Sequence[int], chunk: int) -> float:
        """Return the seconds of a batch's prompts, chunk by chunk.

        Pieces of prompts are measured in one row, so that those of several rows count as one piece that is as long.

        Raises ValueError: no prompts were measured, or a piece is outside of the box.
        """
        if self.prefill is None:
            raise ValueError("no prompts were measured: calibrate with grid.chunk")
        total = 0.0
        for start in range(0, max(lengths, default=0), chunk):
            pieces = [min(chunk, length - start) for length in lengths if length > start]
            # Prompts are also measured behind nothing.
            self.box.check(chunk=len(pieces) * max(pieces), context=max(start, self.box.context[0]))
            total += self.prefill.seconds(StepSize.of(rows=len(pieces), queries=max(pieces), context=start))
        return total

    @cached_property
    def _trees(self) -> tuple[Sequence[int], Sequence[int]]:
        """Numbers of nodes and the depths of such drafts, between which others lie on lines."""
        nodes, depths = zip((0, 0), *(self.depths or [(1 << 30, 1 << 30)]), strict=True)
        return nodes, depths

    # ---------------------------------------------------------------- as RaggedCosts

    def check_depth(self, depth: float) -> None:
        """Refuse deeper drafts than were measured."""
        if depth > self.deepest:
            raise ValueError(
                f"the costs of rounds were calibrated to depth {self.deepest}, and drafts are {depth:g} deep: "
                f"calibrate with this drafter"
            )

    def ragged(self, rows: int, positions: float, *, drafted: Sizes, deepest: Shaped[np.ndarray, "*#size"]) -> Sizes:
        """Return the seconds of rounds by their deepest drafts, also outside of the box; see ``RaggedCosts``."""
        nodes, depths = self._trees
        nodes = np.interp(deepest, depths, nodes)
        size = {"levels": deepest, "tokens": rows * nodes, "positions": positions}
        drafting = self.judging.seconds(**size)
        if self.drafting is not None:
            drafting = drafting + np.where(deepest > 0, self.drafting.seconds(**size), 0.0)
        forward = self.target.seconds(StepSize.of(rows=rows, queries=nodes + 1, context=positions / rows))
        return forward + drafting + self.host

    # ---------------------------------------------------------------- as tables of rounds

    def rounds(self, *, by_nodes: bool = False) -> RoundCosts:
        """Return the costs of whole rounds in the middle of the calibrated contexts, as policies look them up.

        ``by_nodes``: by the number of nodes that are verified of a whole drafted tree; else by depth.
        """
        self._check_drafter()
        (least, most), drafted, at = self.box.batch, self.box.drafted[1], {"context": sum(self.box.context) / 2}
        rows = sorted({least, most, *(2**power for power in range(12) if least <= 2**power <= most)})
        tree_nodes, tree_depths = self._trees
        depths = range(self.deepest + 1)
        sizes = [(round(float(np.interp(depth, tree_depths, tree_nodes))), depth) for depth in depths]
        largest, nodes = min(sizes[-1][0], drafted), None
        if by_nodes:
            nodes = tuple(sorted({*range(min(4, largest) + 1), *range(0, largest, 4), largest}))
            whole = {row: self.draft(batch=row, drafted=largest, **at) + self.outside for row in rows}
            table = [[self.verify(batch=row, drafted=node, **at) + whole[row] for node in nodes] for row in rows]
        else:
            known = [size for size in sizes if size[0] <= drafted]
            table = [[round_seconds(self, batch=row, drafted=n, depth=d, **at) for n, d in known] for row in rows]
        return RoundCosts(rows=tuple(rows), table=tuple(map(tuple, table)), nodes=nodes, **self._facts)

    def of_tree(self, nodes: int, depth: int, *, rows: int) -> float:
        """Return the seconds of a round by nodes and depth of its trees, in the middle context; inf if not measured."""
        self._check_drafter()
        if nodes > self.box.drafted[1] or depth > self.deepest:
            return float("inf")
        return float(round_seconds(self, batch=rows, drafted=nodes, depth=depth, context=sum(self.box.context) / 2))

    @property
    def _facts(self) -> dict[str, Any]:
        here = self.conditions
        same = {"device": here.device, "dtype": here.dtype, "threads": here.threads, "conditions": here}
        return {**same, "target": here.model, "drafter": here.drafter or ""}

    def _check_drafter(self) -> None:
        if not self.deepest:
            raise ValueError("these calibrated costs have no drafter's: calibrate with the drafter")

    # ---------------------------------------------------------------- as a file

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with the tables that policies read (``RoundCosts.load``) if a drafter was calibrated."""
        tables = {name: asdict(self.rounds(by_nodes=name == "nodes")) for name in ("depth", "nodes") if self.deepest}
        text = json.dumps({"kind": KIND, **asdict(self), "tables": tables}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CalibratedRounds":
        """Return what ``save`` has written. Raises ValueError: the file cannot be read, or is something else."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.pop("kind", None) != KIND:
                raise ValueError("it is of another kind")
            found.pop("tables", None)
            return _read(cls, found)
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no calibrated costs ({' '.join(str(error).split())}): give a file that "
                f"plan costs=fit wrote"
            ) from error


def is_calibrated(path: str | Path) -> bool:
    """Whether a file says that it holds calibrated costs."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))["kind"] == KIND
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _read(kind: Any, value: Any) -> Any:
    """A value of a file in the type that its field has; a field that this version does not know is a TypeError."""
    parts = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints.get(name), each) for name, each in value.items()})  # pyright: ignore[reportCallIssue]
    if value is None or not parts:
        return value
    if get_origin(kind) is tuple:
        return tuple(_read(parts[0], each) for each in value)
    if get_origin(kind) is Mapping:
        return {name: _read(parts[1], each) for name, each in value.items()}
    return _read(parts[0], value)
