"""The recipe of the bundled models."""
