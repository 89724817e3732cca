"""One output on the terminal, token by token: ``python -m experiments.show outputs/run/… prompt=3``.

Tokens are colored by where they came from: accepted from the draft, recovered, bonus. ``round=5`` draws that round's
draft tree, with p and q, where the run was made with ``trace=true``. Without ``prompt`` the prompts are listed.
"""

from functools import partial

from experiments.config.launch import Command
from experiments.config.words import with_folders

show = Command("show", rewrite=partial(with_folders, name="run", several=False))
main = show.main

if __name__ == "__main__":
    main()
