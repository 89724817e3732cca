"""Text to train on: documents, and how they are packed into rows."""
