"""Is a drafter what it says? Tries it against the contract and lists what was found.

::

    for finding in check_drafter(MyDrafter, target, verifier=RejectionVerifier(), rules=exact_rules()):
        print(finding)
    assert_conforms(MyDrafter, target, verifier=RejectionVerifier())  # in a test
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec.checks import draws as q
from specdec.checks.playing import Broken, Log, MalformedError, NotApplicable, NotTried, Stage, prompts_for
from specdec.checks.trials import Trials
from specdec.engine.parts import check_declared
from specdec.interfaces import Drafter, Verifier, why_unfit
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.wellformed import FATAL, Form

_PACKAGE = Path(__file__).parent.parent


class Status(StrEnum):
    """The end of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_APPLICABLE = "not applicable"
    """The drafter promises nothing that could be checked here."""
    NOT_TRIED = "not tried"
    """An earlier check failed, so that this one would say nothing."""


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was checked, how it ended, and what was tried or is wrong."""

    check: str
    status: Status
    detail: str

    @property
    def failed(self) -> bool:
        return self.status is Status.FAILED

    def __str__(self) -> str:
        return f"{self.check}: {self.status}: {self.detail}"


def check_drafter(
    make: Callable[[], Drafter],
    target: Target,
    *,
    verifier: Verifier,
    rules: Sequence[Verifier] = (),
    prompts: Sequence[str | Sequence[int]] | None = None,
    sampling: SamplingParams | None = None,
    tokens: int = 24,
    rounds: int = 200,
    draws: int = 4000,
    max_length: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({"optimize": False}),
    progress: Callable[[str], object] | None = None,
) -> list[Finding]:
    """Tries a drafter against the contract, and returns a line per check.

    The first failure ends it, and so does a statistical proof while draws still come in. Everything is seeded. A
    drafter that draws as it says fails by chance with a probability of 2e-5 at most: 1e-5 for what it draws, and as
    much for outputs.

    Args:
        make: Makes a new drafter, every time it is called: a class, or a function. They may share a model.
        target: The target, best in float32: in other dtypes outputs and drafts cannot be compared exactly.
        verifier: The acceptance rule that the drafter is tried with.
        rules: Exact rules that are asked whether outputs follow the target; those that do not take its drafts are left
            out. ``verifiers.exact.exact_rules()`` has all of this package.
        prompts: Texts or token ids, at least two; None for built-in ones.
        sampling: Parameters of sampled requests; None, or a temperature of 0, for temperature 1.
        tokens: Length of most outputs.
        rounds: Length of a long output, in rounds, over which drafts must not drift.
        draws: Drafts from which it is tested whether q is what was drawn, and what every rule makes of them.
        max_length: Tokens per request; None for what the target has, at most 1024.
        options: More arguments of the engines. By default no weights are packed, which does not pay in runs this short.
        progress: Called with the name of a check when it begins.
    """
    length = max_length or min(target.max_length, 1024)
    sampled = replace(
        sampling or SamplingParams(),
        temperature=1.0 if sampling is None or sampling.greedy else sampling.temperature,
        max_new_tokens=tokens,
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
        n=1,
        seed=(sampling and sampling.seed) or 0,
        stream=None,
    )
    encoded = prompts_for(target, prompts, seed=sampled.seed or 0)
    room = length - max(map(len, encoded))
    if room < tokens + 4:
        raise ValueError(f"the longest prompt leaves room for {room} tokens of {length}: give shorter prompts")
    announced = _finding("attributes", partial(_announced, make))
    if announced.failed:
        return [announced]
    drafter = make()
    every = [rule for rule in rules if why_unfit(rule, drafter) is None]
    verifier.check(drafter)
    log = Log()
    stage = Stage(make, target, verifier, length, log, drafter.max_depth, drafter.adapts, options)
    del drafter  # it may hold a model, and every check makes a new one

    begin = progress or (lambda check: None)
    begin("plain decoding")
    trials = Trials(stage, encoded, sampled, rounds=rounds, draws=draws, rules=every)
    found = [announced]
    for group in _checks(trials):
        wrong = next((finding for finding in [*found, *_seen(log)] if finding.failed), None)
        if wrong is None:
            begin(next(iter(group)))
            found += [_finding(check, tried) for check, tried in group.items()]
        else:
            found += [Finding(check, Status.NOT_TRIED, f"“{wrong.check}” failed") for check in group]
    return [*found[:3], *_seen(log), *found[3:]]


def assert_conforms(make: Callable[[], Drafter], target: Target, **options: Any) -> None:
    """Raises an ``AssertionError`` that names all checks that failed; arguments are those of ``check_drafter``."""
    wrong = [finding for finding in check_drafter(make, target, **options) if finding.failed]
    if wrong:
        raise AssertionError("the drafter breaks its contract:\n" + "\n".join(map(str, wrong)))


def _checks(trials: Trials) -> Iterator[dict[str, Callable[[], str]]]:
    """Yields the checks in their order; those of one group are made together, from the same rounds."""
    yield {"fits the target": trials.binds}
    yield {"drafts to the end": trials.decodes}
    yield {"greedy outputs": trials.greedy_outputs}
    yield {"ends of outputs and of the cache": trials.ends}
    yield {"same seed, same drafts": trials.same_seed}
    yield {"independent of batch mates": trials.company}
    yield {"independent of the prompt's pieces": trials.pieces}
    yield {"a slot is used again": trials.reuse}
    yield {"shared beginnings": trials.shared_beginnings}
    yield {"no drift": trials.drift}
    yield {"recorded rounds": trials.recorded_rounds}
    draws = q.FIRST, q.DEEPER, q.SIBLINGS, q.INDEPENDENT, q.CHOSEN
    yield {check: partial(trials.drawn, check) for check in draws}
    yield {"NaN logits": trials.nan_logits}
    yield {"q at the leaves": trials.leaves}
    for rule in trials.rules:
        yield {f"exact with {type(rule).__name__}": partial(trials.exact_with, rule)}


def _finding(check: str, tried: Callable[[], str]) -> Finding:
    ends = {Broken: Status.FAILED, NotApplicable: Status.NOT_APPLICABLE, NotTried: Status.NOT_TRIED}
    try:
        return Finding(check, Status.PASSED, tried())
    except tuple(ends) as end:
        return Finding(check, ends[type(end)], str(end))
    except MalformedError:
        return Finding(check, Status.NOT_TRIED, "a malformed tree ended it")
    except Exception as error:
        return Finding(check, Status.FAILED, _words(error))


def _words(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _ours(frame.filename)]
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) or "site-packages" in path.parts or filename.startswith("<")


def _announced(make: Callable[[], Drafter]) -> str:
    drafter = make()
    try:
        check_declared(drafter)
    except ValueError as error:
        raise Broken(str(error)) from error
    laws = ", ".join(law.name for law in sorted(drafter.laws))
    return f"max_nodes={drafter.max_nodes}, max_depth={drafter.max_depth}, laws={laws}, is_chain={drafter.is_chain}"


def _seen(log: Log) -> Iterator[Finding]:
    """Yields the findings about trees, slots and top tokens, in all rounds so far."""
    forms = list(Form)
    fatal = next((form for form in forms if form in FATAL and form in log.flaws), None)
    trees = f"{log.trees} tree{'' if log.trees == 1 else 's'}"
    for number, form in enumerate(forms):
        check, flaw = f"trees: {form}", log.flaws.get(form)
        if flaw is not None:
            place = "" if flaw.node is None else f"node {flaw.node}: "
            yield Finding(check, Status.FAILED, place + flaw.what)
        elif fatal is not None and number > forms.index(fatal):
            yield Finding(check, Status.NOT_TRIED, f"“trees: {fatal}” failed")
        elif form in (Form.Q, Form.POSSIBLE) and not log.drawn:
            yield Finding(check, Status.NOT_APPLICABLE, "no node was drawn from a q")
        else:
            yield Finding(check, Status.PASSED, trees)
    wrong = log.changed and f"propose changed slots.{log.changed}, which belongs to the engine: work on a copy"
    right = f"propose changed nothing in {log.trees} round{'' if log.trees == 1 else 's'}"
    yield Finding("slots are left alone", Status.FAILED if wrong else Status.PASSED, wrong or right)
    if not log.top_tokens:
        yield Finding("top tokens", Status.NOT_APPLICABLE, "the drafter says top_tokens=0")
    else:
        right = f"told of {log.told} nodes; what the target said next is among them"
        yield Finding("top tokens", Status.FAILED if log.untold else Status.PASSED, log.untold or right)
