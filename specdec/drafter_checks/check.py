"""Everything that is checked of a drafter, in one call."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec.acceptance import Plain
from specdec.attributes import check_drafter_attributes, missing_methods
from specdec.drafter_checks import failures, fit, outputs, repeats
from specdec.drafter_checks import rules as every_rule
from specdec.drafter_checks.findings import Finding, Status, failed, not_applicable, not_tried, passed
from specdec.drafter_checks.playing import Job, Run, Stage, prompts_for, run
from specdec.drafter_checks.watched import Log, MalformedError
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.wellformed import FATAL, Form

ATTRIBUTES = "attributes"
BIND = "fits the target"
DECODES = "drafts to the end"
SLOTS = "slots are left alone"
LEAVES = "q at the leaves"
TOP = "top tokens"

_PACKAGE = Path(__file__).parent.parent
_TREE = "trees: "


def check_drafter(
    make: Callable[[], Drafter],
    target: Target,
    *,
    verifier: Verifier | None = None,
    rules: Sequence[Verifier] | None = None,
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

    The first failure ends it, and so does a statistical proof while draws still come in. Everything is seeded, so that
    a second call returns the same lines. A drafter that draws as it says fails one of the statistical checks by chance
    with a probability of 2e-5 at most: 1e-5 for what it draws, and as much for outputs.

    Args:
        make: Makes a new drafter, every time it is called: a class, or a function. Drafters made by it may share a
            model.
        target: The target, best in float32: in other dtypes outputs and drafts cannot be compared exactly.
        verifier: The acceptance rule that the drafter is tried with; None for an exact one that takes its drafts, of
            those that have been imported.
        rules: The rules that are asked about the rounds of the other checks, whether outputs follow the target; None
            for all exact ones that take its drafts, have been imported and need no arguments.
        prompts: Texts or token ids, at least two; None for built-in ones.
        sampling: Parameters of sampled requests; None, or a temperature of 0, for temperature 1.
        tokens: Length of most outputs.
        rounds: Length of a long output, in rounds, over which drafts must not drift.
        draws: Drafts from which it is tested whether q is what was drawn, and what every rule makes of them.
        max_length: Tokens per request; None for what the target has, at most 1024.
        options: More arguments of the engines. The default saves the time that packing weights takes, which does not
            pay in runs this short.
        progress: Called with the name of a check when it begins.

    Raises:
        ValueError: The arguments do not fit each other, such as a verifier that does not take such drafts.
    """
    length = max_length or min(target.max_length, 1024)
    sampled = _sampled(sampling or SamplingParams(temperature=1.0), tokens)
    prompts = prompts_for(target, prompts, seed=sampled.seed or 0)
    room = length - max(len(prompt) for prompt in prompts)
    if room < tokens + 4:
        raise ValueError(f"the longest prompt leaves room for {room} tokens of {length}: give shorter prompts")
    announced, drafter = _announced(make, target)
    if drafter is None:
        return [announced]
    rule = verifier if verifier is not None else _fitting(drafter)
    rule.check(drafter)
    log = Log(depth=drafter.max_depth, adapts=drafter.adapts)
    stage = Stage(make, target, rule, length, log, options)
    has_leaf_probs = drafter.has_leaf_probs
    every = every_rule.exact_rules(drafter) if rules is None else list(rules)
    for each in every:
        each.check(drafter)
    del drafter  # it may hold a model, and every check makes a new one

    jobs = outputs.mixed(prompts, sampled, tokens)
    begin = progress or (lambda check: None)
    begin("plain decoding")
    plain = outputs.plainly(stage, jobs)  # before the drafter has seen the target
    watched = every_rule.ByRule(every, stage)
    done: list[Run] = []
    found = [announced]

    def repeated() -> list[Finding]:
        return repeats.repeats(stage, prompts, sampled, tokens=tokens, rounds=rounds, attempt=_attempt)

    def leaves() -> Finding:
        return (
            _leaves(stage, jobs) if has_leaf_probs else not_applicable(LEAVES, "the drafter says has_leaf_probs=False")
        )

    def nan() -> Finding:
        return _nan(stage, prompts, sampled, tokens, found)

    def by_rule() -> list[Finding]:
        return every_rule.by_rule(watched, every, stage, jobs, plain, _attempt)

    checks: list[tuple[Sequence[str], Callable[[], list[Finding]]]] = [
        ([BIND], lambda: [_binds(stage)]),
        ([DECODES], lambda: [_decodes(stage, jobs, done, watched)]),
        ([outputs.GREEDY], lambda: [outputs.greedy_outputs(stage, jobs, done, plain)]),
        ([outputs.ENDS], lambda: [outputs.ends(stage, prompts, sampled)]),
        (repeats.ALL, repeated),
        ([outputs.RECORDED], lambda: [outputs.recorded_rounds(stage, jobs)]),
        (fit.ALL, lambda: fit.fit(stage, prompts, sampled, watched, draws=draws)),
        ([failures.NAN], lambda: [nan()]),
        ([LEAVES], lambda: [leaves()]),
        ([every_rule.name_of(each) for each in every], by_rule),
    ]
    for names, tried in checks:
        wrong = next((finding for finding in [*found, *_looked_at(log)] if finding.failed), None)
        if wrong is None and names:
            begin(names[0])
            found += _several(names, tried)
        else:
            found += [not_tried(name, f"“{wrong.check}” failed") for name in names if wrong is not None]
    return [*found[:3], *_looked_at(log), *found[3:]]


