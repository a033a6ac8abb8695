"""The records of model families, in `trainer.config.families.FAMILIES`. A record is in the first file that it fits:

- `elsewhere.py`: transformers lacks the class;
- `mixtures.py`: every model of the family has experts;
- `layer_norm.py`: the norms are LayerNorm;
- `dense.py`: all other families.

`record.py` has the fields of a record, `common.py` the keys that families of several files share.
"""
