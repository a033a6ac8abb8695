"""Documents, images and random tokens: where training data comes from."""
