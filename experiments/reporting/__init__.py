"""Tables, plots and trackers: results for readers. Computes no figure."""
