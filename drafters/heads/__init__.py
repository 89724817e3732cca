"""Heads: small trained models that draft from the target's hidden states, one file per family, and their formats."""
