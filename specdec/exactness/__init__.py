"""Tests of acceptance rules and of decoding: enumerated output distributions, checks of drafts, plain decoding."""
