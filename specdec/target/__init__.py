"""A transformers model as the engine needs it: what it can do, how its forwards run, and the target."""
