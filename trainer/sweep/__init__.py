"""Runs of one file with different settings, side by side."""
