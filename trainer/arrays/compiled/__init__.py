"""Functions of rows that the machine's C compiler compiles for its processor, once."""
