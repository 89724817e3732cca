"""Plain decoding and drafters on the bundled models: short for ``python -m experiments.run experiment=demo``."""

from experiments.run import run


def main() -> None:
    """Run the demonstration."""
    run.main("experiment=demo")


if __name__ == "__main__":
    main()
