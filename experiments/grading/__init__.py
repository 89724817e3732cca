"""Are the answers right? Graded from the records of finished runs, as evidence that a method loses nothing."""
