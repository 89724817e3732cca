"""Recurrent layers of unmodified models: found by a trial, and run over trees level by level."""
