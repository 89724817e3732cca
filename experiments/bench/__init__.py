"""Times of forwards and rounds on this machine, alone or beside another commit: ``python -m experiments.bench``."""
