"""Trackers: mirrors of a run's results at Weights & Biases, or through accelerate's trackers. Computes no figure."""
