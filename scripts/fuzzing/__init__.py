"""Broken input for `scripts/fuzz.py`: mutations, and one file for each group of inputs."""
