"""A run from its configuration to its exit code."""
