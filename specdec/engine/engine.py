"""The engine: draft a tree, verify it in one forward, accept, commit, for all slots at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.acceptance import Plain, accept
from specdec.coupling import decided
from specdec.engine.clock import StageTimer
from specdec.engine.processors import apply_processors
from specdec.engine.slots import Slots
from specdec.engine.text import Detokenizer, encode_prompt
from specdec.interfaces import Drafter, Round, Verifier
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.random import Purpose, uniforms
from specdec.requests import Request, SamplingParams
from specdec.sampling import adjust, distribution, path_tokens, warmed
from specdec.tree import DraftTree
from specdec.types import Committed, Completion, Noise, Step, Verdict

DEFAULT_MAX_LENGTH = 4096


class Engine:
    """Decodes prompts with a target, and with a drafter and a verifier if there are any.

    Args:
        target: The model whose distribution the output follows.
        drafter: Proposes tokens; None decodes plainly.
        verifier: The acceptance rule; needed with a drafter.
        max_batch_size: Requests that decode together; more wait for a slot.
        max_length: Tokens per request, prompt and output. Default: what the model allows, at most 4096.
        prefill_chunk: Prompt tokens per prefill forward; rounds of running requests go on between chunks.
        attention: See ``ModelRunner``.
        timing: Measure each stage of every round (``Step.seconds``).
        optimize: See ``ModelRunner``; of the target's forwards.

    Attributes:
        on_round: Called with every speculative round, for traces and diagnostics; None by default, at no cost.

    Raises:
        ValueError: Target, drafter and verifier do not fit each other, or the cache does not fit into memory.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        *,
        max_batch_size: int = 1,
        max_length: int | None = None,
        prefill_chunk: int = 512,
        attention: str = "auto",
        timing: bool = False,
        optimize: bool = True,
    ):
        for name, value in (("max_batch_size", max_batch_size), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        if max_length is not None and max_length < 2:
            raise ValueError(f"max_length={max_length}: give at least 2, one token of prompt and one of output")
        if drafter is not None and verifier is None:
            raise ValueError(f"{type(drafter).__name__} needs a verifier: pass for example RejectionVerifier()")
        if drafter is not None and verifier is not None:
            verifier.check(drafter)
            drafter.leaf_probs = verifier.needs_leaf_probs
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.max_batch_size = max_batch_size
        self.max_length = max_length or min(target.max_length, DEFAULT_MAX_LENGTH)
        self.prefill_chunk = prefill_chunk
        self.on_round: Callable[[Round], object] | None = None
        self.runner = ModelRunner(
            target.model,
            max_batch_size=max_batch_size,
            max_length=self.max_length,
            max_nodes=drafter.max_nodes if drafter is not None else 0,
            attention=attention,
            hidden_layers=drafter.hidden_layers if drafter is not None else (),
            optimize=optimize,
        )
        if drafter is not None:
            drafter.bind(target, max_batch_size=max_batch_size, max_length=self.max_length)
        self.timer = StageTimer(target.device, enabled=timing)
        self.slots = Slots(max_batch_size, self.max_length, target.vocab_size, target.device)
        self._views: dict[int, Slots] = {}
        self._plain = Plain()
        self._waiting: deque[Request] = deque()
        self._running: list[Request | None] = [None] * max_batch_size
        self._texts: dict[int, Detokenizer] = {}
        self._next_id = 0

    # ---------------------------------------------------------------- asking

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> list[Completion]:
        """Decode prompts to the end.

        Args:
            prompts: Text or token ids each.
            sampling: One for all prompts, or one per prompt.
            speculate: False decodes plainly, on the same cache and by the same loop.

        Returns:
            One per prompt and sample: the ``n`` samples of a prompt stand together, in the prompts' order.
        """
        requests = self._requests(prompts, sampling, speculate)
        steps: dict[int, list[Step]] = {request.id: [] for request in requests}
        for step in self._drain(requests):
            steps[step.request].append(step)
        return [_completion(request, steps[request.id]) for request in requests]

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> Iterator[Step]:
        """Like ``generate``, yielding every request's steps as they happen; ids count up in the prompts' order."""
        yield from self._drain(self._requests(prompts, sampling, speculate))

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> int:
        """Queue one request (of one sample) for ``step``; returns its id, which is also its default stream."""
        if sampling.n != 1:
            raise ValueError(
                f"n={sampling.n}: submit takes one sample per call; use generate, or submit it {sampling.n} times"
            )
        request = self._request(prompt, sampling, self._next_id, speculate)
        self._enqueue([request])
        return request.id

    def abort(self, request_id: int) -> None:
        """Drop a request, waiting or running; unknown and finished ids are ignored."""
        self._waiting = deque(request for request in self._waiting if request.id != request_id)
        for request in self._running:
            if request is not None and request.id == request_id:
                self._release(request)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + sum(request is not None for request in self._running)

    # ---------------------------------------------------------------- the loop

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """One turn: fill free slots, prefill a chunk of each new prompt, and one round of all that are ready."""
        self._admit()
        with self.timer.stage("prefill"):
            self._prefill()
        ready = np.flatnonzero(self.slots.host_active)
        return self._round(self._view(int(ready[-1]) + 1)) if len(ready) else []

    def _round(self, slots: Slots) -> list[Step]:
        """Propose, verify, accept and commit for the rows of ``slots``."""
        speculating = bool(slots.host_drafting[slots.host_active].any())
        self._limit_depth(slots)
        with self.timer.stage("draft"):
            tree = self._propose(slots) if speculating else DraftTree.root_only(slots.roots)
        with self.timer.stage("verify"):
            output = self.runner.verify(tree, slots.lengths, slots.host_lengths)
        with self.timer.stage("accept"):
            scores = self._scores(output.logits, tree, slots)
            target_probs = distribution(scores, slots.sampling)
            verifier = self.verifier if speculating and self.verifier is not None else self._plain
            uniform = uniforms(slots.keys, slots.rounds, Purpose.ACCEPT, 2)
            judged = self._judged(scores, target_probs, tree, slots, speculating=speculating)
            verdict = accept(verifier, tree, judged, uniform)
            nodes = torch.nn.functional.pad(verdict.path.clamp(min=0), (1, 0)) if tree.max_depth else tree.parents + 1
            tokens = tree.tokens.gather(1, nodes)
            read = _read_back(tree, verdict, nodes, tokens, output.logits, target_probs)
        if speculating and self.on_round is not None:
            rows = zip(self._running, slots.host_active & slots.host_drafting, strict=False)
            self.on_round(Round(tree, judged, verdict, tuple(r if drafts else None for r, drafts in rows)))
        with self.timer.stage("commit"):
            if tree.max_children > 1:  # along a chain everything stands in its place already
                self.runner.cache.commit(slots.lengths, verdict.path)
            hidden = {k: tree.gather_path(states, verdict.path) for k, states in output.hidden_states.items()}
            self._advance(slots, tokens, verdict)
        starts = slots.host_lengths.copy()
        steps = self._finish_round(slots, read)
        with self.timer.stage("commit"):
            self._observe(
                Committed(
                    first_slot=0,
                    active=slots.host_active & slots.host_drafting,
                    tokens=tokens,
                    starts=starts,
                    counts=1 + read.num_accepted,
                    next_tokens=verdict.next_token,
                    path=verdict.path if speculating else None,
                    hidden_states=hidden,
                )
            )
        return steps

    def _propose(self, slots: Slots) -> DraftTree:
        assert self.drafter is not None
        tree = self.drafter.propose(slots)
        if (slots.host_max_depth < tree.max_depth).any():
            tree = tree.limited(slots.max_depth)
        return tree

    def _scores(
        self, logits: Float[Tensor, "batch node vocab"], tree: DraftTree, slots: Slots
    ) -> Float[Tensor, "batch node vocab"]:
        """What ``distribution`` makes p of: what plain sampling would draw from at every node."""
        paths = path_tokens(tree.tokens, tree.ancestors) if slots.sampling.seen is not None else None
        scores = adjust(logits, slots.sampling, paths)
        if any(slots.processors):
            scores = apply_processors(scores, tree, slots)
        return scores

    def _judged(
        self,
        scores: Float[Tensor, "batch node vocab"],
        target_probs: Float[Tensor, "batch node vocab"],
        tree: DraftTree,
        slots: Slots,
        *,
        speculating: bool,
    ) -> Float[Tensor, "batch node vocab"]:
        """What the rule looks at: p, but for the two exceptions that a verifier declares (see ``Verifier``)."""
        if self.verifier is None:
            return target_probs
        if self.verifier.noise is Noise.SHARED and slots.sampling.any_sampled:
            return decided(target_probs, tree, slots.keys, slots.lengths)
        if self.verifier.needs_leaf_probs and speculating and slots.sampling.any_greedy:
            return distribution(scores, warmed(slots.sampling, slots.drafting))
        return target_probs

    def _limit_depth(self, slots: Slots) -> None:
        """Deeper nodes would be beyond the tokens still wanted or the row's last position."""
        for slot, request in enumerate(self._running[: len(slots)]):
            depth = 0
            if request is not None and slots.host_active[slot] and slots.host_drafting[slot]:
                depth = max(0, min(request.remaining - 1, self.max_length - 1 - int(slots.host_lengths[slot])))
            slots.host_max_depth[slot] = depth
        slots.max_depth.copy_(torch.from_numpy(slots.host_max_depth), non_blocking=True)

    def _advance(self, slots: Slots, tokens: Int[Tensor, "batch position"], verdict: Verdict) -> None:
        """The device's side of a round's end."""
        slots.lengths.add_(torch.where(slots.active, verdict.num_accepted + 1, 0))
        slots.roots.copy_(verdict.next_token)
        slots.rounds.add_(slots.active)  # not of a row that waits for the rest of its prompt
        seen = slots.sampling.seen
        if seen is not None:
            emitted = torch.cat([tokens, verdict.next_token[:, None]], dim=1)
            # Dead rows keep what they have: theirs may be a prompt that is still being prefilled.
            seen.scatter_(1, emitted, seen.gather(1, emitted) | slots.active[:, None])

    def _finish_round(self, slots: Slots, read: "_ReadBack") -> list[Step]:
        """The host's side: cut the emitted tokens, make the steps, free the slots of finished requests."""
        seconds = self.timer.take()
        steps = []
        for slot in np.flatnonzero(slots.host_active):
            request = self._running[slot]
            assert request is not None
            accepted = int(read.num_accepted[slot])
            emitted = read.tokens[slot, : accepted + 1].tolist()
            start = int(slots.host_lengths[slot]) + 1
            slots.host_tokens[slot, start : start + accepted + 1] = emitted
            slots.host_lengths[slot] += accepted + 1
            step = Step(
                request=request.id,
                round=request.rounds,
                token_ids=tuple(emitted),
                logprobs=tuple(read.logprobs[slot, : accepted + 1].tolist()),
                proposed_nodes=int(read.proposed_nodes[slot]),
                proposed_depth=int(read.proposed_depth[slot]),
                accepted=accepted,
                expected_accepted=float(read.expected_accepted[slot]),
                seconds=seconds,
            )
            request.rounds += 1
            step = self._cut(request, step, valid=bool(read.valid[slot]))
            request.output_ids += step.token_ids
            steps.append(step)
            if step.finish_reason is not None:
                if step.finish_reason == "error":
                    self.runner.cache.clear(int(slot))
                self._release(request)
        return steps

    def _cut(self, request: Request, step: Step, *, valid: bool) -> Step:
        """End the request where it ends inside the emitted tokens, and turn them into text."""
        if not valid:
            message = f"the logits or the draft's probabilities were not finite in round {step.round}"
            return replace(
                step,
                token_ids=(),
                logprobs=(),
                finish_reason="error",
                error=message,
                text=self._texts[request.id].flush(),
            )
        reason = None
        tokens = step.token_ids
        for count, token in enumerate(tokens, start=1):
            if token in request.stop_ids:
                reason, tokens = "stop", tokens[:count]
                break
        if len(tokens) >= request.remaining:
            if len(tokens) > request.remaining:
                reason, tokens = "length", tokens[: request.remaining]
            reason = reason or "length"
        detokenizer = self._texts[request.id]
        text = detokenizer.push(tokens)
        if detokenizer.stopped_at is not None:
            reason, tokens = "stop", tokens[: detokenizer.stopped_at - len(request.output_ids)]
        elif reason is not None:
            text += detokenizer.flush()
        return replace(step, token_ids=tokens, logprobs=step.logprobs[: len(tokens)], text=text, finish_reason=reason)

    # ---------------------------------------------------------------- slots

    def _admit(self) -> None:
        for slot, running in enumerate(self._running):
            if running is not None or not self._waiting:
                continue
            request = self._waiting.popleft()
            self.runner.refresh()
            request.slot = slot
            self._running[slot] = request
            self._texts[request.id] = Detokenizer(
                self.target.tokenizer, request.prompt_ids, stop=tuple(request.sampling.stop)
            )
            self.slots.admit(slot, list(request.prompt_ids), request.sampling, speculate=request.speculate)
            self._views.clear()
            if request.speculate and self.drafter is not None:
                self.drafter.admit(slot, request.prompt_ids, request.sampling)
            if len(request.prompt_ids) == 1:
                self.slots.activate(slot, request.prompt_ids[0])

    def _prefill(self) -> None:
        """One chunk of every prompt that is not in the cache yet; neighbouring slots share a forward."""
        pending = [r for r in self._running if r is not None and not self.slots.host_active[r.slot]]
        group: list[Request] = []
        for request in pending:
            if group and request.slot != group[-1].slot + 1:
                self._prefill_group(group)
                group = []
            group.append(request)
        if group:
            self._prefill_group(group)

    def _prefill_group(self, group: list[Request]) -> None:
        starts = np.array([request.prefilled for request in group])
        counts = np.array([min(self.prefill_chunk, len(r.prompt_ids) - 1 - r.prefilled) for r in group])
        padded = np.zeros((len(group), counts.max()), dtype=np.int64)
        following = np.zeros(len(group), dtype=np.int64)
        for row, (request, start, count) in enumerate(zip(group, starts, counts, strict=True)):
            padded[row, :count] = request.prompt_ids[start : start + count]
            following[row] = request.prompt_ids[start + count]
        tokens = torch.from_numpy(padded).to(self.target.device, non_blocking=True)
        first_slot = group[0].slot
        hidden = self.runner.prefill(tokens, starts, counts, first_slot=first_slot)
        self._observe(
            Committed(
                first_slot=first_slot,
                active=np.array([request.speculate for request in group]),
                tokens=tokens,
                starts=starts,
                counts=counts,
                next_tokens=torch.from_numpy(following).to(self.target.device, non_blocking=True),
                path=None,
                hidden_states=hidden,
            )
        )
        for request, count in zip(group, counts.tolist(), strict=True):
            request.prefilled += count
            self.slots.advance(request.slot, request.prefilled)
            if request.prefilled == len(request.prompt_ids) - 1:
                self.slots.activate(request.slot, request.prompt_ids[-1])

    def _observe(self, committed: Committed) -> None:
        if self.drafter is not None and committed.active.any():
            self.drafter.observe(committed)

    def _release(self, request: Request) -> None:
        self.slots.release(request.slot)
        self._views.clear()
        self._running[request.slot] = None
        del self._texts[request.id]
        if request.speculate and self.drafter is not None:
            self.drafter.release(request.slot)

    def _view(self, n: int) -> Slots:
        if n not in self._views:
            self._views[n] = self.slots.first(n)
        return self._views[n]

    # ---------------------------------------------------------------- requests

    def _requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        speculate: bool,
    ) -> list[Request]:
        """Check everything, then make the requests of a call."""
        if isinstance(prompts, str):
            raise ValueError("prompts is one string: give a list of prompts")
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} SamplingParams: give one for all, or one each")
        requests = []
        for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            for sample in range(wanted.n):
                # A given stream's further samples are streams of their own, far from any other prompt's.
                stream = None if wanted.stream is None else wanted.stream + (sample << 40)
                try:
                    requests.append(self._request(prompt, replace(wanted, stream=stream), len(requests), speculate))
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error
        return requests

    def _request(self, prompt: str | Sequence[int], sampling: SamplingParams, index: int, speculate: bool) -> Request:
        ids = (
            encode_prompt(self.target.tokenizer, prompt)
            if isinstance(prompt, str)
            else [int(token) for token in prompt]
        )
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        wrong = [token for token in ids if not 0 <= token < self.target.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the target's vocabulary of {self.target.vocab_size}")
        if len(ids) + sampling.max_new_tokens > self.max_length:
            raise ValueError(
                f"{len(ids)} prompt tokens + max_new_tokens={sampling.max_new_tokens} exceed the engine's "
                f"max_length={self.max_length}: shorten either, or raise max_length "
                f"(the model has {self.target.max_length} positions)"
            )
        if sampling.stop and self.target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the Target one, or use stop_token_ids")
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self.target.eos_token_ids
        request = Request(
            id=self._next_id,
            prompt_ids=ids,
            sampling=sampling.seeded(index),
            speculate=speculate and self.drafter is not None,
            stop_ids=stop_ids,
        )
        self._next_id += 1
        return request

    def _enqueue(self, requests: list[Request]) -> None:
        self._waiting.extend(requests)

    def _drain(self, requests: list[Request]) -> Iterator[Step]:
        """Run until these requests have ended; whatever happens, none of them is left behind."""
        if self.unfinished:
            raise ValueError(
                f"{self.unfinished} submitted requests are unfinished: "
                f"call step() until they end before generate or stream"
            )
        self._enqueue(requests)
        try:
            while self.unfinished:
                yield from self.step()
        finally:
            for request in requests:
                self.abort(request.id)


class _ReadBack:
    """A round's results on the host: one copy, one synchronization."""

    def __init__(self, packed: np.ndarray, width: int):
        self.tokens = packed[:, :width].astype(np.int64)
        self.logprobs = packed[:, width : 2 * width]
        rest = packed[:, 2 * width :]
        self.num_accepted = rest[:, 0].astype(np.int64)
        self.expected_accepted = rest[:, 1]
        self.proposed_nodes = rest[:, 2]
        self.proposed_depth = rest[:, 3]
        # NaN wins every maximum: a largest logit tells whether its node went wrong.
        self.valid = (rest[:, 4] > 0) & np.isfinite(rest[:, 5:]).all(1)


def _read_back(
    tree: DraftTree,
    verdict: Verdict,
    nodes: Int[Tensor, "batch position"],
    tokens: Int[Tensor, "batch position"],
    logits: Float[Tensor, "batch node vocab"],
    target_probs: Float[Tensor, "batch node vocab"],
) -> _ReadBack:
    """Emitted tokens with their log-probabilities, and the round's figures, copied to the host at once.

    Args:
        tree: What was proposed.
        verdict: What became of it.
        nodes: The root and the accepted path.
        tokens: Their tokens.
        logits: The model's.
        target_probs: p.
    """
    batch, _, vocab = logits.shape
    last = verdict.next_token[:, None]
    emitted = torch.cat([tokens[:, 1:], last], dim=1).scatter_(1, verdict.num_accepted[:, None], last)
    chosen = target_probs.reshape(batch, -1).gather(1, torch.add(emitted, nodes, alpha=vocab))
    figures = [verdict.num_accepted, verdict.expected_accepted, *tree.size, verdict.valid]
    columns = [emitted, chosen.log(), *[figure[:, None] for figure in figures], logits.amax(-1).gather(1, nodes)]
    packed = torch.cat([column.to(torch.float64) for column in columns], dim=1)
    return _ReadBack(packed.cpu().numpy(), emitted.shape[1])


def _completion(request: Request, steps: list[Step]) -> Completion:
    return Completion(
        prompt_ids=tuple(request.prompt_ids),
        token_ids=tuple(request.output_ids),
        text="".join(step.text for step in steps),
        finish_reason=steps[-1].finish_reason or "error",
        steps=tuple(steps),
        error=steps[-1].error,
    )
