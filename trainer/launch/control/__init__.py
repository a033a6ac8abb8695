"""The control port: how the launchers of several nodes talk to each other, and to nobody else."""
