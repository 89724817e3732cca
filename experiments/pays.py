"""Does speculation pay here, before anybody trains a drafter? ``python -m experiments.pays target.name=…``."""

from experiments.config.launch import Command

pays = Command("pays")
main = pays.main

if __name__ == "__main__":
    main()
