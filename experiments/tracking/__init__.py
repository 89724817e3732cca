"""Trackers: mirrors of a run's results at Weights & Biases, MLflow or TensorBoard. Computes no figure."""
