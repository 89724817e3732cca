"""Methods against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``."""

from experiments.commands.settings import run

main = run.main

if __name__ == "__main__":
    main()
