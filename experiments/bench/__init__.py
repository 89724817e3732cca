"""How fast is it, and why? ``python -m experiments.bench NAME [name=value …]``; ``NAME --help`` shows its options.

A benchmark needs the bundled models or random weights, and neither hydra nor wandb. Use an otherwise idle machine.
"""

NAMES = {
    "engine": "how close the engine is to its device's limits; beside llama.cpp",
    "speed": "speculation beside plain decoding; or this checkout beside another one: against=PATH",
    "verifiers": "what a rule costs and brings; operations per round",
    "load": "what schedules and pages cost, what a shared beginning and pages save",
    "virtual": "request-rounds per second of loads in virtual time",
}
"""The benchmarks, and what each measures or makes."""
