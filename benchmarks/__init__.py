"""Timed comparisons: python -m benchmarks.speed, python -m benchmarks.scaling, python -m benchmarks.int8."""
