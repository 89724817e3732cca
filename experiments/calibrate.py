"""The cost of steps on this machine: ``python -m experiments.calibrate target.inflate=110m``."""

from experiments.config.launch import Command

calibrate = Command("calibrate")
main = calibrate.main

if __name__ == "__main__":
    main()
