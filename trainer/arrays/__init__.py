"""Native CPU layers: a decoder on NumPy arrays, forward and backward, and with a KV cache for prediction.

A thread takes a tile of some hundred rows through all operations of a sublayer, while they are in its cache
(`tiles.py`, `sublayer.py`): norm, products, rotary embedding, SwiGLU, residual stream. Attention goes in blocks of
queries (`attention/blocks.py`): only the scores of one block, [heads, queries, keys], exist at a time, without the keys
that its queries do not see. The backward pass computes them again. No shape needs a compilation, so any shape is fast.
oneDNN computes products, and C code that is compiled once for the processor (`compiled/`) computes functions of rows,
the attention of a block and some products; NumPy computes them where both are missing. `passes.py` records the passes
of these layers on a tape and runs them backward; `trainer.models.spec.saved` lists what they save for that.

Sums over tokens are products over all tokens, divided along the rows of the result, and sums over blocks stay in one
thread: the bits are the same for any number of threads.

With matrices in bfloat16 or float16, all products take numbers in that dtype and sum in float32, like PyTorch's
autocast and the fused operators of an Ascend: the inputs of products, and the arrays saved for the backward pass, are
rounded once. All other operations are in float32: norms, rotary embedding, scores, softmax, SwiGLU. So are the residual
stream, to which a product adds its sums without rounding them, and the gradients of queries, keys and weights.

Legend: N tokens (B sequences x T), D hidden, H query heads, K key/value heads, G = H / K, d head size, C = H * d,
F feed-forward; n rows of a tile, or those of the residual stream that a rank has; Q queries and S keys of a block.
"""
