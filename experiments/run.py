"""Methods against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``."""

from experiments.commands.settings import run

if __name__ == "__main__":
    run.main()
