"""Composing a configuration, checking it, and building and running what it describes. The only room that sees Hydra."""
