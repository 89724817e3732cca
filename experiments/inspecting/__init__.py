"""Facts about a trained drafter, its acceptance, and the likeliest mistakes in loading it."""
