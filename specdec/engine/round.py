"""One round: propose, verify, accept, commit. ``Rounds.play`` is the whole algorithm; its four stages follow it."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from specdec.acceptance import Plain, accept, certain
from specdec.arguments import instance
from specdec.batch import Batch
from specdec.coupling import decided
from specdec.engine.clock import StageTimer
from specdec.engine.processors import apply_processors
from specdec.engine.read_back import Decision, DeviceRound, Fetch, pack
from specdec.engine.recording import Beside, RoundRecorder, Stages, buckets, may_record, traits
from specdec.engine.slot_table import SlotTable
from specdec.filters import first_largest
from specdec.forward import LOGITS, ForwardBatch, ForwardOutput, Wants, bucket_of
from specdec.interfaces import Drafter, Round, Session, Verifier
from specdec.random import Purpose, uniforms
from specdec.requests import Request, SamplingParams
from specdec.sampling import adjust, distribution, forbid_ends, one_hot, path_tokens, warmed
from specdec.target.parallel import Agreement
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, along_path
from specdec.tree_parts import settled_size, with_tensors
from specdec.types import Noise, Outcome, Verdict

Look = Callable[[Round], object]
"""Sees a round between the rule's decision and the commit."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How rounds draft and judge.

    Attributes:
        noise: With ``SHARED``, the rule is shown the token that the shared noise draws from p at every node.
        max_nodes, max_depth, is_chain: See ``Drafter``.
        check: Called with every tree as the session proposed it; None if nobody looks.
    """

    verifier: Verifier  # the acceptance rule
    noise: Noise = Noise.FRESH
    at_one: bool = False  # the rule is shown p at temperature 1 for greedy rows
    wants: Wants = LOGITS  # what the verify forward returns
    session: Session | None = None  # the drafting session; None in plain decoding
    max_nodes: int = 0
    max_depth: int = 0
    is_chain: bool = True
    check: Callable[[DraftTree, Batch], object] | None = None

    @classmethod
    def plain(cls, verifier: Verifier | None = None) -> "Mode":
        """Returns plain decoding, a tree of the root alone; if the rule shares its noise, with that noise."""
        return cls(verifier=Plain(), noise=Noise.FRESH if verifier is None else verifier.noise)

    @classmethod
    def speculative(cls, drafter: Drafter, session: Session, verifier: Verifier) -> "Mode":
        wants = Wants(hidden_layers=tuple(session.hidden_layers), top_k=session.top_tokens)
        return cls(
            verifier=verifier, noise=verifier.noise, at_one=verifier.needs_leaf_probs, wants=wants, session=session,
            max_nodes=drafter.max_nodes, max_depth=drafter.max_depth, is_chain=drafter.is_chain,
        )  # fmt: skip

    def evidence(
        self,
        scores: Float[Tensor, "batch node vocab"],
        target_probs: Float[Tensor, "batch node vocab"],
        tree: DraftTree,
        batch: Batch,
    ) -> Float[Tensor, "batch node vocab"]:
        """Returns p, or what two kinds of rules declare that they see of the target in its place."""
        if self.noise is Noise.SHARED and batch.sampling.any_sampled:
            return decided(target_probs, tree, batch.keys, batch.lengths)
        if self.at_one and batch.sampling.any_greedy:
            return distribution(scores, warmed(batch.sampling, batch.drafting))
        return target_probs


class Rounds:
    """The rounds of one engine."""

    def __init__(self, runner: ModelRunner, table: SlotTable, timer: StageTimer, recorder: RoundRecorder):
        self.runner, self.table, self.timer, self.recorder = runner, table, timer, recorder

    def begin(
        self, mode: Mode, batch: Batch, requests: Sequence[Request | None], look: Look | None = None, *, ahead: int = 0,
        some: Int[np.ndarray, " row"] | None = None, beside: Beside | None = None,
    ) -> DeviceRound:  # fmt: skip
        """Do a round on the device, of which the host knows nothing yet; a row may be ``ahead`` tokens longer.

        For ``some`` and ``beside`` see ``Stages``.
        """
        bound = bucket_of(int(batch.on_host.lengths.max()) + ahead + mode.max_nodes + 1)
        run = self.recorder.begin(mode.session, batch, bound, _why_not(mode, batch), padded=look is None)
        run.some, run.beside = some, beside
        begun = self.play(mode, batch, run, requests, look)
        self.recorder.end(run)
        return begun

    def play(
        self, mode: Mode, batch: Batch, run: Stages, requests: Sequence[Request | None], look: Look | None = None,
        nodes: int | None = None,
    ) -> DeviceRound:  # fmt: skip
        """Propose, verify, accept and commit; in a warm-up, ``nodes`` stands for a draft from the host of this size."""
        session, rows, table = mode.session, run.rows, self.table
        late = session is not None and (session.reads_host or run.some is not None)
        with self.timer.stage("draft"):
            tree, prepared = self._drafted(mode, batch, run, nodes)
            in_line = tree.in_line or tree.width == 1
        with self.timer.stage("verify" if run.beside is None else "prefill"):
            question = None
            if rows.has_grammars:  # the host answers while the device verifies
                question = Fetch(rows.matchers.question(rows.slots, tree.tokens, tree.ancestors, tree.valid))
            key: Hashable = mode.wants, rows.key_bound, rows.place
            output = run("verify", key, partial(verify, mode.wants, rows, self.runner, run.beside), tree)
        with self.timer.stage("accept"):
            masks = None
            if question is not None:
                bits = rows.matchers.answer(question.wait())
                masks = torch.from_numpy(bits).to(rows.device, non_blocking=True)
            key = id(mode), traits(mode.verifier), look is None, rows.kind
            stage = partial(judge, mode, rows, self.runner.agreement, look is not None)
            decision = run("judge", key, stage, tree, output.scores, masks)
            fetch = Fetch(decision.packed[: len(batch)])  # before other stages may use the memory again
        if look is not None:
            drafts = zip(requests, batch.on_host.drafting, strict=True)
            look(decision.seen(tree, tuple(request if drafting else None for request, drafting in drafts)))
        with self.timer.stage("commit"):
            key = id(mode), in_line, late, prepared, rows.place, tuple(rows.sampling.tables)
            stage = partial(commit, session, rows, self.runner, table, in_line, late)
            shown = () if session is None else (tree.tokens, tree.valid, output.hidden_states, output.top_tokens)
            outcome = run("commit", key, stage, decision.verdict, decision.tokens, decision.valid, *shown)
            if outcome is not None and len(rows) > len(batch):
                outcome = with_tensors(outcome, lambda tensor: tensor[: len(batch)])
        alone = run.whole and self.recorder.early and not (rows.has_grammars or late)
        return DeviceRound(tree, decision, outcome, fetch, batch, requests, alone=alone)

    def _drafted(self, mode: Mode, batch: Batch, run: Stages, nodes: int | None) -> tuple[DraftTree, Hashable]:
        """Return the trees that are verified, and what a recording of the session depends on."""
        session, rows = mode.session, run.rows
        if session is None:
            return DraftTree.root_only(rows.roots), None
        prepared: Hashable = None
        if run.some is not None:
            tree = propose_some(mode, batch, run.some)
        elif run.whole and not session.reads_host:
            prepared = session.prepare(run.on_host)
            key = id(mode), prepared, rows.key_bound, rows.kind
            tree = session.trimmed(run("draft", key, partial(propose, mode, rows)))
        else:
            if nodes is None:
                session.prepare(batch)
            tree = propose(mode, batch) if nodes is None else DraftTree.root_only(batch.roots)
            tree = self.recorder.sized(
                tree, nodes, max_nodes=mode.max_nodes, max_depth=mode.max_depth, is_chain=mode.is_chain
            )
        tree = self.runner.agreement.on_tree(tree, fixed=not session.reads_host)
        if len(tree.tokens) < len(rows):  # the last row's once more for all that follow, whose tree does not matter
            index = torch.arange(len(rows), device=rows.device).clamp_(max=len(tree.tokens) - 1)
            tree = with_tensors(tree, lambda tensor: tensor.index_select(0, index))
        return tree, prepared

    @torch.inference_mode()
    def warm_up(
        self, modes: Iterable[Mode], *, nodes: Sequence[int], sampling: Sequence[SamplingParams], positions: int
    ) -> None:
        """Record whole rounds, as on a GPU, for every number of rows that they are padded to.

        For all ``nodes`` that are drafted on the host, parameters of requests, and lengths up to ``positions``.
        """
        modes = [mode for mode in modes if _why_not(mode) is None]
        with self.recorder.at_once() as times:
            # Large ones first: the others find room in the memory that those have taken.
            for count in reversed(self.table.sizes if times else ()):
                for params, mode in ((params, mode) for params in sampling for mode in modes):
                    drafts = [0]
                    if mode.session is not None and mode.session.reads_host:
                        drafts = sorted({0, *(settled_size(size, mode.max_nodes) for size in nodes if size)})
                    most = positions + mode.max_depth + mode.max_nodes + 1
                    for bound in reversed(buckets(2 + mode.max_nodes, most)):
                        for size in [size for size in reversed(drafts) for _ in range(times)]:
                            batch = self.table.idle(count, params)
                            run = self.recorder.begin(mode.session, batch, bound)
                            self.play(mode, batch, run, (), nodes=size)


def _why_not(mode: Mode, batch: Batch | None = None) -> str | None:
    """Return why a round is not recorded where others are; None if it is. A user's processors may do anything."""
    if mode.check is not None:
        return "check=True looks at every round"
    if batch is not None and any(batch.processors):
        return "requests have logits processors"
    if not may_record(mode.verifier):
        return f"{type(mode.verifier).__name__} does not say that it is recordable"
    return None


