"""What a user feels: latency, rates, goodput and cost of requests, from their timestamps. Definitions are in
docs/what-a-user-feels.md."""
