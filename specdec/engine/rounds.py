"""Plays rounds on the device, stage by stage, and replays stages that come often."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, replace

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from specdec.batch import Batch
from specdec.engine.clock import StageTimer
from specdec.engine.read_back import Fetch
from specdec.engine.recording import RecordingCounts, may_record, traits
from specdec.engine.round import Asked, Judged, Mode, Played, judge, outcome_of, propose, verify
from specdec.engine.slot_table import SlotTable
from specdec.execution.executor import autocast_of
from specdec.execution.recorder import CudaGraphRecorder, Recorder, Recordings, Stage, TapeRecorder
from specdec.forward import ForwardOutput, Wants, bucket_of
from specdec.interfaces import Session
from specdec.memory import ran_out
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree
from specdec.tree_parts import TreeKind, bucketed, settled, settled_size
from specdec.types import Outcome, Verdict

Observer = Callable[[DraftTree, Judged], object]
"""Sees a round between the rule's decision and the commit."""

RECORD_AFTER = 8
"""Rounds of one kind before their stages are recorded."""
MOST_RECORDINGS = 256
_PER_SIZE = 16
"""Recordings for a number of rows and of positions: all stages, plain or not, of requests of a few kinds."""
MASKED = "draft: drafts are drawn under grammars' masks"
_WARM = 3
"""Rounds of a warm-up: one makes what is made once, one rehearses, and one is recorded."""


