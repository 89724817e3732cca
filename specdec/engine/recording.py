"""Records the stages of an engine's rounds and replays those that come often: on which device, of which rules."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from specdec.batch import Batch
from specdec.engine.slot_table import SlotTable
from specdec.execution.executor import autocast_of
from specdec.execution.recorder import CudaGraphRecorder, Recordings, TapeRecorder
from specdec.forward import ForwardBatch, ForwardOutput, bucket_of
from specdec.interfaces import Session, Verifier
from specdec.memory import ran_out
from specdec.placement import is_shared, is_spread, main_device
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree
from specdec.tree_parts import bucketed, settled

RECORD_AFTER = 8  # rounds of one kind before their stages are recorded
MOST_RECORDINGS = 256
_PER_SIZE = 16  # for a number of rows and of positions: all stages, plain or not, of requests of a few kinds
_WARM = 3  # rounds of a warm-up: one makes what is made once, one rehearses, and one is recorded
RECORDING = ("auto", "rounds", "decisions", "off")


def recorded_as(recording: str, model: PreTrainedModel, *, optimize: bool, invariant: bool) -> str:
    """Returns the kind of recording on a model's device (see ``Engine``).

    That is nothing for a model that is spread over devices (hooks move its weights) or shared by processes.
    """
    if recording not in RECORDING:
        raise ValueError(f"recording={recording!r}: give one of {', '.join(RECORDING)}")
    device = main_device(model).type
    if recording == "off" or not optimize or is_spread(model) or is_shared(model) or device not in ("cpu", "cuda"):
        return "off"
    # The invariant executor finds out the order of the keys on the host, forward by forward.
    return "decisions" if invariant or recording == "decisions" else "rounds"


def may_record(verifier: Verifier) -> bool:
    """Returns whether a rule's laws may be replayed without its Python: this project's may, others if they say so."""
    ours = type(verifier).__module__.partition(".")[0] in ("specdec", "verifiers")
    return ours if verifier.recordable is None else verifier.recordable


def traits(verifier: Verifier) -> Hashable:
    """Returns what a rule's laws may depend on besides tables: its attributes, which a user may change."""
    found: list[Hashable] = []
    for name, value in vars(verifier).items():
        simple = isinstance(value, (bool, int, float, str, type(None)))
        found.append((name, value if simple else id(value), traits(value) if isinstance(value, Verifier) else None))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RecordingCounts:
    """Counts of recordings and replays in an engine so far."""

    rounds: int  # that were played
    replayed: int  # rounds of which every stage that is recorded at all was replayed
    stages: int  # that were recorded, each for one kind of round
    replays: int  # stages that were replayed
    refused: dict[str, list[str]]  # why stages could not be recorded, by name: something failed, they run as they are
    by_design: dict[str, int]  # counts of rounds and stages that are not recorded on purpose, by reason

    @property
    def replayed_share(self) -> float | None:
        """Of all rounds; None before any was played."""
        return self.replayed / self.rounds if self.rounds else None


Beside = tuple[Sequence[ForwardBatch], Callable[[Sequence[ForwardOutput]], object]]
"""Forwards that share a round's pass over the weights, and what takes their outputs before the round is judged."""


@dataclass(eq=False)
class Stages:
    """Runs the stages of one round: recorded ones through their recordings, others as they are."""

    rows: Batch  # as stages see them; where whole rounds are recorded, tensors alone
    on_host: Batch  # the same rows with the host's numbers
    recordings: Recordings | None = None
    names: Set[str] = frozenset()  # of the stages that are recorded
    whole: bool = False  # those are among them that run models
    cast: Hashable = None  # what casts when a stage is recorded casts in its replays
    expected: int = 0  # replays of the engine so far, if all recorded stages that have run were replayed
    some: np.ndarray | None = None  # the rows that draft, if not all do
    beside: Beside | None = None  # go through the target with the round, which is verified as it is

    def __call__(self, name: str, key: Hashable, stage: Callable[..., Any], *inputs: Any) -> Any:
        """Return the result of a stage of these inputs; ``key`` is all else that it depends on."""
        if self.recordings is None or name not in self.names or (name == "verify" and self.beside is not None):
            return stage(*inputs)
        self.expected += 1
        return self.recordings.run(name, (key, self.cast), stage, inputs, repeatable=name != "commit")


