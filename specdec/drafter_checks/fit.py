"""Is q what was drawn? Goodness of fit over many draws.

A drawn token is turned into a number: the probability of all tokens that are more probable than it, under the law that
it should have been drawn from, plus a random share of its own probability. If every token was drawn as declared, these
numbers are uniform on [0, 1), whatever the contexts were (Rosenblatt 1952, randomized because tokens are discrete).
They are also independent: of each other, from parent to child, sibling to sibling and round to round, and of the
numbers with which the engine accepts. The law of a ``WITHOUT_REPLACEMENT`` draw is q without its earlier siblings,
renormalized.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specdec.drafter_checks.findings import Finding, failed, not_applicable, not_tried, passed
from specdec.drafter_checks.playing import DRAWN, Job, Stage, run
from specdec.drafter_checks.rules import ByRule
from specdec.drafter_checks.uniformity import FEWEST, LEVEL, LOOKS, independent, number, tokens_fit, uniform
from specdec.interfaces import Round
from specdec.random import Purpose, request_key, uniforms
from specdec.requests import SamplingParams
from specdec.types import DraftSampling

FIRST = "q is what was drawn: first node"
DEEPER = "q is what was drawn: deeper nodes"
SIBLINGS = "q is what was drawn: siblings"
INDEPENDENT = "draws are independent"
CHOSEN = "chosen tokens use no randomness"
ALL = (FIRST, DEEPER, SIBLINGS, INDEPENDENT, CHOSEN)

ROUNDS = 4  # of every request
SLOTS = 64
SHORT = 8  # tokens: in a shorter prompt, prompt lookup finds nothing
Path = tuple[int, ...]
"""Sibling ranks from the root's child downwards."""


