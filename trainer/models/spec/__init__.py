"""The description of a decoder in pure Python: what it is made of, before any array or cell exists."""
