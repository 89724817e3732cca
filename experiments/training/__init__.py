"""Trains drafters: data, heads, losses, the loop, and the truth while training."""
