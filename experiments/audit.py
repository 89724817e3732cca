"""Is a decoder lossless, with stated odds? ``python -m experiments.audit drafter=model verifier=rejection``."""

from experiments.commands.settings import audit

if __name__ == "__main__":
    audit.main()
