"""Every round of a run kept, and other rules asked about the very same drafts."""
