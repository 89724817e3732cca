"""Studies, one specification each: what is shown of the runs of a sweep, or of a question that a command asks."""