def assert_conforms(make: Callable[[], Drafter], target: Target, **options: Any) -> None:
    """Tries a drafter against the whole contract.

    Args:
        make: Makes a new drafter, every time it is called.
        target: The target, in float32.
        **options: More arguments of ``check_drafter``.

    Raises:
        AssertionError: A check failed. Names all that did, with what is wrong.
        ValueError: See ``check_drafter``.
    """
    wrong = [finding for finding in check_drafter(make, target, **options) if finding.failed]
    if wrong:
        raise AssertionError("the drafter breaks its contract:\n" + "\n".join(map(str, wrong)))


def _binds(stage: Stage) -> Finding:
    """Make an engine with the drafter."""
    stage.engine(slots=3, chunk=7)
    return passed(BIND, f"{stage.target.name}; tried with {type(stage.verifier).__name__}")


def _looked_at(log: Log) -> list[Finding]:
    """Returns the findings about trees, slots and top tokens, in all rounds so far."""
    found = list(_trees(log))
    if not log.top_tokens:
        found.append(not_applicable(TOP, "the drafter says top_tokens=0"))
    elif log.untold is not None:
        found.append(failed(TOP, log.untold))
    else:
        found.append(passed(TOP, f"told of {log.told} nodes; what the target said next is among them"))
    return found


def _nan(
    stage: Stage,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    tokens: int,
    so_far: Sequence[Finding],
) -> Finding:
    """Have requests with NaN in their context decoded beside others."""
    alone = [each for each in so_far if each.check in (repeats.SEED, repeats.COMPANY, repeats.REUSE)]
    comparable = all(finding.status is Status.PASSED for finding in alone)
    return failures.nan_logits(stage, prompts, sampling, tokens=tokens, comparable=comparable)


def _announced(make: Callable[[], Drafter], target: Target) -> tuple[Finding, Drafter | None]:
    """Returns whether a drafter has the attributes that it must have, and the drafter if it does."""
    lacking = missing_methods(make) if isinstance(make, type) else None
    if lacking is not None:
        return failed(ATTRIBUTES, lacking), None
    drafter = make()
    try:
        check_drafter_attributes(drafter)
    except ValueError as error:
        return failed(ATTRIBUTES, str(error)), None
    laws = ", ".join(law.name for law in sorted(drafter.laws))
    words = f"max_nodes={drafter.max_nodes}, max_depth={drafter.max_depth}, laws={laws}, is_chain={drafter.is_chain}"
    return passed(ATTRIBUTES, words), drafter


def _decodes(stage: Stage, jobs: Sequence[Job], done: list[Run], watched: every_rule.ByRule) -> Finding:
    """Decode all jobs in one engine; what comes of them goes to ``done``."""
    done += run(stage.engine(slots=3, chunk=7), jobs, rows_of_q=0, on_round=watched.note)
    log = stage.log
    if not log.nodes:
        return failed(DECODES, f"nothing was drafted in {log.trees} rounds: give prompts for which it drafts something")
    return passed(DECODES, f"{len(jobs)} requests, {log.nodes} nodes in {log.trees} rounds")


