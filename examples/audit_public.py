"""Does published code accept drafts as it should? Audits of functions out of the repositories of papers.

    git clone https://github.com/SafeAILab/EAGLE
    python examples/audit_public.py eagle_batched EAGLE
    python examples/audit_public.py eagle_batched EAGLE --patched
    python examples/audit_public.py ours .

``public_code`` has the subjects: what is wrong with them, and the patches. Each is called as its own code calls it, on
a toy target and drafter, at temperature 0.6 without filters. The joint law of the next three tokens is compared with
the target's twice: every draw and coin branches, which gives the law to rounding, and outputs are drawn and tested by
chi-square. The exit status is 1 if the output does not follow the target.
"""

import argparse
import operator
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from public_code import HORIZON, NOISY, START, SUBJECTS, TEMPERATURE, TEMPERATURES, VOCAB, WHOLE, Clone, P, Round
from torch import Tensor

from specdec.checks.goodness import fits

LEVEL, ROUNDING = 1e-4, 1e-5
"""An exact subject is accused with at most this probability, or total variation from rounding."""
Law = defaultdict[tuple[int, ...], float]
TOKENS = range(START, VOCAB)


class Courses:
    """The courses that something random can take: it runs once for every answer to what it asks of chance."""

    def law(self, decode: Callable[[], Iterable[int]]) -> Law:
        """Return the exact law of what comes out."""
        law, self.left = Law(float), [()]
        coins = [(torch, "rand"), (torch, "rand_like"), (random, "random"), (np.random, "random")]
        coins.append((np.random, "uniform"))
        with ExitStack() as stack:
            for where, name in coins:
                stack.enter_context(patch.object(where, name, lambda *_, **__: Coin(self)))
            stack.enter_context(patch.object(torch, "multinomial", self.draw))
            while self.left:
                self.script, self.at, self.weight = self.left.pop(), 0, 1.0
                law[tuple(decode())] += self.weight
        return law

    def pick(self, chances: list[float]) -> int:
        """Return the answer of this course, and note the others for later ones."""
        if self.at == len(self.script):
            first, *others = (each for each, chance in enumerate(chances) if chance > 1e-9)
            self.left += [(*self.script, each) for each in others]
            self.script = (*self.script, first)
        answer = self.script[self.at]
        self.at, self.weight = self.at + 1, self.weight * chances[answer] / sum(chances)
        return answer

    def draw(self, weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        """Stand for ``torch.multinomial``."""
        if weights.ndim > 1:
            return torch.stack([self.draw(row, num_samples, replacement) for row in weights])
        left, drawn = weights.tolist(), []
        while len(drawn) < num_samples:
            drawn.append(self.pick(left))
            left[drawn[-1]] *= replacement
        return torch.tensor(drawn)


class Coin:
    """A uniform number that is compared once, or a tensor of them."""

    device = "cpu"

    def __init__(self, courses: Courses):
        self.courses = courses

    def __lt__(self, other: Any) -> Any:
        chances = torch.as_tensor(other).double().clamp(0, 1)
        less = [self.courses.pick([1 - each, each]) == 1 for each in chances.flatten().tolist()]
        return torch.tensor(less).view(chances.shape)

    def __gt__(self, other: Any) -> Any:
        return ~(self < other)

    __le__ = __lt__

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, given: Any, __: Any = None) -> Any:
        return getattr(operator, function.__name__)(*given)


class Found(NamedTuple):
    """The findings of an audit.

    Attributes:
        tv: Total variation between the law of the output and the target's; None if it was not enumerated.
        sampled: The same of the outputs that were drawn.
        noise: What that is on average if they follow the target.
        pvalue: Of the chi-square test.
    """

    tv: float | None
    sampled: float
    noise: float
    pvalue: float

    @property
    def follows(self) -> bool:
        return self.pvalue >= LEVEL and (self.tv is None or self.tv <= ROUNDING)


def audit(make: Callable[[Clone], Round], clone: Clone, draws: int = 5_000) -> Found:
    """Compare the law of a subject's next tokens with the target's."""
    p = (P / TEMPERATURES.get(make, TEMPERATURE)).double().softmax(-1)
    paths = list(product(TOKENS, repeat=HORIZON))
    law = np.array([float(p[(START, *path[:-1]), path].prod()) for path in paths])
    play, tv, whole = make(clone), None, make in WHOLE
    if make not in NOISY:
        rounds = {root: Courses().law(lambda root=root: play(root)) for root in (TOKENS if not whole else [START])}
        found = joint(rounds, START, HORIZON)
        tv = float(0.5 * (sum(found.values()) - 2 * sum(map(min, law, map(found.__getitem__, paths))) + 1))
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(0)
    counts = Law(float)
    for _ in range(draws):
        tokens: list[int] = []
        while len(tokens) < HORIZON:
            tokens += play(tokens[-1] if tokens else START)
        counts[tuple(tokens[:HORIZON])] += 1
    seen = np.array([counts[path] for path in paths])
    honest = np.random.default_rng(0).multinomial(draws, law, size=200)
    sampled, noise = (0.5 * np.abs(each / draws - law).sum(-1).mean() for each in (seen, honest))
    return Found(tv, float(sampled), float(noise), fits(seen, law) if sum(seen) == draws else 0.0)


def joint(rounds: Mapping[int, Law], root: int, length: int) -> Law:
    """Return the law of the next tokens from the laws of single rounds."""
    law = Law(float)
    for tokens, chance in rounds[root].items():
        rest = joint(rounds, tokens[-1], length - len(tokens)) if len(tokens) < length else {(): 1.0}
        for more, other in rest.items():
            law[(*tokens, *more)[:length]] += chance * other
    return law


def main() -> None:
    """Audit the subject that the command names."""
    known = {each.__name__: each for each in SUBJECTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=known)
    parser.add_argument("clone", help="the folder of a clone")
    parser.add_argument("--patched", action="store_true", help="with the patch")
    parser.add_argument("--draws", type=int, default=5_000)
    given = parser.parse_args()
    if given.draws < 1:
        parser.error(f"--draws={given.draws}: give at least 1")
    try:
        found = audit(known[given.subject], Clone(given.clone, given.patched), given.draws)
    except ValueError as error:
        sys.exit(f"error: {error}")
    command = ["git", "-C", given.clone, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "no commit"
    print(f"{given.subject}{' (patched)' * given.patched}, {commit}: {known[given.subject].__doc__}")
    if found.tv is not None:
        print(f"total variation, enumerated: {found.tv:.4f}")
    sampled = f"of {given.draws:,} outputs: {found.sampled:.4f} ({found.noise:.4f} if exact)"
    print(f"{sampled}; chi-square p {found.pvalue:.2g}")
    print("follows the target" if found.follows else "DOES NOT FOLLOW THE TARGET")
    sys.exit(not found.follows)


if __name__ == "__main__":
    main()
