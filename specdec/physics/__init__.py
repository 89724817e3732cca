"""What a step must cost: bytes, operations and the least time they take. Pure arithmetic, without torch."""
