"""Is a rule exact, and what does it accept? Another name of ``python -m experiments.check verifier=…``."""

from experiments.commands.settings import check as check_verifier

if __name__ == "__main__":
    check_verifier.main()
