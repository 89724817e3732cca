"""Is a rule exact, and what does it accept? Another name of ``python -m experiments.check verifier=…``."""

from experiments.check import main

if __name__ == "__main__":
    main()