def _sampled(sampling: SamplingParams, tokens: int) -> SamplingParams:
    """Returns parameters of a sampled request that goes on to its length."""
    return replace(
        sampling,
        temperature=1.0 if sampling.greedy else sampling.temperature,
        max_new_tokens=tokens,
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
        n=1,
        seed=sampling.seed or 0,
        stream=None,
    )


def _fitting(drafter: Drafter) -> Verifier:
    """Returns an exact rule that takes a drafter's drafts and needs no arguments.

    Raises:
        ValueError: No such rule has been imported.
    """
    found = every_rule.exact_rules(drafter)
    if not found:
        raise ValueError(
            f"no exact rule that takes drafts of {type(drafter).__name__} has been imported: import one of "
            f"yours or of the package verifiers, or give verifier=…"
        )
    return found[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _trees(log: Log) -> Iterator[Finding]:
    """Yields a finding for every check of what ``propose`` does, in all rounds so far."""
    fatal = next((form for form in Form if form in FATAL and form in log.flaws), None)
    passed_fatal = False
    for form in Form:
        flaw = log.flaws.get(form)
        name = f"{_TREE}{form}"
        if flaw is not None:
            place = "" if flaw.node is None else f"node {flaw.node}: "
            yield failed(name, place + flaw.what)
            passed_fatal = passed_fatal or form is fatal
        elif passed_fatal:
            yield not_tried(name, f"“{_TREE}{fatal}” failed")
        elif form in (Form.Q, Form.POSSIBLE) and not log.drawn:
            yield not_applicable(name, "no node was drawn from a q")
        else:
            yield passed(name, _count(log.trees, "tree"))
    changed = f"propose changed slots.{log.changed}, which belongs to the engine: work on a copy"
    yield (
        failed(SLOTS, changed)
        if log.changed
        else passed(SLOTS, f"propose changed nothing in {_count(log.trees, 'round')}")
    )


class _ReadsLeaves(Plain):
    """Accepts nothing, and wants q at the leaves. The class takes no drafts, so no message names it as a remedy."""

    needs_leaf_probs = True

    def __init__(self, like: Verifier, drafter_laws: frozenset):
        self.exactness, self.samplings = like.exactness, like.samplings | drafter_laws


def _leaves(stage: Stage, jobs: Sequence[Job]) -> Finding:
    """Have q given at every node, as a rule that reads it there needs it."""
    log = Log(depth=stage.log.depth, adapts=stage.log.adapts)
    apart = replace(stage, log=log)
    rule = _ReadsLeaves(stage.verifier, frozenset(stage.make().laws))
    try:
        run(apart.engine(slots=3, verifier=rule), jobs, rows_of_q=0)
    except MalformedError:
        pass  # it is in the log
    flaw = next(iter(log.flaws.values()), None)
    if flaw is not None:
        return failed(LEAVES, f"bound with leaf_probs=True: node {flaw.node}: {flaw.what}")
    return passed(LEAVES, f"bound with leaf_probs=True, q is given at every node of {log.trees} trees")


def _attempt(check: str, tried: Callable[[], Finding]) -> Finding:
    """Returns the finding of a check; an exception of the drafter is a failure."""
    try:
        return tried()
    except MalformedError:
        return not_tried(check, "a malformed tree ended it")
    except Exception as error:
        return failed(check, _words(error))


def _several(checks: Sequence[str], tried: Callable[[], list[Finding]]) -> list[Finding]:
    """Returns the findings of several checks that are made together; an exception is a failure of the first of them."""
    found: list[Finding] = []

    def first() -> Finding:
        found.extend(tried())
        return found[0]

    finding = _attempt(checks[0], first)
    found = found or [finding]
    wrong = next((each for each in found if each.failed), finding)
    return [*found, *(not_tried(check, f"“{wrong.check}” failed") for check in checks[len(found) :])]


def _words(error: Exception) -> str:
    """Returns an error in words, with the last line outside of this package that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _ours(frame.filename)]
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) or "site-packages" in path.parts or filename.startswith("<")
