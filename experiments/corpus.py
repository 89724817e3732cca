"""A corpus for retrieval drafters: ``python -m experiments.corpus files=text/*.txt out=text.corpus``.

Its file holds the tokens of all documents and their suffix array, which ``drafter=rest`` and ``drafter=sam`` read as it
lies. It names its tokenizer, so that no target of another one is drafted for. It is written at the end, in one step: an
interrupted call leaves nothing, and the same call does all of it again.
"""

from experiments.config.launch import Command

corpus = Command("corpus")
main = corpus.main

if __name__ == "__main__":
    main()
