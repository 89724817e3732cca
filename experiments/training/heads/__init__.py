"""The heads that can be trained, one family per file."""
