"""Trackers: mirrors of a run's results at Weights & Biases. Computes no figure."""
