"""Are the answers as good as plain decoding's? ``python -m experiments.accuracy tasks=gsm8k drafter=model limit=100``.

Runs benchmarks of lm-eval (the extra ``lm-eval``) twice on one engine, plainly and with drafts, and compares the scores
of the same documents. A lossless method has the accuracy of plain decoding, and the paired difference shows how well
that is known.
"""

from experiments.config.launch import Command
from experiments.config.words import with_lists

accuracy = Command("accuracy", rewrite=with_lists)
main = accuracy.main

if __name__ == "__main__":
    main()
