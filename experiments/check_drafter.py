"""Does a drafter keep its contract? ``python -m experiments.check_drafter drafter=ngram``."""

from experiments.config.launch import Command

check_drafter = Command("check_drafter")
main = check_drafter.main

if __name__ == "__main__":
    main()
