"""Plain decoding, n-grams, a small model and Medusa on the bundled models: ``python -m experiments.demo``."""

from experiments.config.launch import Command

demo = Command("demo")
main = demo.main

if __name__ == "__main__":
    main()
