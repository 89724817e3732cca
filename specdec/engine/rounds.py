"""Plays rounds on the device, stage by stage, and replays stages that come often."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields

from jaxtyping import Float
from torch import Tensor

from specdec.engine.clock import StageTimer
from specdec.engine.round import Judged, Mode, Played, judge, verify
from specdec.engine.slot_table import SlotTable
from specdec.execution.recording import Recorder, Recordings
from specdec.interfaces import Verifier
from specdec.modeling.runner import ModelRunner
from specdec.sampling import SamplingTensors
from specdec.slots import Slots
from specdec.tree import DraftTree
from specdec.tree_parts import TreeKind, bucketed
from specdec.types import Verdict

Observer = Callable[[DraftTree, Judged], object]
"""Sees a round between the rule's decision and the commit."""

RECORD_AFTER = 8
"""Rounds of one kind before their stages are recorded."""
MOST_RECORDINGS = 64


class Rounds:
    """The rounds of one engine.

    Args:
        runner: Runs the target.
        table: The state of all slots.
        timer: Measures the stages.
        recorder: Records stages; None plays every round as it is.
    """

    def __init__(self, runner: ModelRunner, table: SlotTable, timer: StageTimer, *, recorder: Recorder | None):
        self._runner, self._table, self._timer = runner, table, timer
        self.recordings = None if recorder is None else Recordings(recorder, after=RECORD_AFTER, most=MOST_RECORDINGS)

    def play(self, mode: Mode, slots: Slots, observer: Observer | None = None) -> Played:
        """Do a round on the device: when this returns, the next one could begin, and the host knows nothing yet."""
        with self._timer.stage("draft"):
            tree = mode.propose(slots)
            if self.recordings is not None and mode.sizes is not None:
                tree = bucketed(tree, max_nodes=mode.sizes[0], max_depth=mode.sizes[1])
        with self._timer.stage("verify"):
            output = verify(mode, tree, slots, self._runner)
        key = self._key(mode, tree, slots)
        with self._timer.stage("accept"):
            judged = self._judge(key, mode, tree, output.scores, slots)
        if observer is not None:
            observer(tree, judged)
        with self._timer.stage("commit"):
            self._settle(key, tree, judged, slots)
        return Played(tree, judged, output.hidden_states, slots.alternatives)

    def _key(self, mode: Mode, tree: DraftTree, slots: Slots) -> Hashable | None:
        """Returns all that a round's stages depend on besides tensors; None if they are not to be recorded."""
        # The tensors of slots that are no views are new in every round.
        if self.recordings is None or not slots.are_views or any(slots.processors) or not may_record(mode.verifier):
            return None
        rows = slots.host_index[0], len(slots)
        rule = id(mode), traits(mode.verifier)
        return rule, TreeKind.of(tree), rows, _flags(slots.sampling), slots.alternatives

    def _judge(
        self, key: Hashable | None, mode: Mode, tree: DraftTree, logits: Float[Tensor, "batch node vocab"], slots: Slots
    ) -> Judged:
        if key is None or self.recordings is None:
            return judge(mode, tree, logits, slots)
        kind = TreeKind.of(tree)

        def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
            drafted, (scores,) = kind.tree(inputs)
            return _parts(judge(mode, drafted, scores, slots))

        return _judged(self.recordings.run(("judge", key), stage, [*kind.parts(tree), logits]))

    def _settle(self, key: Hashable | None, tree: DraftTree, judged: Judged, slots: Slots) -> None:
        """Make the accepted path final, in the cache and in the slots."""
        # In a chain everything stands in its final place already.
        moves = tree.width > 1 and not tree.in_line
        verdict = judged.verdict
        inputs = verdict.path, judged.tokens, verdict.num_accepted, verdict.next_token, judged.valid

        def stage(path: Tensor, tokens: Tensor, num_accepted: Tensor, next_token: Tensor, valid: Tensor) -> tuple[()]:
            if moves:
                self._runner.cache.commit(slots.index, slots.lengths, path)
            self._table.advance(slots, tokens, num_accepted, next_token, valid)
            return ()

        if key is None or self.recordings is None:
            stage(*inputs)
        else:
            self.recordings.run(("settle", moves, key), stage, inputs)


def may_record(verifier: Verifier) -> bool:
    """Returns whether a rule's laws may be replayed without its Python: this project's may, others if they say so."""
    if verifier.recordable is not None:
        return verifier.recordable
    return type(verifier).__module__.partition(".")[0] in ("specdec", "verifiers")


def traits(verifier: Verifier) -> Hashable:
    """Returns what a rule's laws may depend on besides tables: its attributes, which a user may change."""
    return tuple((name, _trait(value)) for name, value in vars(verifier).items())


def _trait(value: object) -> Hashable:
    if isinstance(value, Verifier):
        return id(value), traits(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _flags(sampling: SamplingTensors) -> Hashable:
    """Returns what the host knows of the sampling parameters."""
    values = (getattr(sampling, each.name) for each in fields(sampling))
    return tuple(value is None if isinstance(value, Tensor) or value is None else value for value in values)


def _parts(judged: Judged) -> tuple[Tensor, ...]:
    verdict = judged.verdict
    return (
        judged.evidence, judged.tokens, judged.valid, judged.packed,
        verdict.path, verdict.num_accepted, verdict.expected_accepted, verdict.next_token, verdict.valid,
    )  # fmt: skip


def _judged(parts: Sequence[Tensor]) -> Judged:
    evidence, tokens, valid, packed, *verdict = parts
    return Judged(evidence, Verdict(*verdict), tokens, valid, packed)