def propose(mode: Mode, batch: Batch) -> DraftTree:
    """Return the session's drafts, without the nodes that are too deep for their row."""
    assert mode.session is not None
    tree = mode.session.propose(batch)
    instance(f"{type(mode.session).__name__}.propose(…)", tree, DraftTree, "DraftTree.root_only(batch.roots) at least")
    if mode.check is not None:
        mode.check(tree, batch)
    if tree.width > mode.max_nodes + 1:
        raise ValueError(
            f"{type(mode.session).__name__} proposed {tree.width - 1} nodes and its drafter announced "
            f"max_nodes={mode.max_nodes}: the cache has no room for more; propose fewer, or announce them"
        )
    if batch.host is None or (batch.host.max_depth < tree.max_depth).any():
        tree = tree.limited(batch.max_depth)
    return tree


def propose_some(mode: Mode, batch: Batch, rows: Int[np.ndarray, " row"]) -> DraftTree:
    """Return the session's drafts for some rows; the others have none."""
    if not len(rows):
        return DraftTree.root_only(batch.roots)
    assert mode.session is not None
    some, every = batch.rows(rows), np.arange(len(batch))
    mode.session.prepare(some)
    tree = propose(mode, some)
    places = np.searchsorted(rows, every).clip(max=len(rows) - 1), np.isin(every, rows) * tree.max_depth
    index, depth = (torch.from_numpy(each).to(batch.device, non_blocking=True) for each in places)
    tree = with_tensors(tree, lambda tensor: tensor.index_select(0, index))
    return replace(tree, tokens=torch.cat([batch.roots[:, None], tree.tokens[:, 1:]], dim=1)).limited(depth)


