"""Does a drafter keep its contract? ``python -m experiments.check_drafter drafter=ngram``.

A drafter of your own needs a class and a YAML in ``conf/drafter/``, or ``drafter._target_=package.module.Class``. It is
tried with the target on a few prompts: attributes, the form of every tree, greedy outputs against plain decoding,
whether drafts depend on the request alone, and whether q is what the tokens were drawn from. The table has a line per
check.
"""

from experiments.config.launch import Command

check_drafter = Command("check_drafter")
main = check_drafter.main

if __name__ == "__main__":
    main()
