"""Does the output follow the target with every rule that takes the drafts?

Greedy outputs are compared with plain decoding's. For sampled ones, every token of the output is turned into a number
by the target's law at its place. If the output follows the target, these numbers are uniform, and those of one output
are independent: this holds if, and only if, the joint law is right.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import scipy.stats
import torch

from specdec.drafter_checks import outputs
from specdec.drafter_checks.findings import Finding, failed, passed
from specdec.drafter_checks.playing import Job, Run, Stage, run
from specdec.drafter_checks.uniformity import FEWEST, LEVEL, independent, number, tokens_fit, uniform
from specdec.interfaces import Drafter, Round, Verifier, fitting_rules
from specdec.requests import SamplingParams
from specdec.types import Exactness, Noise

LENGTH = 3
"""Tokens of an output whose joint law is tested."""
SLOTS = 64
EDGE = 4  # cells of the unit cube along an edge


def name_of(rule: Verifier) -> str:
    """Returns the name of the check of a rule."""
    return f"exact with {type(rule).__name__}"


def exact_rules(drafter: Drafter) -> list[Verifier]:
    """Returns every exact rule that takes a drafter's drafts, has been imported and needs no arguments.

    References, which are too slow for a model's vocabulary, are left out.
    """
    found = []
    for rule in fitting_rules(drafter):
        if rule.exactness is Exactness.EXACT and not rule.is_reference:
            try:
                found.append(rule())
            except TypeError:
                continue
    return found


def by_rule(
    stage: Stage,
    rules: Sequence[Verifier],
    jobs: Sequence[Job],
    plain: Sequence[Run],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    count: int,
    attempt: Callable[[str, Callable[[], Finding]], Finding],
) -> list[Finding]:
    """Returns a finding for every rule.

    Args:
        stage: Where the drafter is tried.
        rules: The rules.
        jobs: Requests of many kinds.
        plain: Plain decoding's outputs for them, with the noise of the stage's own rule.
        prompts: Two of them are used for sampled outputs.
        sampling: Parameters of sampled requests.
        count: The number of sampled outputs, about; the law is not tested with too few.
        attempt: Turns an exception of a check into its finding.
    """

    def tried(rule: Verifier) -> Finding:
        apart = replace(stage, verifier=rule)
        own = plain if rule.noise is stage.verifier.noise else outputs.plainly(apart, jobs)
        greedy = outputs.greedy_outputs(apart, jobs, run(apart.engine(slots=3, chunk=7), jobs, rows_of_q=0), own)
        if greedy.failed:
            return failed(name_of(rule), greedy.detail)
        if rule.noise is Noise.SHARED:
            return passed(
                name_of(rule), "all outputs, sampled ones too, are those of plain decoding with the same noise"
            )
        if count < FEWEST:
            return passed(name_of(rule), "greedy outputs are plain decoding's; the law of sampled ones was not tested")
        return _follows(apart, prompts[:2], sampling, count=count, rules=len(rules))

    return [attempt(name_of(rule), lambda rule=rule: tried(rule)) for rule in rules]


def _follows(
    stage: Stage, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, *, count: int, rules: int
) -> Finding:
    """Returns whether the first tokens of many sampled outputs have the target's joint law."""
    tests = _tests(stage, prompts, sampling, count)
    where, p_value = min(tests.items(), key=lambda test: test[1])
    limit = LEVEL / (len(tests) * rules)
    detail = f"smallest p-value {p_value:.2g} of {len(tests)} tests of sampled outputs ({where}), limit {limit:.1g}"
    name = name_of(stage.verifier)
    if p_value < limit:
        return failed(name, f"sampled outputs do not follow the target: {detail}")
    return passed(name, f"greedy outputs are plain decoding's; {detail}")


def _tests(stage: Stage, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, count: int) -> dict[str, float]:
    """Returns the p-values of all tests, by what is tested."""
    generator = torch.Generator().manual_seed(1)
    numbers: dict[int, list[float]] = defaultdict(list)
    first: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def note(played: Round) -> None:
        tree, verdict = played.tree, played.verdict
        for row, request in enumerate(played.requests):
            if request is None or not bool(verdict.valid[row]):
                continue
            stream = request.sampling.stream
            assert stream is not None
            path = verdict.path[row, : int(verdict.num_accepted[row])].tolist()
            tokens = [*tree.tokens[row, path].tolist(), int(verdict.next_token[row])]
            for node, token in zip([0, *path], tokens, strict=True):
                if len(numbers[stream]) < LENGTH:
                    law = played.target_probs[row, node].double()
                    if not numbers[stream]:
                        counts, _ = first.setdefault(stream % 2, (np.zeros(len(law)), (law / law.sum()).cpu().numpy()))
                        counts[token] += 1
                    numbers[stream].append(number(law, token, generator))

    engine = stage.engine(slots=SLOTS)
    # One token more than is tested, so that a first draft may be as deep as what is tested.
    wanted = replace(sampling, max_new_tokens=LENGTH + 1, ignore_eos=True)
    for start in range(0, count, SLOTS):
        jobs = [Job(prompts[stream % 2], replace(wanted, stream=stream)) for stream in range(start, start + SLOTS)]
        run(engine, jobs, rows_of_q=0, on_round=note)
    table = np.array([each for _, each in sorted(numbers.items())])
    found = {f"token {place}": uniform(table[:, place].tolist()) for place in range(LENGTH)}
    for one in range(LENGTH):
        for other in range(one + 1, LENGTH):
            found[f"tokens {one} and {other}"] = independent(table[:, one].tolist(), table[:, other].tolist())
    cells = np.histogramdd(table, bins=EDGE, range=[(0, 1)] * LENGTH)[0]
    found[f"{LENGTH} tokens together"] = float(scipy.stats.chisquare(cells.ravel()).pvalue)
    for prompt, (counts, law) in first.items():
        found[f"the first token after prompt {prompt}"] = tokens_fit(counts, law)
    return found
