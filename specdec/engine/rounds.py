"""Plays rounds on the device, stage by stage, and replays stages that come often."""

from collections.abc import Callable, Hashable, Sequence

from jaxtyping import Float
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.on_device import DeviceDrafter
from specdec.engine.clock import StageTimer
from specdec.engine.read_back import Fetch
from specdec.engine.round import Judged, Mode, Played, judge, verify
from specdec.engine.slot_table import SlotTable
from specdec.execution.recorder import CudaGraphRecorder, Recorder, Recordings, Stage, TapeRecorder
from specdec.forward import ForwardOutput, Wants, bucket_of
from specdec.interfaces import Verifier
from specdec.placement import is_spread
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, along_path
from specdec.tree_parts import TreeKind, bucketed
from specdec.types import Decided, Verdict

Observer = Callable[[DraftTree, Judged], object]
"""Sees a round between the rule's decision and the commit."""

RECORD_AFTER = 8
"""Rounds of one kind before their stages are recorded."""
MOST_RECORDINGS = 256


class Rounds:
    """The rounds of one engine.

    A round is four stages: draft, verify, accept (the rule's decision), commit. Each is a function of tensors and of
    tensors that stay where they are. So each can be recorded by itself, which keeps their times apart.

    Args:
        runner: Runs the target.
        table: The state of all slots.
        timer: Measures the stages.
        recorder: Records stages; None plays every round as it is.
        whole: Also record what runs models: draft and verify. Their attention then reads a number of positions that is
            rounded up (``bucket_of``). Without it, only accept and commit are recorded.
    """

    def __init__(
        self,
        runner: ModelRunner,
        table: SlotTable,
        timer: StageTimer,
        *,
        recorder: Recorder | None,
        whole: bool = False,
    ):
        self._runner, self._table, self._timer = runner, table, timer
        self._whole = whole
        self._versions: Hashable = None  # of the models that recordings were made from
        self._drafted: Hashable = None
        self.recordings = None if recorder is None else Recordings(recorder, after=RECORD_AFTER, most=MOST_RECORDINGS)
        self._kinds: dict[Hashable, TreeKind] = {}

    @property
    def recorded(self) -> str:
        """What is recorded when it comes often: ``"rounds"``, ``"decisions"`` or ``"off"``."""
        if self.recordings is None:
            return "off"
        return "rounds" if self._whole else "decisions"

    def play(self, mode: Mode, slots: Batch, observer: Observer | None = None, *, ahead: int = 0) -> Played:
        """Do a round on the device: when this returns, the next one could begin, and the host knows nothing yet.

        Args:
            mode: How to draft and judge.
            slots: The rows.
            observer: Sees the decision before it is made final.
            ahead: How many tokens a row may be longer than the host knows, because the host has yet to read a round.
        """
        take = self._taker(mode, slots)
        seen = slots
        if take is not None and self._whole:
            self._look(mode)
            seen = slots.on_device(bucket_of(int(slots.host_lengths.max()) + ahead + mode.most_nodes + 1))
        with self._timer.stage("draft"):
            tree = self._draft(take, mode, slots, seen)
            if mode.drafter is not None:
                tree = self._runner.agreement.on_tree(tree, fixed=isinstance(mode.drafter, DeviceDrafter))
        kind = TreeKind.of(tree)
        with self._timer.stage("verify"):
            output = self._verify(take, mode, kind, tree, seen)
        with self._timer.stage("accept"):
            judged = self._judge(take, mode, kind, tree, output.scores, seen)
        if observer is not None:
            observer(tree, judged)
        with self._timer.stage("commit"):
            followed = self._settle(take, mode, tree, judged, output, seen)
        fetch = Fetch(judged.packed)
        alone = take is not None and self._whole and (mode.drafter is None or followed)
        return Played(tree, judged, output, fetch, slots.alternatives, followed=followed, alone=alone)

    def make_room(self, error: BaseException) -> None:
        """Give up recordings, because memory has run out, as an error says."""
        if self.recordings is not None:
            self.recordings.give_up(error)
            self._kinds.clear()

    def _look(self, mode: Mode) -> None:
        """Drop the recordings of models that have changed since: nothing may keep old weights alive."""
        drafter = mode.drafter.version if isinstance(mode.drafter, DeviceDrafter) else None
        versions = self._runner.version, drafter if mode.drafter is not None else self._drafted
        self._drafted = versions[1]
        if versions != self._versions and self.recordings is not None:
            self.recordings.clear()
            self._kinds.clear()
        self._versions = versions

    def _taker(self, mode: Mode, slots: Batch) -> "Take | None":
        """Returns what runs the stages of a round that may be recorded; None for one that may not.

        A user's processors may do anything.
        """
        if self.recordings is None or mode.inspected or slots.has_processors or not may_record(mode.verifier):
            return None
        common = id(mode), traits(mode.verifier), slots.kind
        recordings = self.recordings

        def take(name: str, key: Hashable, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return recordings.run(name, (common, key), stage, inputs, repeatable=name != "settle")

        return take

    def _draft(self, take: "Take | None", mode: Mode, slots: Batch, seen: Batch) -> DraftTree:
        """Returns what the drafter proposes: replayed if it drafts on the device, otherwise asked and padded."""
        drafter = mode.drafter
        if take is None or not self._whole or not isinstance(drafter, DeviceDrafter):
            tree = mode.propose(slots)
            if self.recordings is None or drafter is None:
                return tree
            return bucketed(tree, max_nodes=drafter.max_nodes, max_depth=drafter.max_depth)
        key = drafter.prepare(slots), seen.key_bound
        found = key, slots.kind

        def stage() -> tuple[Tensor, ...]:
            tree = drafter.draft(seen).limited(seen.max_depth)
            self._kinds[found] = TreeKind.of(tree)
            return tuple(self._kinds[found].parts(tree))

        parts = take("draft", key, stage, [])
        return drafter.trimmed(self._kinds[found].tree(parts)[0])

    def _verify(self, take: "Take | None", mode: Mode, kind: TreeKind, tree: DraftTree, seen: Batch) -> ForwardOutput:
        if take is None or not self._whole:
            return verify(mode, tree, seen, self._runner)

        def stage(*parts: Tensor) -> tuple[Tensor, ...]:
            output = verify(mode, kind.tree(parts)[0], seen, self._runner)
            return (output.scores, *_said(mode.wants, output))

        key = kind, seen.key_bound
        logits, *said = take("verify", key, stage, kind.parts(tree))
        return _output(mode.wants, said, logits)

    def _judge(
        self,
        take: "Take | None",
        mode: Mode,
        kind: TreeKind,
        tree: DraftTree,
        logits: Float[Tensor, "batch node vocab"],
        seen: Batch,
    ) -> Judged:
        if take is None:
            return judge(mode, tree, logits, seen, self._runner.agreement)

        def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
            drafted, (scores,) = kind.tree(inputs)
            return _parts(judge(mode, drafted, scores, seen))

        return _judged(take("judge", kind, stage, [*kind.parts(tree), logits]))

    def _settle(
        self,
        take: "Take | None",
        mode: Mode,
        tree: DraftTree,
        judged: Judged,
        output: ForwardOutput,
        seen: Batch,
    ) -> bool:
        """Make the accepted path final, in the cache, in the slots, and for a drafter that follows on the device.

        Returns:
            Whether the drafter has followed.
        """
        moves = tree.width > 1 and not tree.in_line  # in a chain everything stands in its final place already
        verdict = judged.verdict
        drafter = mode.drafter if take is not None and self._whole else None
        follows = isinstance(drafter, DeviceDrafter)
        inputs = [verdict.path, judged.tokens, verdict.num_accepted, verdict.next_token, judged.valid]
        inputs += [tree.tokens, *_said(mode.wants, output)] if follows else []

        def stage(
            path: Tensor, tokens: Tensor, num_accepted: Tensor, next_token: Tensor, valid: Tensor, *rest: Tensor
        ) -> tuple[()]:
            if moves:
                self._runner.cache.commit(seen.index, seen.lengths, path)
            if isinstance(drafter, DeviceDrafter):
                nodes, *parts = rest
                said = _output(mode.wants, parts)
                states = {layer: along_path(each, path) for layer, each in said.hidden_states.items()}
                told, counts = valid & seen.drafting, num_accepted + 1
                drafter.follow(
                    Decided(
                        seen.index, seen.lengths, tokens, counts, next_token, path, told, states, nodes, said.top_tokens
                    )
                )
            self._table.advance(seen, tokens, num_accepted, next_token, valid)
            return ()

        if take is None:
            stage(*inputs)
        else:
            take("settle", moves, stage, inputs)
        return follows


Take = Callable[[str, Hashable, Stage, Sequence[Tensor]], tuple[Tensor, ...]]
"""``take(name, key, stage, inputs)`` runs a stage that depends on ``key``, or replays it."""


RECORDING = ("auto", "rounds", "decisions", "off")


def check_recording(recording: object) -> None:
    """Refuse what is no way of recording.

    Raises:
        ValueError: Lists the ways.
    """
    if recording not in RECORDING:
        raise ValueError(f"recording={recording!r}: give one of {', '.join(RECORDING)}")


def rounds_for(runner: ModelRunner, table: SlotTable, timer: StageTimer, *, recording: str, optimize: bool) -> Rounds:
    """Returns the rounds of an engine (``Engine``'s ``recording`` and ``optimize``).

    Nothing is recorded for a model that is spread over devices or shared by processes: hooks move its weights and its
    tensors, and processes agree on every round before the next one begins.
    """
    device = runner.device.type
    off = recording == "off" or not optimize or is_spread(runner.model) or runner.agreement.shared
    if off or device not in ("cpu", "cuda"):
        return Rounds(runner, table, timer, recorder=None)
    recorder = TapeRecorder() if device == "cpu" else CudaGraphRecorder(runner.device)
    # The invariant executor finds out the order of the keys on the host, forward by forward.
    whole = not runner.invariant and (recording == "rounds" or (recording == "auto" and device == "cuda"))
    return Rounds(runner, table, timer, recorder=recorder, whole=whole)


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


def _said(wants: Wants, output: ForwardOutput) -> list[Tensor]:
    """Returns what the target said besides its logits, as tensors."""
    top = [] if output.top_tokens is None else [output.top_tokens]
    return [*(output.hidden_states[layer] for layer in wants.hidden_layers), *top]


def _output(wants: Wants, parts: Sequence[Tensor], logits: Tensor | None = None) -> ForwardOutput:
    """Returns what ``_said`` took apart."""
    layers = wants.hidden_layers
    hidden = dict(zip(layers, parts, strict=False))
    return ForwardOutput(logits, hidden, parts[len(layers)] if wants.top_k else None)


def _parts(judged: Judged) -> tuple[Tensor, ...]:
    verdict = judged.verdict
    return (
        verdict.path, verdict.num_accepted, verdict.expected_accepted, verdict.next_token, verdict.valid,
        judged.tokens, judged.valid, judged.packed, *([] if judged.evidence is None else [judged.evidence]),
    )  # fmt: skip


def _judged(parts: Sequence[Tensor]) -> Judged:
    tokens, valid, packed, *evidence = parts[5:]
    return Judged(evidence[0] if evidence else None, Verdict(*parts[:5]), tokens, valid, packed)
