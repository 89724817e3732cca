"""What a trained drafter is, what it predicts, and which convention it was probably loaded with by mistake."""
