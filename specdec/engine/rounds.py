"""Plays rounds on the device, stage by stage, and replays stages that come often."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from specdec.batch import Batch
from specdec.engine.clock import StageTimer
from specdec.engine.read_back import Fetch
from specdec.engine.round import Judged, Mode, Played, judge, outcome_of, propose, verify
from specdec.engine.slot_table import SlotTable
from specdec.execution.recorder import CudaGraphRecorder, Recorder, Recordings, Stage, TapeRecorder
from specdec.forward import ForwardOutput, Wants, bucket_of
from specdec.interfaces import Session, Verifier
from specdec.placement import is_spread
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree
from specdec.tree_parts import TreeKind, bucketed
from specdec.types import Outcome, Verdict

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
        self._runner, self.table, self.timer = runner, table, timer
        self._whole = whole
        self._version: Hashable = None  # of the target that recordings were made from
        self.recordings = None if recorder is None else Recordings(recorder, after=RECORD_AFTER, most=MOST_RECORDINGS)
        self._kinds: dict[Hashable, TreeKind] = {}

    @property
    def recorded(self) -> str:
        """What is recorded when it comes often: ``"rounds"``, ``"decisions"`` or ``"off"``."""
        if self.recordings is None:
            return "off"
        return "rounds" if self._whole else "decisions"

    def play(self, mode: Mode, batch: Batch, observer: Observer | None = None, *, ahead: int = 0) -> Played:
        """Do a round on the device: when this returns, the next one could begin, and the host knows nothing yet.

        Args:
            mode: How to draft and judge.
            batch: The rows.
            observer: Sees the decision before it is made final.
            ahead: How many tokens a row may be longer than the host knows, because the host has yet to read a round.
        """
        take, session = self._replayer(mode, batch), mode.session
        seen, whole = batch, take is not None and self._whole
        if whole:
            self._look()
            seen = batch.recorded(bucket_of(int(batch.on_host.lengths.max()) + ahead + mode.max_nodes + 1))
        # What a session on tensors alone does is recorded with the rest.
        inside = whole and session is not None and not session.reads_host
        key: Hashable = None
        with self.timer.stage("draft"):
            if inside and take is not None and session is not None:
                key = session.prepare(batch)
                tree = self._draft(take, key, session, seen)
            else:
                tree = propose(mode, batch)
                if self.recordings is not None and session is not None:
                    tree = bucketed(tree, max_nodes=mode.max_nodes, max_depth=mode.max_depth)
            if session is not None:
                tree = self._runner.agreement.on_tree(tree, fixed=not session.reads_host)
        kind = TreeKind.of(tree)
        with self.timer.stage("verify"):
            output = self._verify(take, mode, kind, tree, seen)
        with self.timer.stage("accept"):
            judged = self._judge(take, mode, kind, tree, output.scores, seen, observed=observer is not None)
            fetch = Fetch(judged.packed)  # before other stages may use the memory again
        if observer is not None:
            observer(tree, judged)
        with self.timer.stage("commit"):
            outcome = self._commit(take, mode, tree, judged, output, seen, key, inside=inside)
        alone = whole and (session is None or inside)
        return Played(tree, judged, outcome, fetch, batch.alternatives, alone=alone)

    def make_room(self, error: BaseException) -> None:
        """Give up recordings, because memory has run out, as an error says."""
        if self.recordings is not None:
            self.recordings.give_up(error)
            self._kinds.clear()

    def _look(self) -> None:
        """Drop the recordings of a target that has changed since: nothing may keep old weights alive."""
        if self._runner.version != self._version and self.recordings is not None:
            self.recordings.clear()
            self._kinds.clear()
        self._version = self._runner.version

    def _replayer(self, mode: Mode, batch: Batch) -> "Replayer | None":
        """Returns a function that runs the stages of a round that may be recorded; None for one that may not.

        A user's processors may do anything.
        """
        if self.recordings is None or mode.check is not None or batch.has_processors or not may_record(mode.verifier):
            return None
        common = id(mode), traits(mode.verifier), batch.kind
        recordings = self.recordings

        def take(name: str, key: Hashable, stage: Stage, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return recordings.run(name, (common, key), stage, inputs, repeatable=name != "commit")

        return take

    def _draft(self, take: "Replayer", prepared: Hashable, session: Session, seen: Batch) -> DraftTree:
        """Returns the proposal of a session on tensors alone, replayed if it came often."""
        key = prepared, seen.key_bound
        found = key, seen.kind

        def stage() -> tuple[Tensor, ...]:
            tree = session.propose(seen).limited(seen.max_depth)
            self._kinds[found] = TreeKind.of(tree)
            return tuple(self._kinds[found].parts(tree))

        parts = take("draft", key, stage, [])
        return session.trimmed(self._kinds[found].tree(parts)[0])

    def _verify(
        self, take: "Replayer | None", mode: Mode, kind: TreeKind, tree: DraftTree, seen: Batch
    ) -> ForwardOutput:
        if take is None or not self._whole:
            return verify(mode, tree, seen, self._runner)

        def stage(*parts: Tensor) -> tuple[Tensor, ...]:
            output = verify(mode, kind.tree(parts)[0], seen, self._runner)
            return (output.scores, *_states(mode.wants, output))

        key = kind, seen.key_bound
        logits, *states = take("verify", key, stage, kind.parts(tree))
        return _output(mode.wants, states, logits)

    def _judge(
        self,
        take: "Replayer | None",
        mode: Mode,
        kind: TreeKind,
        tree: DraftTree,
        logits: Float[Tensor, "batch node vocab"],
        seen: Batch,
        *,
        observed: bool,
    ) -> Judged:
        if take is None:
            return judge(mode, tree, logits, seen, self._runner.agreement, observed=observed)

        def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
            drafted, (scores,) = kind.tree(inputs)
            return _parts(judge(mode, drafted, scores, seen, observed=observed))

        return _judged(take("judge", (kind, observed), stage, [*kind.parts(tree), logits]))

    def _commit(
        self,
        take: "Replayer | None",
        mode: Mode,
        tree: DraftTree,
        judged: Judged,
        output: ForwardOutput,
        seen: Batch,
        prepared: Hashable,
        *,
        inside: bool,
    ) -> Outcome | None:
        """Make the accepted path final: in the cache, for the session, and in the slots.

        Returns:
            What a session that reads the host's numbers will observe when they are known; None for any other.
        """
        moves = tree.width > 1 and not tree.in_line  # in a chain everything stands in its final place already
        verdict, session, wants = judged.verdict, mode.session, mode.wants
        later = None
        if session is not None and not inside:
            outcome = outcome_of(seen, wants, tree.tokens, output, verdict, judged.tokens, judged.valid)
            if session.reads_host:
                # The lengths are about to move, and without drafts the tokens are the roots, which move, too.
                later = replace(outcome, starts=outcome.starts.clone(), tokens=outcome.tokens.clone())
            else:
                session.observe(outcome)
        inputs = [verdict.path, judged.tokens, verdict.num_accepted, verdict.next_token, judged.valid]
        inputs += [tree.tokens, *_states(wants, output)] if inside else []

        def stage(
            path: Tensor, tokens: Tensor, num_accepted: Tensor, next_token: Tensor, valid: Tensor, *rest: Tensor
        ) -> tuple[()]:
            if moves:
                self._runner.cache.commit(seen.slots, seen.lengths, path)
            if inside and session is not None:
                nodes, *parts = rest
                decided = replace(verdict, path=path, num_accepted=num_accepted, next_token=next_token)
                session.observe(outcome_of(seen, wants, nodes, _output(wants, parts), decided, tokens, valid))
            self.table.advance(seen, tokens, num_accepted, next_token, valid)
            return ()

        if take is None:
            stage(*inputs)
        else:
            take("commit", (moves, prepared), stage, inputs)
        return later


Replayer = Callable[[str, Hashable, Stage, Sequence[Tensor]], Sequence[Tensor]]
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


def _states(wants: Wants, output: ForwardOutput) -> list[Tensor]:
    """Returns the target's output besides its logits, as tensors."""
    top = [] if output.top_tokens is None else [output.top_tokens]
    return [*(output.hidden_states[layer] for layer in wants.hidden_layers), *top]


def _output(wants: Wants, parts: Sequence[Tensor], logits: Tensor | None = None) -> ForwardOutput:
    """Returns what ``_states`` took apart."""
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
