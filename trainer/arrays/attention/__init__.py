"""The attention sublayer of a decoder layer on arrays."""
