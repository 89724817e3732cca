"""Tables and plots: results for readers. Computes no figure."""
