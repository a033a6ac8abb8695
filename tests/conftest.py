"""Its presence puts this folder on the import path, so that every test may import the helpers beside it."""
