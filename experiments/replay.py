"""Every rule on the very drafts of a trace: ``python -m experiments.replay trace=outputs/run/… verifiers=[block]``."""

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
