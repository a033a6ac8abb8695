"""Checkpoints: how they lie on disk (store) and what a run must remember (state)."""
