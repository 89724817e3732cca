"""Commands and options that this release no longer has, and what replaces each: kept for this release."""

COMMANDS = {
    "accuracy": "run experiment=accuracy grading.tasks=gsm8k drafter=model compares answers",
    "bundle": "python examples/bundle.py trains and installs the bundled models",
    "calibrate": "plan costs=fit drafter=model fits the costs of steps on this machine",
    "corpus": "python examples/corpus.py OUT FILES makes a corpus",
    "export": "train export=FOLDER format=speculators out=FOLDER writes a trained drafter for a serving engine",
    "inspect_drafter": "check FOLDER, or check inspect=true drafter=eagle, inspects a drafter",
    "optimize_tree": "replay TRACE best=tree finds the best tree",
    "parity": "python examples/parity.py compares forwards of k + 1 tokens with those of one",
    "pays": "plan costs=timed says from which acceptance on speculation pays on this machine",
    "replay_text": "run with dataset=… and several drafters measures retrieval drafters",
    "report": "compare FOLDER format=html writes runs as one HTML page",
    "show": "compare FOLDER format=html shows outputs and draft trees token by token",
}
"""Sentences by the name of a command, each after "give" in a user's head: what to call now."""
OPTIONS = {
    "load memory": "give every method its pages, as in setups.plain.engine.cache.pages=…",
    "run time_limit": "give dataset.count and sampling.max_new_tokens",
    "run race_tokens": "the race has 96 tokens",
    "run ladder": "methods and setups measure several in one run; read the speedups in its table",
    "run experiment=quadrants": "sweep dataset.tokens and sampling.max_new_tokens",
    "run experiment=ingredients": "give methods and setups in one run",
    "run tracker=accelerate": "give tracker=wandb, or a tracker of your own",
    "check contexts": "run experiment=context measures acceptance by length of the context",
    "compare published": "put a published length beside the row of comparison.csv",
    "compare exports": "records.jsonl of a run has the tokens that every round accepted and proposed",
}
"""Sentences by a command and a setting of it, or a setting with its value."""


def command(name: str) -> str | None:
    """What replaces a command; None for one that was never there."""
    return COMMANDS.get(name.replace("-", "_"))


def option(name: str, word: str) -> str | None:
    """What replaces the setting that a word of a command's line sets; None for any other word."""
    word = word.lstrip("+~")
    return OPTIONS.get(f"{name} {word}") or OPTIONS.get(f"{name} {word.partition('=')[0]}")


def refuse(words: list[str]) -> None:
    """End ``python -m experiments.NAME`` with a sentence if there is no such command any more."""
    if words[1:2] == ["-m"] and len(words) > 2 and words[2].startswith("experiments."):
        name = words[2].removeprefix("experiments.")
        if (instead := command(name)) is not None:
            raise SystemExit(f"error: there is no command {name} any more: {instead}")
