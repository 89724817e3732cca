"""Is a drafter, a rule or a head what it says? ``python -m experiments.check drafter=ngram``."""

from experiments.commands.settings import check

if __name__ == "__main__":
    check.main()
