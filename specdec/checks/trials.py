"""The trials of a drafter. Each returns what it found, or ends in ``Broken``, ``NotApplicable`` or ``NotTried``."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from specdec.acceptance import Plain
from specdec.cache.pages import Paging
from specdec.checks import draws as q
from specdec.checks.playing import LONG_CHUNK, Broken, Draft, Job, NotApplicable, NotTried, Run, Stage, run
from specdec.checks.ties import examine
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
from specdec.machine import dtype_name
from specdec.quantization.base import rounded_to
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.types import Noise

ROUNDING = 1e-4  # entries of q that differ by less are equal up to rounding
EXPECTED_ROUNDING = 1e-3  # the same of expected numbers of accepted tokens
_CHECKPOINTS = 12  # rounds of a long output that are compared with a new drafter
_MIXED = (3, 7)  # slots, and pieces of prompts, of a ragged batch


class Trials:
    """Trials of a drafter on one stage; arguments are those of ``check_drafter``."""

    def __init__(
        self,
        stage: Stage,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        rounds: int,
        draws: int,
    ):
        self.stage, self.prompts, self.sampling = stage, prompts, sampling
        self._rounds, self._num_draws = rounds, draws
        self._draws: q.Draws | None = None
        tokens = sampling.max_new_tokens
        greedy = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=sampling.seed, stream=0)
        kinds = [
            greedy,
            sampling,
            replace(greedy, repetition_penalty=1.3, max_new_tokens=tokens + 1),
            replace(sampling, temperature=0.7, max_new_tokens=tokens + 2),
            replace(greedy, max_new_tokens=max(tokens - 3, 1)),
            replace(sampling, temperature=1.5, top_p=0.9),
        ]
        self._mixed = [
            Job(prompt, replace(kinds[number % len(kinds)], stream=number))
            for number, prompt in enumerate([*prompts, prompts[0][:1], *prompts[:2]])
        ]
        self._pair = [Job(prompts[0], greedy), Job(prompts[-1], replace(sampling, stream=1))]
        # Before the drafter has seen the target.
        plain = replace(stage, make=lambda: None).engine(*_MIXED)
        self._plain = run(plain, [replace(job, speculate=False) for job in self._mixed])
        self._outputs: list[Run] = []
        self._alone: list[Run] = []
        self._rounds_to: torch.dtype | None = None

    def binds(self) -> str:
        engine = self.stage.engine(*_MIXED)
        models = (engine.runner, *(() if engine.session is None else engine.session.models))
        rounded = (rounded_to(model.model if isinstance(model, ModelRunner) else model) for model in models)
        self._rounds_to = next((dtype for dtype in rounded if dtype is not None), None)
        return f"{self.stage.target.name}; tried with {type(self.stage.verifier).__name__}"

    def decodes(self) -> str:
        self._outputs = run(self.stage.engine(*_MIXED), self._mixed, rows_of_q=0)
        nodes, trees = self.stage.seen["nodes"], self.stage.seen["trees"]
        if not nodes:
            raise Broken(f"nothing was drafted in {trees} rounds: give prompts for which it drafts something")
        return f"{len(self._mixed)} requests, {nodes} nodes in {trees} rounds"

    def greedy_outputs(self) -> str:
        shared, pairs = self.stage.verifier.noise is Noise.SHARED, zip(self._outputs, self._plain, strict=True)
        compared = [(job, *pair) for job, pair in zip(self._mixed, pairs, strict=True) if shared or job.sampling.greedy]
        where = f"{len(compared)} outputs in a ragged batch of 3 slots, refilled, with prompts in pieces of 7"
        ties = 0
        for job, drafted, alone in compared:
            if drafted.tokens == alone.tokens:
                continue
            pairs = enumerate(zip_longest(drafted.tokens, alone.tokens))
            same = next(at for at, (one, other) in pairs if one != other)
            far = "" if shared else _unexplained(self.stage, job, drafted.tokens, alone.tokens, same)
            if shared or far:
                raise Broken(f"an output differs from plain decoding's from token {same} on{far} ({where})")
            ties += 1
        return f"equal to plain decoding: {where}" + (f"; {ties} ties" if ties else "")

    def ends(self) -> str:
        """Ask for a few tokens only, for a prompt of one token, and for all that the cache has room for."""
        jobs = []
        for number, length in enumerate((1, 2, 3, 4, 1, 2)):
            base = self.sampling if number % 2 else self._pair[0].sampling
            prompt = self.prompts[number % len(self.prompts)] if number < 4 else self.prompts[0][:1]
            jobs.append(Job(prompt, replace(base, max_new_tokens=length, stream=number)))
        longest, room = max(self.prompts, key=len), self.stage.max_length
        filled = (longest * (room // len(longest) + 1))[: room - 12]
        jobs.append(Job(filled, replace(self._pair[0].sampling, max_new_tokens=12, stream=9)))
        for job, done in zip(jobs, run(self.stage.engine(slots=2), jobs), strict=True):
            if len(done.tokens) != job.sampling.max_new_tokens:
                raise Broken(f"{len(done.tokens)} tokens came where {job.sampling.max_new_tokens} were wanted")
        return f"{len(jobs)} requests: 1 to 4 tokens, prompts of one token, the last of {room} positions"

    # A request's drafts depend on the request alone: the same ones come in any batch, slot and after any history.

    def _check_comparable(self, *, batches: bool = True) -> None:
        """Refuse what cannot be compared between histories, and with ``batches`` between sizes of a batch."""
        dtype = self.stage.target.dtype
        if dtype not in (torch.float32, torch.float64):
            raise NotApplicable(
                f"in {dtype_name(dtype)}, results differ with the size of a batch: try it with the target in float32"
            )
        if batches and self._rounds_to is not None:
            raise NotApplicable(
                f"quantized layers round to {dtype_name(self._rounds_to)}, so that results differ with the size of a "
                f"batch: try it without quantization"
            )
        if batches and self.stage.adapts:
            raise NotApplicable(
                "the drafter says adapts=True: its drafts may depend on other requests and on earlier rounds"
            )

    def _each_alone(self, engine: Callable[[], Engine]) -> list[Run]:
        return [run(engine(), [job])[0] for job in self._pair]

    def _alike(self, runs: Sequence[Run], where: str, hint: str = "", *, alone: Sequence[Run] = ()) -> str:
        """Compare runs of the two requests with those in which each was alone."""
        for job, mine, wanted in zip(self._pair, runs, alone or self._alone, strict=True):
            for number, (draft, other) in enumerate(zip(mine.drafts, wanted.drafts, strict=False)):
                if (difference := draft.difference(other, ROUNDING)) is not None:
                    raise Broken(
                        f"{where}, it drafts otherwise in round {number} of a {job.kind} request: {difference}{hint}"
                    )
            if mine.tokens != wanted.tokens:
                raise Broken(f"{where}, a {job.kind} request has another output than alone")
        return f"{where}, it drafts the same"

    def same_seed(self) -> str:
        self._check_comparable(batches=False)
        self._alone = self._each_alone(self.stage.engine)
        hint = " (take random numbers from specdec.random)"
        return self._alike(self._each_alone(self.stage.engine), "in a second run with the same seed", hint)

    def company(self) -> str:
        """Decode both requests in one batch with others, one of which does not speculate."""
        self._check_comparable()
        mates = []
        for number, prompt in enumerate(self.prompts):
            sampling = replace(self._pair[number % 2].sampling, max_new_tokens=7 + 3 * number, stream=50 + number)
            mates.append(Job(prompt, sampling, speculate=number != 1))
        jobs = [mates[0], self._pair[0], *mates[1:], self._pair[1]]
        runs = run(self.stage.engine(slots=len(jobs)), jobs)
        return self._alike([runs[1], runs[-1]], f"in a batch of {len(jobs)} requests")

    def pieces(self) -> str:
        self._check_comparable()
        return self._alike(self._each_alone(lambda: self.stage.engine(chunk=3)), "with prompts in pieces of 3 tokens")

    def reuse(self) -> str:
        """Decode both requests in a slot that others have left: one at its end, one in the middle."""
        self._check_comparable()
        engine = self.stage.engine()
        others = [replace(job, prompt=prompt) for job, prompt in zip(self._pair, self.prompts[1:], strict=False)]
        run(engine, others)
        run(engine, others[:1], stop_after=2)
        hint = " (what do admit and release leave behind?)"
        return self._alike(self._each_alone(lambda: engine), "in a slot that others have used", hint)

    def shared_beginnings(self) -> str:
        self._check_comparable()
        engine = self.stage.engine(cache=Paging(page_size=1, shared=True))
        if engine.session is None or engine.session.lookback is None:
            raise NotApplicable("its session does not say lookback, so that its requests share nothing")
        self._each_alone(lambda: engine)
        runs, reused = self._each_alone(lambda: engine), engine.page_counts.reused
        return self._alike(runs, f"with {reused} tokens of prompts from the caches", " (see Session.lookback)")

    def drift(self) -> str:
        """Compare drafts late in a long output with those of a new drafter that is given the same sequence."""
        self._check_comparable()
        seen = 0
        for job in self._pair:
            length = min(self._rounds * (self.stage.max_depth + 1), self.stage.max_length - len(job.prompt))
            long = replace(job, sampling=replace(job.sampling, max_new_tokens=length))
            first, fresh = self.stage.engine(), self.stage.engine()
            first.runner.joins = fresh.runner.joins = False  # so that every drafter drafts in its first round
            done = run(first, [long], stop_after=self._rounds, rows_of_q=1)[0]
            last = len(done.drafts) - 1
            if last < 1:
                continue
            seen = max(seen, last + 1)
            for number in sorted({last - last * k // _CHECKPOINTS for k in range(_CHECKPOINTS)}):
                before = done.before[number]
                prompt = (*job.prompt, *done.tokens[:before])
                again = Job(prompt, replace(long.sampling, max_new_tokens=length - before))
                turns = -(-len(prompt) // LONG_CHUNK)  # to the end of its first round
                anew = run(fresh, [again], stop_after=turns, rows_of_q=1)[0].drafts
                difference = _apart(done.drafts[number], anew[0]) if anew else "nothing was proposed"
                if difference is not None:
                    raise Broken(
                        f"in round {number} of a {job.kind} request, {before} tokens into its output, it drafts "
                        f"otherwise than a new drafter that is given the same sequence: {difference}"
                    )
        return f"over {seen} rounds, it drafts as a new drafter that is given the same sequence"

    def recorded_rounds(self) -> str:
        """Play rounds as an engine records them, with the drafter itself, and compare them with other rounds."""
        played = []
        for recording in ("off", "rounds"):
            with self.stage.engine(slots=3, watch=False, optimize=True, recording=recording) as engine:
                played.append(run(engine, self._mixed, watch=False))
        for job, wanted, found in zip(self._mixed, *played, strict=True):
            if self.stage.adapts:
                break  # its drafts may depend on the order in which rounds of several requests are played
            for number, steps in enumerate(zip_longest(wanted.steps, found.steps)):
                there = [step for step in steps if step is not None]
                apart = max(step.expected_accepted for step in there) - min(step.expected_accepted for step in there)
                if len(there) == 2 and there[0].token_ids == there[1].token_ids and apart < EXPECTED_ROUNDING:
                    continue
                said = [f"{step.token_ids} with {step.expected_accepted:.3g} accepted" for step in there]
                raise Broken(
                    f"in round {number} of a {job.kind} request, a recorded round gives {said[-1]}, and another one "
                    f"{said[0]} (is all of its state in the same tensors throughout?)"
                )
        return f"{len(self._mixed)} requests go as in rounds that are not recorded"

    def drawn(self, check: str) -> str:
        """Draws against q and against each other, and drafts that claim to be chosen and are drawn after all."""
        if check == q.FIRST:
            self._draws = q.played(self.stage, self.prompts, self.sampling, self._num_draws)
        if self._draws is None:
            raise NotTried(f"“{q.FIRST}” failed")
        return self._draws.check(check)

    def nan_logits(self) -> str:
        """Decode two requests beside others that have NaN in their context, and once more in the slots of these.

        A token that occurs in none of the good requests is given an embedding of NaN.
        """
        apart = replace(self.stage, spoiled=True)
        good, vocab = self._pair, self.stage.target.vocab_size
        embeddings = self.stage.target.model.get_input_embeddings()
        used = {token for job in good for token in job.prompt}

        def note(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            used.update(inputs[0].flatten().tolist())

        # Everything that is forwarded: rejected nodes and those that are not valid, and a head's mask token.
        first = apart.engine(slots=2)
        with embeddings.register_forward_hook(note):
            alone = run(first, good)
        used.update(token for done in alone for token in done.tokens)
        bad = next((token for token in reversed(range(vocab)) if token not in used), None)
        if bad is None:
            raise NotApplicable("every token of the vocabulary occurs in the outputs: no request can be spoiled alone")

        def nan(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output.masked_fill((inputs[0] == bad)[..., None], float("nan"))

        longest = max(self.prompts, key=len)
        spoiled = [
            Job((*longest[:-2], bad, *longest[-2:]), replace(self.sampling, stream=3)),
            Job((*self.prompts[1], bad), good[0].sampling),
        ]
        engine = apart.engine(slots=4)
        try:
            with embeddings.register_forward_hook(nan):
                beside = run(engine, [spoiled[0], good[0], spoiled[1], good[1]], may_fail=True)
                after = run(engine, [*good, *good], may_fail=True)  # in all slots
        except Broken as error:
            raise Broken(f"beside a request whose logits are NaN, a tree is malformed: {error}") from error
        if any(done.error is None for done in beside[::2]):
            raise Broken("a request whose logits are NaN did not end with an error")
        slots = "in slots of such requests"
        for where, runs in (("beside such requests", beside[1::2]), (slots, after[:2]), (slots, after[2:])):
            for mine in runs:
                if mine.error is not None:
                    raise Broken(f"{where}, another request fails: {mine.error}")
            with suppress(NotApplicable):
                self._check_comparable()
                self._alike(runs, where, alone=alone)
        return "requests with NaN in their context end with an error; beside them and in their slots, others go on"

    def leaves(self) -> str:
        """Have q given at every node, as a rule that reads it there needs it."""
        drafter = self.stage.make()
        if not drafter.has_leaf_probs:
            raise NotApplicable("the drafter says has_leaf_probs=False")
        rule = _ReadsLeaves(self.stage.verifier, frozenset(drafter.laws))
        try:
            run(replace(self.stage, verifier=rule).engine(slots=3), self._mixed, rows_of_q=0)
        except Broken as error:
            raise Broken(f"bound with leaf_probs=True: {error}") from error
        return "bound with leaf_probs=True, q is given at every node"


class _ReadsLeaves(Plain):
    """Accepts nothing, and wants q at the leaves."""

    needs_leaf_probs = True

    def __init__(self, like: Verifier, drafter_laws: frozenset):
        self.exactness, self.samplings = like.exactness, like.samplings | drafter_laws


def _apart(late: Draft, new: Draft) -> str | None:
    """Return how two drafts after the same sequence differ, where the number of the round makes no difference."""
    if not late.drawn_after and not new.drawn_after:
        return late.difference(new, ROUNDING)
    if late.draft_probs is None or new.draft_probs is None:
        return None
    # Other rounds have other random numbers, so only what the first tokens are drawn from can be compared.
    apart = float((late.draft_probs[0] - new.draft_probs[0]).abs().max())
    return f"q after the root differs by up to {apart:.2g}" if apart > ROUNDING else None


def _unexplained(stage: Stage, job: Job, drafted: Sequence[int], alone: Sequence[int], same: int) -> str:
    """Return why the dtype does not explain that two outputs part after so many tokens; empty if it does."""
    if same >= min(len(drafted), len(alone)):
        return ", where one of the two ends"
    sequence, pair = [*job.prompt, *alone[:same]], (drafted[same], alone[same])
    kv_cache = stage.options.get("kv_cache")
    tie = examine(stage.target.model, sequence, pair, job.sampling, prompt_length=len(job.prompt), kv_cache=kv_cache)
    if tie.margin is None or tie.bound is None:
        return ", with a token that is impossible there"
    if tie.margin <= tie.bound:
        return ""
    return f", where its token is {tie.margin:.2g} nats below the best, and the dtype explains {tie.bound:.2g}"
