"""Prompts to decode, and texts to train on."""
