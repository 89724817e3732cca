"""Trained drafters written in the layouts that serving engines read."""
