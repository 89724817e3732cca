"""Every rule on the drafts of a trace: ``python -m experiments.replay outputs/traced verifier=block,rejection``."""

from experiments.commands.settings import replay

main = replay.main

if __name__ == "__main__":
    main()
