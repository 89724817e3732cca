"""Running methods on prompts, on the clock, and looking at what they do."""
