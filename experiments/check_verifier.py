"""Is a rule exact, and what does it accept? ``python -m experiments.check_verifier verifier=block``.

A rule of your own needs a class and a YAML in ``conf/verifier/``, or ``verifier._target_=package.module.Class``. It is
tried on built-in tables, dense and degenerate, by enumerating all drafts, so there is no sampling noise. A rule that is
EXACT_WRT another distribution is compared with that one; the table shows its distance to the target, too. A rule of
your own that passes as exact is remembered in the project's folder, and results call it exact from then on, instead of
"exact (declared)".

Where drafter and target share their noise, nothing is random once the tree is given, so another check decides: over
many seeds, every output has to equal plain decoding's token for token, whatever was drafted, and plain decoding has to
follow the target.
"""

from experiments.config.launch import Command

check_verifier = Command("check_verifier")
main = check_verifier.main

if __name__ == "__main__":
    main()
