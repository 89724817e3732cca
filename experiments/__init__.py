"""Command-line applications: runs, comparisons, training. Only here is there configuration."""
