"""Random programs of the engine: what is drawn, how it is played, and what is wrong with what came of it."""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from specdec import Drafter, Engine, Noise, Paging, SamplingParams, Scheduler, Session, Step, Target, Verifier
from specdec.engine.scheduler import Deadline, FirstCome, PrefillFirst, Priority, ShortestRemaining, Tiers, TokenBudget
from tests.architectures import tiny
from tests.components import DRAFTERS, EVERYWHERE, VERIFIERS
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.specdec.test_engine_failures import Poisoned
from tests.specdec.test_pages import Fitting
from tests.specdec.test_schedules import Drawn, SameDepth

ARCHITECTURES = {"llama": 2, "mistral_sliding": 2, "gpt2": 2, "gemma2": 2, "granite": 0, "cohere": 0, "lfm2": 0}
"""Models, and how many layers they have: the fewest that show what is special about them; 0: as ``tiny`` makes them.
A user's hook is on GPT-2, the logits of Granite and Cohere are scaled, and LFM2 has recurrent layers."""
WITHOUT_HEADS = ("gpt2", "granite", "cohere", "lfm2")
"""Architectures that tiny heads are not made for."""
UNTIED = ("llama", "mistral_sliding")
"""Those that may have NaN among their embeddings."""
VOCAB, BAD = 24, 23
POISONED = "poisoned"
"""A drafter whose drafts make NaN of all that sees them, now and then: token ``BAD``, which the model hardly says."""

