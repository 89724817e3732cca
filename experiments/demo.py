"""Plain decoding, n-grams, a small model and Medusa on the bundled models: ``python -m experiments.demo``.

First plain decoding and one method are shown side by side as live text. Then all methods are measured on several
prompts, greedy and sampled, and a table and pictures say how they compare.
"""

from experiments.config.launch import Command

demo = Command("demo")
main = demo.main

if __name__ == "__main__":
    main()
