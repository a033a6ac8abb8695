"""The updates of parameters that optimizers make, for each device."""
