"""A trained drafter for a serving engine: ``python -m experiments.export drafter.name=FOLDER format=… out=FOLDER``."""

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
