"""Timed comparisons, called as the experiments are: ``python -m benchmarks.speed repeats=6``; ``--help`` lists options.

They need neither Hydra nor wandb.
"""
