"""A transformers model as the engine needs it: what it can do, its forwards, and the target made of it."""
