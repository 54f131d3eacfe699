"""Checkpoints: one format for every layout, committed at once or not at all."""
