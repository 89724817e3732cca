"""``python -m specdec.doctor``: what this machine has, what specdec does because of it, and whether that is right."""
