"""Attention over a ragged cache with a tree mask.

``mask`` says what a query sees, once per round; ``grouped`` is the attention function that runs on it. To add a
backend, write a module with such a function and name it in ``ModelRunner(attention=…)``.
"""
