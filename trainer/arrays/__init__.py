"""Native CPU layers: a decoder on NumPy arrays, forward and backward, and with a cache for prediction.

A thread takes a tile of some hundred rows through all that a sublayer does with them, while they are in its cache
(`tiles.py`, `sublayer.py`): norm, products, rotary embedding, SwiGLU, residual stream. Attention goes in blocks of
queries (`attention/blocks.py`): the scores of a block, [heads, queries, keys], are the most that ever exists, and keys
that no query of a block sees are left out. The backward pass computes them again. Nothing is compiled, for any shape.
`cells.py` lets MindSpore's autograd drive all this; what layers keep for it is listed in `trainer.models.spec.saved`.

Sums over tokens are products over all of them, cut along the rows of the result, and sums over blocks stay in one
thread: the bits are the same for any number of threads.

Matrices in bfloat16 or float16 make all products those of numbers in that dtype, summed in float32, as PyTorch's
autocast and the fused operators of an Ascend do: what a product takes, and what is kept for the backward pass, is
rounded once. Between two products all is float32: norms, rotary embedding, scores, softmax, SwiGLU. So are the residual
stream, to which a product adds its sums without rounding them, and the gradients of queries, keys and weights.

Legend: N tokens (B sequences x T), D hidden, H query heads, K key/value heads, G = H / K, d head size, C = H * d,
F feed-forward; n rows of a tile, or those of the residual stream that a rank has; Q queries and S keys of a block.
"""
