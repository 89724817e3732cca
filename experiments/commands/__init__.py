"""The work of each command, once its configuration is checked; imported only then."""
