"""The embedding and the head on arrays, and the losses that the head computes."""
