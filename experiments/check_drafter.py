"""Does a drafter keep its contract? Another name of ``python -m experiments.check drafter=…``."""

from experiments.check import main

if __name__ == "__main__":
    main()
