"""A project of your own: a drafter, an acceptance rule and a data set. ``docs/library.md`` explains it."""
