"""Attention and feed-forward layer of a decoder on arrays, forward and backward.

A thread takes some hundred rows through all that a layer does with them, while they are in its cache: norm, products,
rotary embedding, SwiGLU, residual. Attention goes in blocks of queries: the scores of a block, [heads, queries, keys],
are the most that ever exists, and keys that no query of a block sees are left out. The backward pass computes them
again. Nothing is compiled, for any shape.

Sums over tokens are products over all of them, cut along the rows of the result, and sums over blocks stay in one
thread: the bits are the same for any number of threads.

Matrices in bfloat16 make all products those of numbers in bfloat16, summed in float32, as PyTorch's autocast and the
fused operators of an Ascend do: what a product takes, and what is kept for the backward pass, is rounded once. Between
two products all is float32: norms, rotary embedding, scores, softmax, SwiGLU. So are the residual stream, to which a
product adds its sums without rounding them, and the gradients of queries, keys and weights, which are sums.

Tensor-parallel ranks compute a sublayer together, each with its heads or columns; `RowExchange` says what they exchange
before and after it.

Legend: N tokens (B sequences x T), D hidden, H query heads, K key/value heads, G = H / K, d head size, C = H * d,
F feed-forward; n rows of a part, or those of the residual stream that a rank has; Q queries and S keys of a block.
"""
