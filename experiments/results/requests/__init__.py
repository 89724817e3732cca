"""What a user feels: figures of requests from their timestamps. docs/what-a-user-feels.md defines them."""
