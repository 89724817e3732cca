"""Is a rule exact, and what does it accept? ``python -m experiments.check_verifier verifier=block``."""

from experiments.config.launch import Command

check_verifier = Command("check_verifier")
main = check_verifier.main

if __name__ == "__main__":
    main()
