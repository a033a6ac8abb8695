"""Checkpoints of MindSpore Transformers as initial weights: its folders, its strategy files, and its names."""
