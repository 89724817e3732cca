"""Is a drafter what it says? Tries it against the contract and lists what was found.

::

    for finding in check_drafter(MyDrafter, target, verifier=RejectionVerifier()):
        print(finding)
    assert_conforms(MyDrafter, target, verifier=RejectionVerifier())  # in a test
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec.checks import draws as q
from specdec.checks.playing import Broken, End, Stage, Status, prompts_for
from specdec.checks.trials import Trials
from specdec.engine.parts import check_declared
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target

_PACKAGE = Path(__file__).parent.parent


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

    The first failure ends it. Everything is seeded. A drafter that draws as it says fails by chance with a probability
    of 1e-5 at most.

    Args:
        make: Makes a new drafter at every call: a class, or a function. They may share a model.
        target: The target, best in float32: in other dtypes outputs and drafts cannot be compared exactly.
        prompts: Texts or token ids, at least two; None for built-in ones.
        sampling: Parameters of sampled requests; None, or a temperature of 0, for temperature 1.
        tokens: Length of most outputs.
        rounds: Length of a long output, in rounds, over which drafts must not drift.
        draws: Drafts from which it is tested whether q is what was drawn.
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
    verifier.check(drafter)
    stage = Stage(make, target, verifier, length, drafter.max_depth, drafter.adapts, options)
    del drafter  # it may hold a model, and every check makes a new one

    begin = progress or (lambda check: None)
    begin("plain decoding")
    trials = Trials(stage, encoded, sampled, rounds=rounds, draws=draws)
    found = [announced]
    for group in _checks(trials):
        wrong = next((finding for finding in found if finding.failed), None)
        if wrong is None:
            begin(next(iter(group)))
            found += [_finding(check, tried) for check, tried in group.items()]
        else:
            found += [Finding(check, Status.NOT_TRIED, f"“{wrong.check}” failed") for check in group]
    return found


def assert_conforms(make: Callable[[], Drafter], target: Target, **options: Any) -> None:
    """Raises an ``AssertionError`` that names all checks that failed; arguments are those of ``check_drafter``."""
    wrong = [finding for finding in check_drafter(make, target, **options) if finding.failed]
    if wrong:
        raise AssertionError("the drafter breaks its contract:\n" + "\n".join(map(str, wrong)))


def _checks(trials: Trials) -> list[dict[str, Callable[[], str]]]:
    """The checks in their order; those of one group are made together, from the same rounds.

    What is seen of trees and of the engine's arrays in all rounds ends the check that plays them.
    """
    draws = q.FIRST, q.DEEPER, q.SIBLINGS, q.INDEPENDENT, q.CHOSEN
    return [
        {"fits the target": trials.binds},
        {"drafts to the end": trials.decodes},
        {"greedy outputs": trials.greedy_outputs},
        {"ends of outputs and of the cache": trials.ends},
        {"same seed, same drafts": trials.same_seed},
        {"independent of batch mates": trials.company},
        {"independent of the prompt's pieces": trials.pieces},
        {"a slot is used again": trials.reuse},
        {"shared beginnings": trials.shared_beginnings},
        {"no drift": trials.drift},
        {"recorded rounds": trials.recorded_rounds},
        {check: partial(trials.drawn, check) for check in draws},
        {"NaN logits": trials.nan_logits},
        {"q at the leaves": trials.leaves},
        {
            "trees": lambda: f"all {trials.stage.seen['trees']} are well formed",
            "slots are left alone": lambda: f"propose changed nothing in {trials.stage.seen['trees']} rounds",
        },
    ]


def _finding(check: str, tried: Callable[[], str]) -> Finding:
    try:
        return Finding(check, Status.PASSED, tried())
    except End as end:
        return Finding(end.check or check, end.status, str(end))
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
