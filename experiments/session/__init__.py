"""A measurement from its first record to its last picture: methods, engines, memory, resuming, reports."""
