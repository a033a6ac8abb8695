"""The device of a run: which one is used, what it needs, and how its threads are set."""
