"""An endpoint for standard clients: HTTP on one side, an engine in a thread of its own on the other."""
