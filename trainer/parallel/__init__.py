"""Several ranks: who they are, which of them belong together, and how they talk to each other."""
