"""A corpus for retrieval drafters: ``python -m experiments.corpus files=text/*.txt out=text.corpus``."""

from experiments.config.launch import Command

corpus = Command("corpus")
main = corpus.main

if __name__ == "__main__":
    main()
