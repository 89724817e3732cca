"""Are the answers right? lm-eval's benchmarks on our engine, plainly and with drafts."""
