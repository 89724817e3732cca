"""Configurations: where they lie, what they may hold, how a section becomes a component, and how a command starts."""
