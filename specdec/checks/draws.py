"""Is q what was drawn? Tested over thousands of rounds.

Drawn tokens become numbers that are uniform if every token was drawn as declared (``goodness``), and independent: of
each other, from parent to child, sibling to sibling and round to round, and of the numbers with which the engine
accepts. The law of a ``WITHOUT_REPLACEMENT`` draw is q without its earlier siblings, renormalized.
An exact rule, which is tried on tables of its own, then gives the target's distribution.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specdec.checks.goodness import fits, independent, numbers, uniform
from specdec.checks.playing import DRAWN, Broken, Job, NotApplicable, NotTried, Stage, run
from specdec.interfaces import Round
from specdec.random import Purpose, request_key, uniforms
from specdec.requests import SamplingParams
from specdec.types import DraftSampling

FIRST = "q is what was drawn: first node"
DEEPER = "q is what was drawn: deeper nodes"
SIBLINGS = "q is what was drawn: siblings"
INDEPENDENT = "draws are independent"
CHOSEN = "chosen tokens use no randomness"

LEVEL = 1e-5  # a drafter that does nothing wrong fails one of the statistical checks with this probability
FEWEST = 400  # draws below which nothing is tested
_ROUNDS = 4  # of every request
_SLOTS = 64
_SHORT = 8  # tokens: in a shorter prompt, prompt lookup finds nothing

Path = tuple[int, ...]  # sibling ranks from the root's child downwards
Numbers = dict[tuple[int, int], float]  # a number of every (request, round)
Tests = dict[str, tuple[float, int]]  # p-value and draws of every test, by the words that say what is tested


@dataclass
class Draws:
    """All draws of many requests after one of two prompts.

    Attributes:
        numbers: The number of every drawn node, by its path.
        accepting: The engine's two numbers of every round.
        first: Counts of first tokens and their q, by prompt: all from round 0, where the context is the prompt.
        chosen: The different drafts of round 0, by prompt.
    """

    adapts: bool
    numbers: dict[Path, Numbers] = field(default_factory=lambda: defaultdict(dict))
    accepting: tuple[Numbers, Numbers] = field(default_factory=lambda: ({}, {}))
    first: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    chosen: dict[int, set[tuple]] = field(default_factory=lambda: defaultdict(set))
    laws: set[int] = field(default_factory=set)
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def drawn(self) -> bool:
        return not self.laws.isdisjoint(DRAWN)

    def note(self, played: Round) -> None:
        for row, request in enumerate(played.requests):
            if request is not None:
                stream, seed = request.sampling.stream, request.sampling.seed
                assert stream is not None and seed is not None
                key = torch.tensor([request_key(seed, stream)])
                coins = uniforms(key, torch.tensor([request.rounds]), Purpose.ACCEPT, 2)[0].tolist()
                for values, coin in zip(self.accepting, coins, strict=True):
                    values[stream, request.rounds] = coin
                self._note_row(played, row, (stream, request.rounds))

    def _note_row(self, played: Round, row: int, key: tuple[int, int]) -> None:
        tree = played.tree
        if tree.draft_probs is None:
            return
        paths: dict[int, Path] = {0: ()}
        families: dict[int, list[int]] = defaultdict(list)
        parents, laws = tree.parents[row].tolist(), tree.law[row].tolist()
        for node in tree.valid[row].nonzero()[1:, 0].tolist():
            earlier = families[parents[node]]
            paths[node] = (*paths[parents[node]], len(earlier))
            if laws[node] in DRAWN:
                q = tree.draft_probs[row, parents[node]].double()
                if laws[node] == DraftSampling.WITHOUT_REPLACEMENT:
                    q = q.index_fill(0, tree.tokens[row, earlier], 0.0)
                token = tree.tokens[row, node, None]
                self.numbers[paths[node]][key] = float(numbers(q[None], token, self._generator))
                if paths[node] == (0,) and key[1] == 0:
                    counts, _ = self.first.setdefault(key[0] % 2, (np.zeros(len(q)), (q / q.sum()).cpu().numpy()))
                    counts[int(token)] += 1
            earlier.append(node)

    def tests(self) -> dict[str, Tests]:
        tested = {path: values for path, values in self.numbers.items() if len(values) >= FEWEST}
        groups: dict[str, Tests] = {FIRST: {}, DEEPER: {}, SIBLINGS: {}, INDEPENDENT: self._pairs(tested)}
        for path, values in tested.items():
            group = FIRST if path == (0,) else SIBLINGS if path[-1] > 0 else DEEPER
            groups[group][f"the node at {_words(path)}"] = uniform(list(values.values())), len(values)
        for prompt, (counts, law) in self.first.items():
            if counts.sum() >= FEWEST:
                groups[FIRST][f"the first token after prompt {prompt}"] = fits(counts, law), int(counts.sum())
        return groups

    def _pairs(self, tested: dict[Path, Numbers]) -> Tests:
        """The tests of all pairs that a mistake could tie together."""
        found: Tests = {}

        def pair(name: str, first: Numbers, second: Numbers) -> None:
            both = sorted(first.keys() & second.keys())
            if len(both) >= FEWEST:
                found[name] = independent([first[key] for key in both], [second[key] for key in both]), len(both)

        for path, values in tested.items():
            here, above = _words(path), path[:-1]
            if path[-1] > 0:
                sibling = (*above, path[-1] - 1)
                pair(f"siblings at {_words(sibling)} and {here}", tested.get(sibling, {}), values)
            if above:
                pair(f"parent and child at {_words(above)} and {here}", tested.get(above, {}), values)
            later = {(stream, number - 1): value for (stream, number), value in values.items()}
            pair(f"two rounds, at {here}", values, later)
            for coins, what in zip(self.accepting, ("where the path ends", "the next token"), strict=True):
                pair(f"{here}, and the number that decides {what}", values, coins)
        return found

    def check(self, check: str) -> str:
        if check == CHOSEN:
            return self._check_chosen()
        if not self.drawn:
            raise NotApplicable("its drafts are not drawn: there is no q that they come from")
        tests = self.tests()
        limit = LEVEL / max(sum(map(len, tests.values())), 1)
        wrong = "draws are not drawn from the q that is given"
        if check == INDEPENDENT:
            wrong = "draws are not independent"
            if any(p_value < limit for other in (FIRST, DEEPER, SIBLINGS) for p_value, _ in tests[other].values()):
                raise NotTried("what was drawn is not what q says")
        if not tests[check]:
            raise NotApplicable(f"no node has {FEWEST} such draws")
        where, (p_value, count) = min(tests[check].items(), key=lambda test: test[1][0])
        found = f"smallest p-value {p_value:.2g} of {len(tests[check])} tests ({where}, {count} draws)"
        if p_value < limit:
            raise Broken(f"{wrong}: {found}, limit {limit:.1g}")
        return f"{found}, limit {limit:.1g}"

    def _check_chosen(self) -> str:
        if self.laws != {int(DraftSampling.DETERMINISTIC)}:
            raise NotApplicable("its drafts are drawn" if self.laws else "it drafted nothing")
        if self.adapts:
            raise NotApplicable("the drafter says adapts=True, so drafts may differ by what else was decoded")
        most = max(map(len, self.chosen.values()))
        if most > 1:
            raise Broken(
                f"{most} different drafts after one prompt, by the seed, and all are declared DETERMINISTIC: "
                "declare how they are drawn, and give q"
            )
        return f"requests with {_SLOTS} different seeds get the same drafts after the same prompt"


def played(stage: Stage, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, draws: int) -> Draws:
    """Return about so many draws after two short prompts."""
    prompts = sorted(prompts, key=lambda prompt: (len(prompt) < _SHORT, len(prompt)))[:2]
    made = Draws(adapts=stage.adapts)
    tokens = min(_ROUNDS * (stage.max_depth + 1), stage.max_length - max(map(len, prompts)))
    rounds = max(tokens // (stage.max_depth + 1), 1)
    engine = stage.engine(slots=_SLOTS)
    batches = max(-(-draws // (rounds * _SLOTS)), 1)
    for batch in range(batches):
        jobs = [
            Job(prompts[stream % 2], replace(sampling, max_new_tokens=tokens, stream=stream, ignore_eos=True))
            for stream in range(batch * _SLOTS, (batch + 1) * _SLOTS)
        ]
        for number, done in enumerate(run(engine, jobs, stop_after=rounds, rows_of_q=0, on_round=made.note)):
            made.laws.update(law for draft in done.drafts for _, _, law in draft.nodes[1:])
            made.chosen[number % 2].update(draft.nodes for draft in done.drafts[:1])
        if not made.drawn:
            break
    return made


def _words(path: Path) -> str:
    return "/".join(str(rank) for rank in path)
