"""Tests of acceptance rules and of decoding: enumerated output laws, checks of drafts, and plain decoding."""
