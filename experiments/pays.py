"""Does speculation pay here, before anybody trains a drafter? ``python -m experiments.pays target.name=…``.

Times the target's forwards over 1 to 64 tokens on this machine. From these follow the acceptance from which drafts pay,
the best length, and the speedup that published heads would have.
"""

from experiments.config.launch import Command

pays = Command("pays")
main = pays.main

if __name__ == "__main__":
    main()