def verify(wants: Wants, batch: Batch, runner: ModelRunner, beside: Beside | None, tree: DraftTree) -> ForwardOutput:
    """Return what the target says of all nodes of the trees, in one forward."""
    forward = ForwardBatch.of_tree(
        tree, slots=batch.slots, lengths=batch.lengths, key_bound=batch.key_bound, wants=wants,
        host_lengths=None if batch.host is None else batch.host.lengths,
    )  # fmt: skip
    if beside is None:
        return runner.run(forward)
    *others, output = runner.run_together([*beside[0], forward])
    beside[1](others)
    return output


def judge(
    mode: Mode,
    batch: Batch,
    agreement: Agreement,
    observed: bool,
    tree: DraftTree,
    logits: Float[Tensor, "batch node vocab"],
    masks: Int32[Tensor, "batch node word"] | None = None,
) -> Decision:
    """Decide what is accepted, and draw the token that follows: the same in all processes that share the target.

    Greedy rows need no laws where the rule says so: all of p is on one token.

    Args:
        observed: Whether somebody looks at the rule's evidence.
        masks: The tokens that grammars allow, a bit each; None without grammars.
    """
    scores = _processed(logits, tree, batch, masks)
    target_probs = evidence = peaks = None
    if mode.verifier.walks_greedily and tree.draft_probs is None and not batch.sampling.any_sampled:
        following = first_largest(scores)
        verdict = certain(tree, following)
        if scores is logits:
            peaks = logits.gather(2, following[..., None])[..., 0]
        if observed:
            evidence = one_hot(following, logits.shape[2])
    else:
        target_probs = distribution(scores, batch.sampling)
        shown = mode.evidence(scores, target_probs, tree, batch)
        verdict = accept(mode.verifier, tree, shown, uniforms(batch.keys, batch.rounds, Purpose.ACCEPT, 2))
        evidence = shown if observed else None
    verdict = agreement.on_verdict(verdict)
    nodes, tokens = tree.parents + 1, tree.tokens
    if tree.width > 1:
        nodes = torch.nn.functional.pad(verdict.path.clamp(min=0), (1, 0))
        tokens = tree.tokens.gather(1, nodes)
    # NaN wins every maximum: a largest logit tells whether its node went wrong.
    peaks = logits.amax(-1) if peaks is None else peaks
    if any(batch.processors):
        peaks = peaks.where(~scores.isnan().any(-1), torch.nan)
    valid, packed = pack(tree, verdict, nodes, tokens, logits, peaks, target_probs, batch.alternatives)
    return Decision(evidence, verdict, tokens, agreement.on_numbers(valid), agreement.on_numbers(packed))


