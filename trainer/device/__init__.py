"""Which device a run uses, what it needs, and how its threads are set."""
