"""The witness of a run: what its layers compute on each rank, and the first place where two records differ."""
