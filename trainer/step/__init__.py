"""The training step: forward and backward for each micro-batch, norm, clip, update."""
