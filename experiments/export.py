"""A trained drafter for a serving engine: ``python -m experiments.export drafter.name=FOLDER format=… out=FOLDER``.

``format=speculators`` is what vLLM serves, ``format=sglang`` what SGLang serves, and ``format=native`` is the layout of
the drafter's authors. The kind of drafter is told by its files. What was written is read back and compared before it
takes its place, and the command that serves it is printed.
"""

from experiments.config.launch import Command


def _without_kinds(words: list[str]) -> list[str]:
    """Refuse to choose a kind of drafter, as the other commands want it."""
    for word in words:
        if word.startswith("drafter="):
            raise ValueError(f"{word}: its files tell what kind of drafter it is, give drafter.name=FOLDER alone")
    return words


export = Command("export", rewrite=_without_kinds)
main = export.main

if __name__ == "__main__":
    main()