class Rounds:
    """The rounds of one engine.

    A round is four stages: draft, verify, accept (the rule's decision), commit. Each is a function of tensors and of
    tensors that stay where they are. So each can be recorded by itself, which keeps their times apart.

    Args:
        recorder: Records stages; None plays every round as it is.
        whole: Also record what runs models: draft and verify. Their attention then reads a number of positions that is
            rounded up (``bucket_of``). Without it, only accept and commit are recorded.
        early: Whether a round may begin before the host has read the one before it (``Played.alone``).
    """

    def __init__(
        self,
        runner: ModelRunner,
        table: SlotTable,
        timer: StageTimer,
        *,
        recorder: Recorder | None,
        whole: bool = False,
        early: bool = False,
    ):
        self._runner, self.table, self.timer = runner, table, timer
        self._whole, self._early, self._graphs = whole, early, recorder is not None and not recorder.runs
        self._version: Hashable = None  # of the target that recordings were made from
        # Those of a warm-up are for all lengths; others come with the lengths that requests have.
        lengths = len(buckets(1, table.max_length)) if early else 1
        most = max(MOST_RECORDINGS, _PER_SIZE * len(table.sizes) * lengths)
        self.recordings = None if recorder is None else Recordings(recorder, after=RECORD_AFTER, most=most)
        self._kinds: dict[Hashable, TreeKind] = {}
        self._rounds = self._replayed = self._taken = 0
        self._by_design: Counter[str] = Counter()

    @property
    def recorded(self) -> str:
        """What is recorded when it comes often: ``"rounds"``, ``"decisions"`` or ``"off"``."""
        return "off" if self.recordings is None else "rounds" if self._whole else "decisions"

    @property
    def counts(self) -> RecordingCounts:
        """What was recorded and replayed so far."""
        made, replays, refused, by_design = 0, 0, dict[str, list[str]](), Counter(self._by_design)
        if self.recordings is not None:
            made, replays = self.recordings.made, self.recordings.replays
            for each, kinds in self.recordings.refused.items():
                if each.by_design:
                    by_design[f"{each.stage}: {each.reason}"] += kinds
                else:
                    refused.setdefault(each.stage, []).append(each.reason)
        return RecordingCounts(
            rounds=self._rounds, replayed=self._replayed, stages=made, replays=replays, refused=refused,
            by_design=dict(by_design),
        )  # fmt: skip

    def play(self, mode: Mode, batch: Batch, observer: Observer | None = None, *, ahead: int = 0) -> Played:
        """Do a round on the device: when this returns, the next one could begin, and the host knows nothing yet.

        Args:
            observer: Sees the decision before it is made final.
            ahead: How many tokens a row may be longer than the host knows, because the host has yet to read a round.
        """
        self._rounds += 1
        bound = bucket_of(int(batch.on_host.lengths.max()) + ahead + mode.max_nodes + 1)
        recordings, why_not = self.recordings, self._why_not(mode, batch)
        if recordings is None or why_not is not None:
            self._by_design[why_not or "recording is off"] += 1
            return self._play(mode, batch, observer, bound=bound, recorded=False)
        taken, replays = self._taken, recordings.replays
        played = self._play(mode, batch, observer, bound=bound, recorded=True)
        self._replayed += recordings.replays - replays == self._taken - taken
        return played

    @torch.inference_mode()
    def warm_up(
        self, modes: Iterable[Mode], *, nodes: Sequence[int], sampling: Sequence[SamplingParams], positions: int
    ) -> None:
        """Record whole rounds, as on a GPU, for every number of rows that they are padded to.

        Args:
            nodes: The numbers of nodes that are drafted on the host.
            sampling: Parameters of requests, for each of which rounds are recorded.
            positions: The length that attention is recorded up to.
        """
        recordings, modes = self.recordings, [mode for mode in modes if self._why_not(mode) is None]
        if recordings is None or not (self._whole and self._early):  # a CPU makes a recording in little time
            return
        recordings.after, after = _WARM, recordings.after
        try:
            # Large ones first: the others find room in the memory that those have taken.
            for count in reversed(self.table.sizes):
                for params, mode in ((params, mode) for params in sampling for mode in modes):
                    drafts = [0]
                    if mode.session is not None and mode.session.reads_host:
                        drafts = sorted({0, *(settled_size(size, mode.max_nodes) for size in nodes if size)})
                    most = positions + mode.max_depth + mode.max_nodes + 1
                    for bound in reversed(buckets(2 + mode.max_nodes, most)):
                        for size in reversed(drafts):
                            for _ in range(_WARM):
                                batch = self.table.idle(count, params)
                                self._play(mode, batch, None, bound=bound, recorded=True, nodes=size)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            self.make_room(error)
        finally:
            recordings.after = after

    def _play(
        self,
        mode: Mode,
        batch: Batch,
        observer: Observer | None,
        *,
        bound: int,
        recorded: bool,
        nodes: int | None = None,
    ) -> Played:
        session, seen, whole, count = mode.session, batch, recorded and self._whole, len(batch)
        if whole:
            self._look()
            seen = batch if observer is not None else self.table.padded(batch)
        # What a session on tensors alone does is recorded with the rest.
        inside = session if whole and session is not None and not session.reads_host else None
        key: Hashable = None
        with self.timer.stage("draft"):
            if inside is not None:
                key = inside.prepare(seen)
            seen = seen.recorded(bound) if whole else seen
            if inside is not None:
                tree = self._draft(mode, key, inside, seen)
            elif session is None:
                tree = propose(mode, seen)
            else:
                tree = propose(mode, batch) if nodes is None else DraftTree.root_only(batch.roots)
                if self.recordings is not None and self._early:
                    bounds = {"max_nodes": mode.max_nodes, "max_depth": mode.max_depth, "is_chain": mode.is_chain}
                    tree = settled(tree, nodes, **bounds)
                elif self.recordings is not None:
                    tree = bucketed(tree, max_nodes=mode.max_nodes, max_depth=mode.max_depth)
            if session is not None:
                tree = self._runner.agreement.on_tree(tree, fixed=not session.reads_host)
        kind = TreeKind.of(tree)
        if len(seen) > len(tree.tokens):
            tree = _filled(kind, tree, len(seen))
        with self.timer.stage("verify"):
            asked = Asked(tree, seen) if seen.has_grammars else None
            output = self._verify(mode, kind, tree, seen, whole=whole)
        with self.timer.stage("accept"):
            masks, observed = None if asked is None else asked.masks(), observer is not None
            judged = self._judge(mode, kind, tree, output.scores, masks, seen, recorded=recorded, observed=observed)
            fetch = Fetch(judged.packed[:count])  # before other stages may use the memory again
        if observer is not None:
            observer(tree, judged)
        with self.timer.stage("commit"):
            outcome = self._commit(mode, tree, judged, output, seen, key, recorded=recorded, inside=inside, count=count)
        alone = whole and self._early and session is inside and not seen.has_grammars
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

    def _why_not(self, mode: Mode, batch: Batch | None = None) -> str | None:
        """Returns why a round is not recorded where others are; None if it is. A user's processors may do anything."""
        if mode.check is not None:
            return "check=True looks at every round"
        if batch is not None and batch.has_processors:
            return "requests have logits processors"
        if not may_record(mode.verifier):
            return f"{type(mode.verifier).__name__} does not say that it is recordable"
        return None

    def _take(self, name: str, key: Hashable, stage: Stage, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a stage that depends on ``key``, or replay it."""
        assert self.recordings is not None, "rounds are recorded"
        self._taken += 1
        key = key, autocast_of(self._runner.device.type)  # what casts when a stage is recorded casts in its replays
        return self.recordings.run(name, key, stage, inputs, repeatable=name != "commit")

    def _draft(self, mode: Mode, prepared: Hashable, session: Session, seen: Batch) -> DraftTree:
        """Returns the proposal of a session on tensors alone, replayed if it came often."""
        key = id(mode), prepared, seen.key_bound, seen.kind

        def stage() -> tuple[Tensor, ...]:
            tree = session.propose(seen).limited(seen.max_depth)
            self._kinds[key] = TreeKind.of(tree)
            return tuple(self._kinds[key].parts(tree))

        if seen.masks_drafts and self._graphs:  # the host answers from level to level, which no graph waits for
            self._by_design[MASKED] += 1
            parts = stage()
        else:
            parts = self._take("draft", key, stage, [])
        return session.trimmed(self._kinds[key].tree(parts)[0])

    def _verify(self, mode: Mode, kind: TreeKind, tree: DraftTree, seen: Batch, *, whole: bool) -> ForwardOutput:
        if not whole:
            return verify(mode, tree, seen, self._runner)

        def stage(*parts: Tensor) -> tuple[Tensor, ...]:
            output = verify(mode, kind.tree(parts)[0], seen, self._runner)
            return (output.scores, *_states(mode.wants, output))

        key = mode.wants, kind, seen.key_bound, seen.place
        logits, *states = self._take("verify", key, stage, kind.parts(tree))
        return _output(mode.wants, states, logits)

    def _judge(
        self,
        mode: Mode,
        kind: TreeKind,
        tree: DraftTree,
        logits: Float[Tensor, "batch node vocab"],
        masks: Int32[Tensor, "batch node word"] | None,
        seen: Batch,
        *,
        recorded: bool,
        observed: bool,
    ) -> Judged:
        if not recorded:
            return judge(mode, tree, logits, seen, self._runner.agreement, masks=masks, observed=observed)

        def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
            drafted, (scores, *allowed) = kind.tree(inputs)
            return _parts(judge(mode, drafted, scores, seen, masks=allowed[0] if allowed else None, observed=observed))

        key = id(mode), traits(mode.verifier), kind, observed, seen.kind
        inputs = [*kind.parts(tree), logits, *([] if masks is None else [masks])]
        return _judged(self._take("judge", key, stage, inputs))

    def _commit(
        self,
        mode: Mode,
        tree: DraftTree,
        judged: Judged,
        output: ForwardOutput,
        seen: Batch,
        prepared: Hashable,
        *,
        recorded: bool,
        inside: Session | None,
        count: int,
    ) -> Outcome | None:
        """Make the accepted path final: in the cache, for the session, and in the slots.

        Returns:
            What a session that reads the host's numbers will observe when they are known; None for any other.
        """
        moves = tree.width > 1 and not tree.in_line  # in a chain everything stands in its final place already
        verdict, session, wants, cache = judged.verdict, mode.session, mode.wants, self._runner.cache
        later = None
        if session is not None and inside is None:
            outcome = outcome_of(
                seen, wants, tree.tokens, tree.valid, output, verdict, judged.tokens, judged.valid, in_line=tree.in_line
            )
            if session.reads_host:
                outcome = _first(outcome, count)
                # The lengths are about to move, and without drafts the tokens are the roots, which move, too.
                later = replace(outcome, starts=outcome.starts.clone(), tokens=outcome.tokens.clone())
            else:
                session.observe(outcome)
        inputs = [verdict.path, judged.tokens, verdict.num_accepted, verdict.next_token, judged.valid]
        inputs += [tree.tokens, tree.valid, *_states(wants, output)] if inside is not None else []

        def stage(
            path: Tensor, tokens: Tensor, num_accepted: Tensor, next_token: Tensor, valid: Tensor, *rest: Tensor
        ) -> tuple[()]:
            if moves or cache.states is not None:
                cache.commit(seen.slots, seen.lengths, path, (num_accepted + 1) * valid)
            if inside is not None:
                nodes, drafted, *parts = rest
                decided = replace(verdict, path=path, num_accepted=num_accepted, next_token=next_token)
                said = _output(wants, parts)
                inside.observe(
                    outcome_of(seen, wants, nodes, drafted, said, decided, tokens, valid, in_line=tree.in_line)
                )
            self.table.advance(seen, tokens, num_accepted, next_token, valid)
            return ()

        if recorded:
            key = id(mode), moves, prepared, seen.place, seen.sampling.seen is None
            self._take("commit", key, stage, inputs)
        else:
            stage(*inputs)
        return later


def buckets(least: int, most: int) -> list[int]:
    """Returns the numbers of positions that attention reads (``bucket_of``) where ``least`` to ``most`` are needed."""
    found = [bucket_of(least)]
    while found[-1] < most:
        found.append(bucket_of(found[-1] + 1))
    return found


def rounds_for(runner: ModelRunner, table: SlotTable, timer: StageTimer, *, recorded: str, as_on_gpu: bool) -> Rounds:
    """Returns the rounds of an engine that records so much (``recorded_as``), and how (``as_on_gpu``)."""
    if recorded == "off":
        return Rounds(runner, table, timer, recorder=None)
    recorder = TapeRecorder() if runner.device.type == "cpu" else CudaGraphRecorder(runner.device)
    # Which level a node stands on is found by the host, so that models with recurrent layers run as they are.
    whole = recorded == "rounds" and runner.cache.states is None
    whole = whole and (as_on_gpu or runner.executor.replays_at_once)  # a CPU gains nothing where forwards are not
    return Rounds(runner, table, timer, recorder=recorder, whole=whole, early=as_on_gpu)


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


def _filled(kind: TreeKind, tree: DraftTree, rows: int) -> DraftTree:
    """Returns the trees with the last row's once more for all rows that follow, whose tree does not matter."""
    given = len(tree.tokens)
    index = torch.arange(rows, device=tree.tokens.device).clamp_(max=given - 1)
    return kind.tree([each.index_select(0, index) for each in kind.parts(tree)])[0]


def _first(outcome: Outcome, rows: int) -> Outcome:
    """Returns what became final in the first rows."""
    tensors = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
    cut = {name: value[:rows] for name, value in tensors.items() if isinstance(value, Tensor)}
    states = {layer: each[:rows] for layer, each in outcome.hidden_states.items()}
    return replace(outcome, **cut, hidden_states=states)
