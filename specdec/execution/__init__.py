"""Ways of running a model's forward: one file per executor, and what they use (recordings, packed weights)."""
