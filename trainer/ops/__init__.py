"""Kernels: the only package that tells a fused operator from plain ones.

`select.py` (no MindSpore) decides which implementation each kernel gets and why. `plain.py` has the plain kernels,
which are right on every device, and `ascend/kernels.py` the fused operators. Both export the same classes with the same
call signatures, and MindSpore can shard both:

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

Experts (`plain_moe.py`, on the host, and `ascend/moe.py`, in the graph; `routing.py`, without MindSpore, has the
arithmetic of the routing):

==================  ==================================================  ==================================
kernel              call                                                returns
==================  ==================================================  ==================================
Route(rule)         (scores_NE, bias_E | None, capacity | None, policy) Routing: rows and counts of experts
GroupedMatmul       (x_RI, weight_EOI, counts_E)                        y_RO
Permute             (x_ND, token_R, row_Nk)                             the rows of all experts, [R, D]
Unpermute           (y_RD, gates_Nk, token_R, row_Nk)                   sum of each token's rows, [N, D]
==================  ==================================================  ==================================

On a CPU `trainer.arrays` computes whole layers in the place of all of them, but for `context.mode` 1, which runs the
plain kernels operator by operator.

Where several ranks of an Ascend share the tokens of a sequence, `context.py` puts attention over gathered keys and
values (`ascend/context.py`) in the place of `Attention`.

`precision.py` (no MindSpore) says which dtype each part computes in; `kernel_set.py` builds every kernel in its dtype.
x, y and what flows between kernels have the dtype of the matrix products; weights, their gradients and the residual
stream are float32.

N = B * T tokens of a micro-batch of B sequences of T tokens; C = heads * d; K = key/value heads * d; r columns of the d
of a head are rotated.

Every call site owns its own instance: one `nn.Cell` with a `bprop` that is called twice inside one compiled function
makes MindSpore 2.10 mix up the two forward results in the backward pass, without an error
(tests/parity/test_kernels.py shows it).
"""
