"""The decoder: shapes and initial values (no MindSpore), its cells, and generation."""
