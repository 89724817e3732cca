"""One token at a time against k + 1 at once: ``python -m experiments.parity target.name=…``.

A forward over k + 1 tokens multiplies differently from one over one token, so greedy outputs of a lossless method may
part from plain decoding's. Counts, for this project's engine and for transformers' modules, which bits of the logits
differ, where the likeliest token is another one, what that costs in acceptance, and how soon outputs part.
"""

from experiments.config.launch import Command
from experiments.config.words import with_lists

parity = Command("parity", rewrite=with_lists)
main = parity.main

if __name__ == "__main__":
    main()
