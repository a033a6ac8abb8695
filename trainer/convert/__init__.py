"""Converts files between the two schemas of MindSpore Transformers, and proves that both train the same."""
