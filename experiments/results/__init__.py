"""What a run leaves behind: records, the figures computed from them, and what made them."""
