"""The sublayer with experts of a decoder layer on arrays."""
