"""Runs tasks of EleutherAI's evaluation harness, lm-eval, with the trainer's model."""
