"""Searches for the layout of a file on a number of ranks: `plan --search`. Works without MindSpore."""
