"""Every rule on the drafts of a trace: ``python -m experiments.replay outputs/traced verifier=block,rejection``."""

from experiments.commands.settings import replay

if __name__ == "__main__":
    replay.main()
