"""Plain decoding and drafters on the bundled models: short for ``python -m experiments.run experiment=demo``."""

from experiments.commands.settings import run

if __name__ == "__main__":
    run.main("experiment=demo")
