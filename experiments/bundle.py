"""Make the bundled models: ``python -m experiments.bundle``.

Every model is a training of ``experiments.train`` with its own recipe (``conf/recipe/bundled_*.yaml``): first the
target, on the standard library's sources, then drafters for it, and a hybrid that begins as it, with a drafter of its
own. Each command is printed. A finished training in ``work`` is not run again, and an interrupted one goes on; the
weights are installed in ``out`` with a card and checksums.
"""

from experiments.config.launch import Command

bundle = Command("bundle")
main = bundle.main

if __name__ == "__main__":
    main()