def commit(
    session: Session | None,
    batch: Batch,
    runner: ModelRunner,
    table: SlotTable,
    in_line: bool,
    late: bool,
    verdict: Verdict,
    tokens: Int[Tensor, "batch position"],
    valid: Bool[Tensor, " batch"],
    node_tokens: Int[Tensor, "batch node"] | None = None,
    node_valid: Bool[Tensor, "batch node"] | None = None,
    hidden_states: Mapping[int, Tensor] | None = None,
    top_tokens: Int[Tensor, "batch node rank"] | None = None,
) -> Outcome | None:
    """Make the accepted path final: in the cache, for the session, and in the slots.

    Returns what the session is to observe when the host knows it; None if it has observed it.

    Args:
        in_line: Whether the trees are chains, where everything stands in its final place already.
        late: Whether the session observes the outcome when the host's numbers are known.
        tokens, valid: See ``Decision``.
        node_tokens, node_valid: The nodes that were verified, and which of them the tree has.
        hidden_states, top_tokens: What the session wants of the target at these nodes.
    """
    outcome = Outcome(
        slots=batch.slots, starts=batch.lengths, tokens=tokens, counts=(verdict.num_accepted + 1) * valid,
        next_tokens=verdict.next_token.where(valid, batch.roots), path=verdict.path,
    )  # fmt: skip
    if not in_line or runner.cache.states is not None:
        runner.cache.commit(batch.slots, batch.lengths, verdict.path, outcome.counts)
    later = None
    if session is not None and hidden_states is not None:
        told = valid & batch.drafting
        path = verdict.path.where(told[:, None], -1)
        if not in_line:
            hidden_states = {layer: along_path(state, path) for layer, state in hidden_states.items()}
        shown = replace(
            outcome, counts=outcome.counts * told, path=path, hidden_states=hidden_states, node_tokens=node_tokens,
            node_valid=node_valid, top_tokens=top_tokens,
        )  # fmt: skip
        if late:
            # The lengths are about to move, and without drafts the tokens are the roots, which move, too.
            later = replace(shown, starts=batch.lengths.clone(), tokens=tokens.clone())
        else:
            session.observe(shown)
    table.advance(batch, outcome)
    return later


def _processed(
    logits: Float[Tensor, "batch node vocab"],
    tree: DraftTree,
    batch: Batch,
    masks: Int32[Tensor, "batch node word"] | None,
) -> Float[Tensor, "batch node vocab"]:
    """Returns p's own logits: with bias, penalties, the user's processors, grammars and early ends, if any."""
    processed = any(batch.processors)
    if not batch.sampling.tables and not processed and masks is None and logits.dtype != torch.float64:
        return logits
    paths = path_tokens(tree.tokens, tree.ancestors) if batch.sampling.by_path else None
    scores = adjust(logits, batch.sampling, paths)
    if processed:
        scores = apply_processors(scores, tree, batch)
    if masks is not None:
        scores = scores.masked_fill(~batch.matchers.unpacked(masks), -torch.inf)
    return forbid_ends(scores, batch.sampling, batch.lengths[:, None] + tree.depth)
