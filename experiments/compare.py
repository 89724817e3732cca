"""Runs side by side: ``python -m experiments.compare outputs/one outputs/another``."""

from experiments.commands.settings import compare

if __name__ == "__main__":
    compare.main()
