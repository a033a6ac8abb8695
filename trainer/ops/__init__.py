"""Kernels: the only package that distinguishes fused operators from plain ones.

`select.py` (without MindSpore) selects the implementation of each kernel and gives the reason. `plain.py` has the plain
kernels, which work on every device; `ascend/kernels.py` has the fused operators. Both define the same classes with the
same call signatures, and MindSpore can shard both:

=================  ===================================================  ==================================
kernel             call                                                 returns
=================  ===================================================  ==================================
Linear             (x_NI, weight_OI[, bias_O])                          y_NO
RmsNorm(size,eps)  (x_ND, weight_D)                                     y_ND
Rotary(d, r)       (x_NC, tables)                                       x rotated, [N, C]
SwiGLU             (gate_NF, up_NF)                                     silu(gate) * up, [N, F]
Attention(h,k,d)   (q_NC, k_NK, v_NK, mask, more_mask, dropout)         o_NC
CrossEntropy       (x_ND, weight_VD, labels_N, valid_N1)                sum of the token losses, scalar
=================  ===================================================  ==================================

Kernels of experts (`plain_moe.py` computes on the host, `ascend/moe.py` in the graph; `routing.py`, without MindSpore,
has the arithmetic of the routing):

==================  ==================================================  ==================================
kernel              call                                                returns
==================  ==================================================  ==================================
Route(rule)         (scores_NE, bias_E | None, capacity | None, policy) Routing: rows and counts of experts
GroupedMatmul       (x_RI, weight_EOI, counts_E)                        y_RO
Permute             (x_ND, token_R, row_Nk)                             the rows of all experts, [R, D]
Unpermute           (y_RD, gates_Nk, token_R, row_Nk)                   sum of each token's rows, [N, D]
==================  ==================================================  ==================================

On a CPU, the array engine (`trainer.arrays`) computes whole layers instead of these kernels. Only `context.mode` 1 runs
the plain kernels there, operator by operator.

With context parallelism on an Ascend, `context.py` replaces `Attention` by attention over gathered keys and values
(`ascend/context.py`).

`precision.py` (without MindSpore) gives the dtype of each part; `kernel_set.py` builds every kernel in its dtype. x, y
and other values between kernels have the dtype of the matrix products. Weights, their gradients and the residual stream
are float32.

N = B * T tokens of a micro-batch of B sequences of T tokens; C = heads * d; K = key/value heads * d; d is the size of a
head, and r of its columns are rotated.

Every call site has its own instance of a kernel. If one `nn.Cell` with a `bprop` is called twice inside one compiled
function, MindSpore 2.10 mixes up the two forward results in the backward pass, without an error
(tests/parity/test_kernels.py shows it).
"""
