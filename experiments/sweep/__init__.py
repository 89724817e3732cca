"""Sweeps: a line per finished job, and the comparison of all jobs at the end."""