class RoundRecorder:
    """The recordings of one engine's rounds: of each of the four stages (draft, verify, judge, commit) by itself.

    Args:
        recorded: See ``recorded_as``. Whole rounds have what runs models recorded, too: draft and verify. Their
            attention then reads a number of positions that is rounded up (``bucket_of``).
        early: Whether a round may begin before the host has read the one before it (``DeviceRound.alone``).
    """

    def __init__(self, runner: ModelRunner, table: SlotTable, *, recorded: str, early: bool):
        self._runner, self._table, self.early = runner, table, early
        self._graphs = runner.device.type != "cpu"
        # Which level a node stands on is found by the host, so that models with recurrent layers run as they are.
        self._whole = recorded == "rounds" and runner.cache.states is None
        # A CPU gains nothing where a captured forward is not a single step of what is recorded around it.
        self._whole &= early or (runner.executor.captures and runner.backend.replays)
        self._version: Hashable = None  # of the target that recordings were made from
        # Those of a warm-up are for all lengths; others come with the lengths that requests have.
        lengths = len(buckets(1, table.max_length)) if early else 1
        most = max(MOST_RECORDINGS, _PER_SIZE * len(table.sizes) * lengths)
        self.recordings: Recordings | None = None
        if recorded != "off":
            recorder = CudaGraphRecorder(runner.device) if self._graphs else TapeRecorder()
            self.recordings = Recordings(recorder, after=RECORD_AFTER, most=most)
        self._rounds = self._replayed = 0
        self._by_design: Counter[str] = Counter()

    @property
    def recorded(self) -> str:
        """What is recorded when it comes often: ``"rounds"``, ``"decisions"`` or ``"off"``."""
        return "off" if self.recordings is None else "rounds" if self._whole else "decisions"

    @property
    def counts(self) -> RecordingCounts:
        refused, by_design, made = dict[str, list[str]](), Counter(self._by_design), self.recordings
        for one, kinds in made.refused.items() if made is not None else ():
            if one.by_design:
                by_design[f"{one.stage}: {one.reason}"] += kinds
            else:
                refused.setdefault(one.stage, []).append(one.reason)
        stages, replays = (0, 0) if made is None else (made.made, made.replays)
        return RecordingCounts(
            rounds=self._rounds, replayed=self._replayed, stages=stages, replays=replays, refused=refused,
            by_design=dict(by_design),
        )  # fmt: skip

    def begin(
        self, session: Session | None, batch: Batch, bound: int, why_not: str | None = None, *, padded: bool = True
    ) -> Stages:
        """Return a runner of a round's stages; there may be further rows behind those of the batch if ``padded``.

        Args:
            bound: The number of positions that attention reads in a recorded round.
            why_not: Why this round is not recorded; None if it is.
        """
        made = self.recordings
        if made is None or why_not is not None:
            self._by_design[why_not or "recording is off"] += 1
            return Stages(batch, batch)
        on_tensors = session is not None and not session.reads_host
        cast, played = autocast_of(self._runner.device.type), made.replays
        if not self._whole:
            return Stages(batch, batch, made, {"judge"} if on_tensors else {"judge", "commit"}, False, cast, played)
        if (version := self._runner.version) != self._version:  # nothing may keep old weights alive
            made.clear()
        self._version = version
        rows, names = self._table.padded(batch) if padded else batch, {"draft", "verify", "judge", "commit"}
        if on_tensors and rows.masks_drafts and self._graphs:  # no graph waits for the host between levels
            self._by_design["draft: drafts are drawn under grammars' masks"] += 1
            names.discard("draft")
        return Stages(rows.recorded(bound), rows, made, names, True, cast, played)

    def end(self, stages: Stages) -> None:
        self._rounds += 1
        self._replayed += stages.recordings is not None and stages.expected == stages.recordings.replays

    def sized(self, tree: DraftTree, nodes: int | None, *, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
        """Return a draft from the host in one of the sizes that are recorded."""
        if self.recordings is None:
            return tree
        if self.early:
            return settled(tree, nodes, max_nodes=max_nodes, max_depth=max_depth, is_chain=is_chain)
        return bucketed(tree, max_nodes=max_nodes, max_depth=max_depth)

    @contextmanager
    def at_once(self) -> Iterator[int]:
        """Record stages as soon as possible in the ``with`` block, which gets the rounds that takes: 0 on a CPU."""
        if self.recordings is None or not (self._whole and self.early):
            yield 0
            return
        self.recordings.after, after = _WARM, self.recordings.after
        try:
            yield _WARM
        except RuntimeError as error:
            if not ran_out(error):
                raise
            self.make_room(error)
        finally:
            self.recordings.after = after

    def make_room(self, error: BaseException) -> None:
        """Give up recordings, because memory has run out."""
        if self.recordings is not None:
            self.recordings.give_up(error)


def buckets(least: int, most: int) -> list[int]:
    """Returns the numbers of positions that attention reads (``bucket_of``) where ``least`` to ``most`` are needed."""
    sizes = [bucket_of(least)]
    while sizes[-1] < most:
        sizes.append(bucket_of(sizes[-1] + 1))
    return sizes