REQUESTS: tuple[tuple[list[int], SamplingParams], ...] = (
    ([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_new_tokens=7)),
    ([4], SamplingParams(max_new_tokens=6, stop_token_ids=(3, 7), min_new_tokens=3)),
    ([9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3], SamplingParams(max_new_tokens=4, presence_penalty=1.5, logit_bias={3: 0.5})),
    ([5, 6, 5, 6, 5], SamplingParams(max_new_tokens=8, repetition_penalty=1.3)),
    ([3, 3, 3], SamplingParams(max_new_tokens=8, temperature=1.0, seed=1)),
    ([8, 1], SamplingParams(max_new_tokens=1, temperature=1.0, seed=2)),
    ([2, 4, 6, 8, 10, 12, 14], SamplingParams(max_new_tokens=6, temperature=0.7, seed=3, stop_token_ids=(5,))),
    ([7], SamplingParams(max_new_tokens=7, temperature=1.3, top_k=5, seed=4)),
    ([1, 2, 1, 2, 1], SamplingParams(max_new_tokens=6, temperature=0.9, top_p=0.8, seed=5, frequency_penalty=1.0)),
    ([*range(1, 20), *range(19, 0, -1)], SamplingParams(max_new_tokens=10)),  # up to the end of its slot
)
METHODS: tuple[str, ...] = ("admit", "observe", "prepare", "propose", "trimmed", "release")
SEAMS = (*METHODS, "plan", "forward", "laws", "on_round", "on_turn")
"""Where a program is broken off: a session's methods, the scheduler, the target, the rule, and who looks on."""
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "first come": FirstCome,
    "budget": partial(TokenBudget, 24, least=3),
    "prefill first": PrefillFirst,
    "priority": partial(Priority, 32, least=3, ageing=0.01),
    "shortest": partial(ShortestRemaining, 32, least=3, preempts=True, ageing=0.01),
    "deadline": partial(Deadline, 32, least=3, patience=0.05),
    "tiers": partial(Tiers, 32, least=3, batch_rows=1),
}
RANDOM: dict[str, type[Drawn]] = {"random": SameDepth, "random depth": Drawn, "fitting": Fitting}
"""Schedulers that are made of a program's seed; the last one looks for free pages."""
LONGEST = 48
MEMORIES = {
    "rows": None,
    "shared rows": Paging(shared=True),
    "pages": Paging(page_size=4),
    "packed": Paging(page_size=4, pages=LONGEST // 4, reserve=0.0),
    "packed and shared": Paging(page_size=4, pages=LONGEST // 4, reserve=0.0, shared=True),
    "packed and swapped": Paging(page_size=2, pages=LONGEST // 2, reserve=0.3, swap=2**20),
    "packed, shared and swapped": Paging(page_size=4, pages=LONGEST // 4, reserve=0.0, shared=True, swap=2**20),
    "reserved and shared": Paging(page_size=4, pages=LONGEST // 4, shared=True),
    "reserved, shared and swapped": Paging(page_size=4, pages=LONGEST // 4, shared=True, swap=2**20),
}
"""Where keys and values are. Of what is packed there is room for two or three requests."""


class FaultError(Exception): ...


class Interrupt(KeyboardInterrupt): ...


class Exit(SystemExit): ...


BROKEN_BY = (FaultError, FaultError, Interrupt, Exit)


class Seams:
    """Raises at the calls of a program's seams that it names; they are counted from 0."""

    def __init__(self, faults: Sequence[tuple[str, int, int]]):
        self._faults, self._calls = {each[:2]: BROKEN_BY[each[2]] for each in faults}, Counter[str]()

    def called(self, seam: str, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
        # A release has given up what it gives up when it fails.
        result = call(*given, **options) if seam == "release" else None
        number, self._calls[seam] = self._calls[seam], self._calls[seam] + 1
        if (seam, number) in self._faults:
            raise self._faults[seam, number](seam)
        return result if seam == "release" else call(*given, **options)

    def lay(self, owner: Any, name: str, seam: str) -> None:
        setattr(owner, name, partial(self.called, seam, getattr(owner, name)))


class Failing(Wrapped):
    def __init__(self, inner: Session, seams: Seams):
        super().__init__(inner)
        for name in METHODS:
            seams.lay(self, name, name)


@cache
def target_of(architecture: str, drafter: str = "") -> Target:
    """In float64 for marginals: among 64 continuations a round, one is soon drawn next to float32's rounding."""
    layers = ARCHITECTURES[architecture]
    made = tiny_model(architecture, vocab_size=VOCAB, layers=layers) if layers else tiny(architecture, vocab_size=VOCAB)
    model: Any = made.double() if drafter == "marginals" else made
    if architecture == "gpt2":
        model.transformer.register_forward_pre_hook(lambda module, given: None)
    with torch.no_grad():
        if architecture in UNTIED:
            model.get_output_embeddings().weight[BAD] = model.get_output_embeddings().weight[0]
        if drafter == POISONED:
            model.get_input_embeddings().weight[BAD] = torch.nan
    return Target(model)


@cache
def drafter_of(architecture: str, name: str) -> Drafter:
    return Poisoned(BAD, 5) if name == POISONED else DRAFTERS[name](target_of(architecture, name).model)


@cache
def names_for(architecture: str) -> list[str]:
    heads = ("eagle", "peagle", "mtp", "medusa", "block")
    found = [POISONED] * 3 if architecture in UNTIED else []
    if not ARCHITECTURES[architecture]:
        return ["ngram", "suffix", "model_chain_iid", "model_tree_iid"]
    return found + [name for name in DRAFTERS if not (architecture in WITHOUT_HEADS and name.startswith(heads))]


@cache
def rules_for(architecture: str, drafter: str) -> tuple[str, ...]:
    return tuple(name for name, kind in VERIFIERS.items() if takes(kind(), drafter_of(architecture, drafter)))


def takes(verifier: Verifier, drafter: Drafter) -> bool:
    try:
        verifier.check(drafter)
    except ValueError:
        return False
    return True


@cache
def lonely(architecture: str, drafter: str | None, rule: str) -> Engine:
    """An engine for one request at a time, plain without a drafter."""
    model = None if drafter is None else drafter_of(architecture, drafter)
    return Engine(target_of(architecture, drafter or ""), model, VERIFIERS[rule](), max_length=LONGEST, recording="off")


@cache
def alone(architecture: str, drafter: str | None, rule: str, index: int) -> tuple[int, ...]:
    """The output of a request by itself, its prompt in one piece."""
    prompt, sampling = REQUESTS[index]
    (output,) = lonely(architecture, drafter, rule).generate([prompt], replace(sampling, stream=index))
    return output.token_ids


@dataclass(frozen=True)
class Program:
    architecture: str
    drafter: str
    plain: bool
    verifier: int
    scheduler: str
    memory: str
    seed: int
    slots: int
    prefill_chunk: int
    recording: str
    check: bool
    faults: tuple[tuple[str, int, int], ...]
    actions: tuple[tuple[str, int], ...]

    @property
    def rule(self) -> str:
        rules = rules_for(self.architecture, self.drafter)
        return rules[self.verifier % len(rules)]

    def policy(self) -> Scheduler:
        if self.scheduler in SCHEDULERS:
            return SCHEDULERS[self.scheduler]()
        # 60 turns at random, then on to the end.
        return RANDOM[self.scheduler](np.random.default_rng(self.seed), turns=240)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    architecture = draw(st.sampled_from(list(ARCHITECTURES)))
    number = st.integers(0, 50)
    kinds = ("submit", "submit", "plain", "stream", "stream", "next", "next", "close", "abort", "step", "step", "step")
    action = st.tuples(st.sampled_from(kinds), number)
    fault = st.tuples(st.sampled_from(SEAMS), st.integers(0, 12), st.integers(0, len(BROKEN_BY) - 1))
    recurrent = architecture == "lfm2"  # whose states no requests share
    memory = draw(st.sampled_from(("rows", *(name for name in MEMORIES if not (recurrent and "shared" in name)))))
    return Program(
        architecture,
        draw(st.sampled_from(names_for(architecture))),
        plain=draw(st.sampled_from((False, False, False, False, True))),
        verifier=draw(number),
        scheduler=draw(st.sampled_from((*SCHEDULERS, *(RANDOM if memory == "rows" else ("fitting",))))),
        memory=memory,
        seed=draw(st.integers(0, 2**32 - 1)),
        slots=draw(st.integers(1, 4)),
        prefill_chunk=draw(st.sampled_from((1, 3, 5, 64))),
        recording=draw(st.sampled_from(("off", "decisions", "rounds", "auto"))),
        check=draw(st.sampled_from((False, False, False, False, True))),
        faults=tuple(draw(st.one_of(st.just([]), st.lists(fault, max_size=3)))),
        actions=tuple(draw(st.lists(action, min_size=6, max_size=25))),
    )


@dataclass
class Asked:
    index: int
    speculate: bool
    steps: list[Step]
    dropped: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for step in self.steps for token in step.token_ids)


class Player:
    def __init__(self, program: Program):
        self.program, self.asked, self.faults = program, list[Asked](), 0
        target, drafter = target_of(program.architecture, "" if program.plain else program.drafter), None
        seams, rule, policy = Seams(program.faults), VERIFIERS[program.rule](), program.policy()
        if not program.plain:
            drafter = drafter_of(program.architecture, program.drafter)
            drafter = Wrapping(drafter, partial(Failing, seams=seams))
        chunk, memory = program.prefill_chunk, MEMORIES[program.memory]
        options: dict[str, Any] = {"max_batch_size": program.slots, "max_length": LONGEST, "prefill_chunk": chunk}
        options |= {"recording": program.recording, "check": program.check, "cache": memory}
        self.engine = Engine(target, drafter, rule, scheduler=policy, **options)
        for seam in {each[0] for each in program.faults} & {"on_round", "on_turn"}:
            setattr(self.engine, seam, lambda *seen: None)
            seams.lay(self.engine, seam, seam)
        seams.lay(rule, "laws", "laws")
        seams.lay(policy, "plan", "plan")
        seams.lay(self.engine.runner, "run", "forward")
        self._submitted: dict[int, Asked] = {}
        self._streams: list[tuple[Asked, Generator[Step, None, None]]] = []

    def run(self) -> None:
        for action, number in self.program.actions:
            getattr(self, f"_{action}")(number)
        for _ in range(3000):
            if not (self.engine.unfinished or self._streams):
                break
            self._step(0)
            self._next(0)
        self._step(0)  # the last steps after a fault

    def _ask(self, number: int, speculate: bool = True) -> tuple[Asked, list[int], SamplingParams]:
        index = number % len(REQUESTS)
        speculate &= not self.program.plain
        self.asked.append(Asked(index, speculate, []))
        prompt, sampling = REQUESTS[index]
        asked = {"priority": number % 3 - 1, "deadline": (None, 0.1, 0.01)[number % 3]}
        return self.asked[-1], prompt, replace(sampling, stream=index, **asked)

    def _submit(self, number: int, speculate: bool = True) -> None:
        asked, prompt, sampling = self._ask(number, speculate)
        self._submitted[self.engine.submit(prompt, sampling, speculate=asked.speculate)] = asked

    def _plain(self, number: int) -> None:
        self._submit(number, speculate=False)

    def _stream(self, number: int) -> None:
        asked, prompt, sampling = self._ask(number)
        stream = self.engine.stream([prompt], sampling, speculate=asked.speculate)
        assert isinstance(stream, Generator)
        self._streams.append((asked, stream))

    def _next(self, number: int) -> None:
        if self._streams:
            place = number % len(self._streams)
            asked, stream = self._streams[place]
            try:
                asked.steps.append(next(stream))
            except StopIteration:
                del self._streams[place]
            except BROKEN_BY:
                self.faults += 1
                asked.dropped = True
                del self._streams[place]

    def _close(self, number: int) -> None:
        if self._streams:
            asked, stream = self._streams.pop(number % len(self._streams))
            asked.dropped = True
            self._tried(stream.close)

    def _abort(self, number: int) -> None:
        if self._submitted:
            chosen = list(self._submitted)[number % len(self._submitted)]
            self._submitted[chosen].dropped = True
            self._tried(partial(self.engine.abort, chosen))

    def _step(self, number: int) -> None:
        for step in self._tried(self.engine.step) or ():
            self._submitted[step.request].steps.append(step)

    def _tried(self, call: Any) -> Any:
        try:
            return call()
        except BROKEN_BY:
            self.faults += 1
            return None


def differences(player: Player) -> list[str]:
    program, found = player.program, list[str]()
    if player.engine.unfinished:
        found.append(f"{player.engine.unfinished} requests do not end")
    for number, asked in enumerate(player.asked):
        sampling = REQUESTS[asked.index][1]
        drafter = program.drafter if asked.speculate and not sampling.greedy else None
        ended = [step.finish_reason for step in asked.steps if step.finish_reason is not None]
        if not asked.dropped and len(ended) != 1:
            found.append(f"request {number} ended {len(ended)} times")
        rounds = [step.round for step in asked.steps if step.token_ids]
        if rounds != sorted(set(rounds)):
            found.append(f"the rounds of request {number} are not counted one by one")
        # At a temperature, another draft may be another output of the same law.
        adapts = drafter is not None and drafter_of(program.architecture, drafter).adapts
        if adapts or (drafter is not None and program.scheduler == "random depth"):
            continue
        rule = program.rule
        if drafter is None and VERIFIERS[rule].noise is Noise.FRESH:
            rule = EVERYWHERE  # plain decoding is the same with every rule of this kind
        expected = alone(program.architecture, drafter, rule, asked.index)
        whole = not asked.dropped and ended != ["error"]
        if asked.tokens != (expected if whole else expected[: len(asked.tokens)]):
            found.append(f"request {number} ({REQUESTS[asked.index]}): {asked.tokens}, alone {expected}")
        if ended == ["error"] and not player.faults and program.drafter != POISONED:
            found.append(f"request {number} ended with {asked.steps[-1].error}")
    return found


def play(program: Program) -> list[str]:
    player = Player(program)
    player.run()
    return differences(player)
