"""Is a rule exact, is a drafter what it says? Enumerated output laws, plain decoding, and a drafter's contract."""
