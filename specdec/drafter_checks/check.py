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
from specdec.drafter_checks.playing import Job, Run, Stage, run
from specdec.drafter_checks.prompts import prompts_for
from specdec.drafter_checks.watched import Log, MalformedError
from specdec.engine.engine import Engine
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

    Everything is seeded, so that a second call returns the same lines. A drafter that draws as it says fails one of the
    statistical checks by chance with a probability of 2e-5 at most: 1e-5 for what it draws, and as much for outputs.

    Args:
        make: Makes a new drafter, every time it is called: a class, or a function. Drafters made by it may share a
            model.
        target: The target, best in float32: in other dtypes outputs and drafts cannot be compared exactly.
        verifier: The acceptance rule that the drafter is tried with; None for an exact one that takes its drafts, of
            those that have been imported.
        rules: The rules with which outputs are compared with the target's law; None for all exact ones that take its
            drafts, have been imported and need no arguments. ``()`` leaves these checks out, which take most time.
        prompts: Texts or token ids, at least two; None for built-in ones.
        sampling: Parameters of sampled requests; None, or a temperature of 0, for temperature 1.
        tokens: Length of most outputs.
        rounds: Length of a long output, in rounds, over which drafts must not drift.
        draws: Drafts from which it is tested whether q is what was drawn. Half as many outputs are sampled with every
            rule.
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
    has_leaf_probs, top_tokens = drafter.has_leaf_probs, drafter.top_tokens
    every = every_rule.exact_rules(drafter) if rules is None else list(rules)
    for each in every:
        each.check(drafter)
    del drafter  # it may hold a model, and every check makes a new one
    begin = progress or (lambda check: None)

    jobs = outputs.mixed(prompts, sampled, tokens)
    begin("plain decoding")
    plain = outputs.plainly(stage, jobs)  # before the drafter has seen the target
    begin(BIND)
    try:
        engine = stage.engine(slots=3, chunk=7)
    except Exception as error:
        return [announced, failed(BIND, _words(error))]
    found = [announced, passed(BIND, f"{target.name}; tried with {type(rule).__name__}")]
    done: list[Run] = []
    begin(DECODES)
    found.append(_attempt(DECODES, lambda: _decodes(engine, jobs, done, log)))
    if found[-1].status is not Status.PASSED:
        found += _trees(log)
        culprit = next((finding.check for finding in found if finding.failed), DECODES)
        named = (every_rule.name_of(each) for each in every)
        rest = (outputs.GREEDY, outputs.ENDS, *repeats.ALL, *fit.ALL, failures.NAN, LEAVES, TOP, *named)
        return [*found, *(not_tried(check, f"“{culprit}” failed") for check in rest)]
    begin(outputs.GREEDY)
    later = [_attempt(outputs.GREEDY, lambda: outputs.greedy_outputs(stage, jobs, done, plain))]
    begin(outputs.ENDS)
    later.append(_attempt(outputs.ENDS, lambda: outputs.ends(stage, prompts, sampled)))
    begin("drafts depend on the request alone")
    later += repeats.repeats(stage, prompts, sampled, tokens=tokens, rounds=rounds, attempt=_attempt)
    begin("q is what was drawn")
    later += _several(fit.ALL, lambda: fit.fit(stage, prompts, sampled, draws=draws))
    begin(LEAVES)
    leaves = _attempt(LEAVES, lambda: _leaves(stage, jobs)) if has_leaf_probs else None
    begin(failures.NAN)
    later.append(_nan(stage, prompts, sampled, tokens, later))
    later.append(leaves or not_applicable(LEAVES, "the drafter says has_leaf_probs=False"))
    later.append(_told(log) if top_tokens else not_applicable(TOP, "the drafter says top_tokens=0"))
    begin("every rule that takes its drafts")
    later += every_rule.by_rule(stage, every, jobs, plain, prompts, sampled, count=draws // 2, attempt=_attempt)
    return [*found, *_trees(log), *later]


def _nan(
    stage: Stage,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    tokens: int,
    so_far: Sequence[Finding],
) -> Finding:
    """Returns what becomes of a drafter beside NaN, where a request's drafts are known to depend on it alone."""
    by_name = {finding.check: finding for finding in so_far}
    alone = [by_name[check] for check in (repeats.SEED, repeats.COMPANY, repeats.REUSE)]
    wrong = next((finding for finding in alone if finding.status in (Status.FAILED, Status.NOT_TRIED)), None)
    if wrong is not None:
        return not_tried(failures.NAN, f"it compares a request's drafts, and “{wrong.check}” did not pass")
    comparable = all(finding.status is Status.PASSED for finding in alone)
    return _attempt(
        failures.NAN,
        lambda: failures.nan_logits(stage, prompts, sampling, tokens=tokens, comparable=comparable),
    )


def _told(log: Log) -> Finding:
    """Returns whether the drafter was told what it wants to know of the target at every node."""
    if log.untold is not None:
        return failed(TOP, log.untold)
    return passed(TOP, f"told of {log.told} nodes; what the target said next is among them")


def _announced(make: Callable[[], Drafter], target: Target) -> tuple[Finding, Drafter | None]:
    """Returns whether a drafter has the attributes that it must have, and the drafter if it does."""
    lacking = missing_methods(make) if isinstance(make, type) else None
    if lacking is not None:
        return failed(ATTRIBUTES, lacking), None
    drafter = make()
    try:
        check_drafter_attributes(drafter, layers=target.num_layers)
    except ValueError as error:
        return failed(ATTRIBUTES, str(error)), None
    laws = ", ".join(law.name for law in sorted(drafter.laws))
    words = f"max_nodes={drafter.max_nodes}, max_depth={drafter.max_depth}, laws={laws}, is_chain={drafter.is_chain}"
    return passed(ATTRIBUTES, words), drafter


def _decodes(engine: Engine, jobs: Sequence[Job], done: list[Run], log: Log) -> Finding:
    """Decode all jobs in one engine; what comes of them goes to ``done``."""
    done += run(engine, jobs, rows_of_q=0)
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
    """Returns what a check finds; an exception of the drafter is a failure."""
    try:
        return tried()
    except MalformedError:
        return not_tried(check, "a malformed tree ended it")
    except Exception as error:
        return failed(check, _words(error))


def _several(checks: Sequence[str], tried: Callable[[], list[Finding]]) -> list[Finding]:
    """Returns what several checks find together; an exception is a failure of the first of them."""
    found: list[Finding] = []

    def first() -> Finding:
        found.extend(tried())
        return found[0]

    finding = _attempt(checks[0], first)
    return found or [finding, *(not_tried(check, f"“{checks[0]}” did not come to its end") for check in checks[1:])]


def _words(error: Exception) -> str:
    """Returns an error in words, with the last line outside of this package that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _ours(frame.filename)]
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) or "site-packages" in path.parts or filename.startswith("<")
