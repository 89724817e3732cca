"""Does a drafter keep its contract? Another name of ``python -m experiments.check drafter=…``."""

from experiments.commands.settings import check as check_drafter

if __name__ == "__main__":
    check_drafter.main()