@dataclass
class _Draws:
    """All draws, as numbers that should be uniform.

    Attributes:
        numbers: By path, then by (request, round).
        accepting: The engine's two numbers, by (request, round).
        first: Counts of first tokens, and their q, by prompt: all from round 0, where the context is the prompt.
    """

    numbers: dict[Path, dict[tuple[int, int], float]] = field(default_factory=lambda: defaultdict(dict))
    accepting: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    first: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def fit(
    stage: Stage, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, by_rule: ByRule, *, draws: int
) -> list[Finding]:
    """Returns a finding for every check in ``ALL``, as soon as one has failed beyond doubt.

    Args:
        stage: Where the drafter is tried.
        prompts: Two short ones are used.
        sampling: Parameters of the requests, at a positive temperature.
        by_rule: Takes the same rounds, for the rules.
        draws: The number of drafts, about.
    """
    prompts = sorted(prompts, key=lambda prompt: (len(prompt) < SHORT, len(prompt)))[:2]
    made = _Draws()
    generator = torch.Generator().manual_seed(0)
    chosen: dict[int, set[tuple]] = defaultdict(set)
    laws: set[int] = set()
    tokens = min(ROUNDS * (stage.log.depth + 1), stage.max_length - max(map(len, prompts)))
    rounds = max(tokens // (stage.log.depth + 1), 1)

    def note(played: Round) -> None:
        by_rule.note(played)
        for row, request in enumerate(played.requests):
            if request is not None:
                stream = request.sampling.stream
                assert stream is not None and request.sampling.seed is not None
                key = torch.tensor([request_key(request.sampling.seed, stream)])
                accepting = uniforms(key, torch.tensor([request.rounds]), Purpose.ACCEPT, 2)[0].tolist()
                made.accepting[stream, request.rounds] = (accepting[0], accepting[1])
                _note_row(played, row, (stream, request.rounds), stream % 2, made, generator)

    engine = stage.engine(slots=SLOTS)
    batches = max(-(-draws // (rounds * SLOTS)), 1)
    looks = sorted({-(-batches * share // 4) for share in (1, 2, 4)})
    found: list[Finding] = []
    for batch in range(batches):
        jobs = [
            Job(prompts[stream % 2], replace(sampling, max_new_tokens=tokens, stream=stream, ignore_eos=True))
            for stream in range(batch * SLOTS, (batch + 1) * SLOTS)
        ]
        for job, done in zip(jobs, run(engine, jobs, stop_after=rounds, rows_of_q=0, on_round=note), strict=True):
            laws.update(law for draft in done.drafts for law in draft.laws[1:])
            if done.drafts:
                first = done.drafts[0]
                chosen[prompts.index(job.prompt)].add((first.tokens, first.parents, first.laws))
        if batch + 1 in looks:
            found = [*_drawn(made, laws), _chosen(chosen, laws, adapts=stage.log.adapts)]
            if any(finding.failed and finding.check != INDEPENDENT for finding in found):
                break
        if laws.isdisjoint(DRAWN) and not by_rule.rules:
            break  # nothing was drawn, so there is nothing to count
    return found or [*_drawn(made, laws), _chosen(chosen, laws, adapts=stage.log.adapts)]


def _note_row(
    played: Round, row: int, key: tuple[int, int], prompt: int, made: _Draws, generator: torch.Generator
) -> None:
    """Turn the drawn nodes of one row into numbers."""
    tree = played.tree
    if tree.draft_probs is None:
        return
    paths: dict[int, Path] = {0: ()}
    families: dict[int, list[int]] = defaultdict(list)
    valid, parents = tree.valid[row].tolist(), tree.parents[row].tolist()
    tokens, laws = tree.tokens[row].tolist(), tree.law[row].tolist()
    for node in range(1, tree.width):
        if not valid[node]:
            continue
        earlier = families[parents[node]]
        paths[node] = (*paths[parents[node]], len(earlier))
        if laws[node] in DRAWN:
            q = tree.draft_probs[row, parents[node]].double()
            if laws[node] == DraftSampling.WITHOUT_REPLACEMENT and earlier:
                q = q.index_fill(0, torch.tensor([tokens[other] for other in earlier], device=q.device), 0.0)
            made.numbers[paths[node]][key] = number(q, tokens[node], generator)
            if paths[node] == (0,) and key[1] == 0:
                counts, _ = made.first.setdefault(prompt, (np.zeros(len(q)), (q / q.sum()).cpu().numpy()))
                counts[tokens[node]] += 1
        earlier.append(node)


def _drawn(made: _Draws, laws: set[int]) -> list[Finding]:
    if not laws & set(DRAWN):
        words = " and ".join(DraftSampling(law).name for law in sorted(laws)) or "never there"
        return [
            not_applicable(check, f"its drafts are {words}: there is no q that they were drawn from")
            for check in ALL[:4]
        ]
    tested = {path: numbers for path, numbers in made.numbers.items() if len(numbers) >= FEWEST}
    groups: dict[str, dict[str, tuple[float, int]]] = {FIRST: {}, DEEPER: {}, SIBLINGS: {}}
    for path, numbers in tested.items():
        group = FIRST if path == (0,) else SIBLINGS if path[-1] > 0 else DEEPER
        groups[group][f"the node at {_words(path)}"] = uniform(list(numbers.values())), len(numbers)
    for prompt, (counts, law) in made.first.items():
        if counts.sum() >= FEWEST:
            groups[FIRST][f"the first token after prompt {prompt}"] = tokens_fit(counts, law), int(counts.sum())
    independent = _pairs(made, tested)
    tests = sum(len(group) for group in groups.values()) + len(independent)
    found = [_finding(check, group, tests) for check, group in groups.items()]
    if any(each.failed for each in found):
        return [*found, not_tried(INDEPENDENT, "what was drawn is not what q says")]
    return [*found, _finding(INDEPENDENT, independent, tests)]


def _finding(check: str, tests: dict[str, tuple[float, int]], corrected: int) -> Finding:
    if not tests:
        why = {
            DEEPER: "fewer than two levels were drawn often enough",
            SIBLINGS: "it draws no siblings, or too rarely",
        }
        return not_applicable(check, why.get(check, f"fewer than {FEWEST} draws at every node"))
    where, (p_value, count) = min(tests.items(), key=lambda item: item[1][0])
    detail = (
        f"smallest p-value {p_value:.2g} of {len(tests)} tests ({where}, {count} draws), limit {_limit(corrected):.1g}"
    )
    if p_value >= _limit(corrected):
        return passed(check, detail)
    wrong = "are not independent" if check == INDEPENDENT else "are not drawn from the q that is given"
    return failed(check, f"draws {wrong}: {detail}")


def _limit(tests: int) -> float:
    """Returns the p-value from which on a test is no proof: it is made several times while draws come in."""
    return LEVEL / (tests * LOOKS)


def _pairs(made: _Draws, tested: dict[Path, dict[tuple[int, int], float]]) -> dict[str, tuple[float, int]]:
    """Returns the p-values of all pairs that a mistake could tie together."""
    found: dict[str, tuple[float, int]] = {}

    def pair(name: str, first: dict[tuple[int, int], float], second: dict[tuple[int, int], float]) -> None:
        both = sorted(first.keys() & second.keys())
        if len(both) >= FEWEST:
            found[name] = independent([first[key] for key in both], [second[key] for key in both]), len(both)

    for path, numbers in tested.items():
        here = _words(path)
        if path[-1] > 0:
            sibling = (*path[:-1], path[-1] - 1)
            pair(f"siblings at {_words(sibling)} and {here}", tested.get(sibling, {}), numbers)
        if len(path) > 1:
            pair(f"parent and child at {_words(path[:-1])} and {here}", tested.get(path[:-1], {}), numbers)
        later = {(stream, number - 1): value for (stream, number), value in numbers.items()}
        pair(f"two rounds, at {here}", numbers, later)
        for index, what in enumerate(("where the path ends", "the next token")):
            accepting = {key: value[index] for key, value in made.accepting.items()}
            pair(f"{here}, and the number that decides {what}", numbers, accepting)
    return found


def _chosen(chosen: dict[int, set[tuple]], laws: set[int], *, adapts: bool) -> Finding:
    if laws != {int(DraftSampling.DETERMINISTIC)}:
        return not_applicable(CHOSEN, "its drafts are drawn" if laws else "it drafted nothing")
    if adapts:
        return not_applicable(CHOSEN, "the drafter says adapts=True, so drafts may differ by what else was decoded")
    for drafts in chosen.values():
        if len(drafts) > 1:
            return failed(
                CHOSEN,
                f"{len(drafts)} different drafts after one prompt, by the seed, and all are declared DETERMINISTIC: "
                "declare how they are drawn, and give q",
            )
    return passed(CHOSEN, f"requests with {SLOTS} different seeds get the same drafts after the same prompt")


def _words(path: Path) -> str:
    """Returns a path in words: the ranks from the first level down."""
    return "/".join(str(rank) for rank in path)
