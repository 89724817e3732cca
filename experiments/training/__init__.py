"""Training the bundled models."""
