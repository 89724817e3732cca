"""How fast is the engine, and is it faster than before? ``python -m experiments.bench parts=[steps] against=COMMIT``.

Use an otherwise idle machine.
"""

from experiments.config.launch import Command

bench = Command("bench")
main = bench.main

if __name__ == "__main__":
    main()
