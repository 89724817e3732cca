"""Every rule on the very drafts of a trace: ``python -m experiments.replay trace=outputs/run/… verifiers=[block]``.

Make the trace with ``experiments.run trace=true``. No acceptance is sampled: a rule's expectation follows from its two
laws. So two rules differ by what they are alone, and an interval covers the choice of prompts alone.

**What is compared** is one round on identical contexts. The contexts are those that the rule which ran has led to; a
rule that accepts more would have met later ones. In the long run all exact rules meet contexts of the same
distribution, except where in the text their rounds begin; a lossy rule's own contexts are others.
"""

from experiments.config.launch import Command
from experiments.config.words import with_folders


def _rewrite(words: list[str]) -> list[str]:
    """``experiments.replay FOLDER verifier=a,b`` is short for ``trace=FOLDER verifiers=[a,b]``."""
    return [
        f"verifiers=[{word.removeprefix('verifier=').strip('[]')}]" if word.startswith("verifier=") else word
        for word in with_folders(words, "trace", several=False)
    ]


replay = Command("replay", rewrite=_rewrite)
main = replay.main

if __name__ == "__main__":
    main()
