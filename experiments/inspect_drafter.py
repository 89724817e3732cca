"""What is this drafter, and is it loaded rightly? ``python -m experiments.inspect_drafter drafter=eagle``.

Prints what the drafter is by its files, its acceptance by depth in a few texts that the target writes, beside what such
heads usually bring, and what the likeliest other ways to load it would bring: other hidden layers, another norm,
another mask token.
"""

from experiments.config.launch import Command

inspect_drafter = Command("inspect_drafter")
main = inspect_drafter.main

if __name__ == "__main__":
    main()
