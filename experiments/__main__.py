"""The ten commands: ``python -m experiments COMMAND [setting=value …]``; ``COMMAND --help`` shows its settings."""

import runpy
import sys

from experiments import removed

COMMANDS = {
    "run": "measures methods against plain decoding: experiment=demo, experiment=accuracy, …",
    "compare": "one table and pictures over several runs; format=html: one page with all outputs",
    "load": "methods, lengths and schedules under arrivals, for real or in virtual time",
    "serve": "an endpoint for OpenAI's clients",
    "replay": "every rule on the very drafts of a trace; best=tree: the best tree for a drafter",
    "check": "tries a drafter's contract, or computes a rule's output law; a folder is inspected",
    "audit": "is any decoder lossless, with stated odds?",
    "plan": "what a model costs on a device; costs=timed: does speculation pay here? costs=fit: what steps cost",
    "train": "trains a drafter; export=FOLDER: writes one for vLLM and SGLang",
    "bench": "times the engine and its parts",
}


def main() -> None:
    """Run the command that the first word names with the words behind it; without one, list all."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(__doc__, "\n" + "\n".join(f"  {name:<8} {about}" for name, about in COMMANDS.items()), sep="\n")
        return
    name = words[0].replace("-", "_")
    if name not in COMMANDS and name not in ("demo", "check_drafter", "check_verifier"):
        from experiments.config.kinds import did_you_mean

        instead = removed.SENTENCES["commands"].get(name)
        why = did_you_mean(name, COMMANDS) if instead is None else f": {instead}"
        sys.exit(f"error: there is no command {name}{why}")
    sys.argv = [f"{sys.argv[0]} {words[0]}", *words[1:]]
    runpy.run_module(f"experiments.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
