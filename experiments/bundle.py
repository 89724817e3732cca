"""Make the bundled models: ``python -m experiments.bundle``."""

from experiments.config.launch import Command

bundle = Command("bundle")
main = bundle.main

if __name__ == "__main__":
    main()
