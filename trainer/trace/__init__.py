"""The witness of a run: what its layers compute, recorded rank by rank, and the first place where two records differ."""
