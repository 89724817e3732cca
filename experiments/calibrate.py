"""What steps cost on this machine: ``python -m experiments.calibrate target.inflate=110m``.

Times the target's forwards over a grid of rows, contexts and drafted nodes, and the other parts of rounds with the
drafter. It fits a few constants to them, shows what each one means and how well they predict sizes that they were not
fitted to, and writes a file. ``experiments.run costs=FILE`` then predicts every round, policies choose by it, and
``experiments.plan costs=FILE`` plans with it.
"""

from experiments.config.launch import Command

calibrate = Command("calibrate")
main = calibrate.main

if __name__ == "__main__":
    main()
