"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): modules that predict the token after next.

Module k takes what the module before it knows of a place (the first: the residual stream of the last layer) and the
embedding of the token k places further, and predicts the token after that:

    h_i^k = block_k(W_k [norm(Emb(t_{i+k})); norm(h_i^{k-1})]),   loss_k = cross entropy(head(norm(h_i^k)), t_{i+k+1})

The two halves of the product are in the order of DeepSeek's released weights (the paper writes them the other way
round). Embedding and head are the main model's. Legend: N tokens, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn
from mindspore.ops import operations as P

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet

WEIGHTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
NORM = "shared_head.norm.weight"


class MergeTokens(nn.Cell):
    """(embedding of the further token, what is known so far, two norms, projection) -> input of the block, [N, D]."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        sizes = settings.hidden_size, settings.rms_norm_eps
        self.embedding_norm, self.hidden_norm = kernels.rms_norm(*sizes), kernels.rms_norm(*sizes)
        self.concat, self.project = P.Concat(1), kernels.linear()
        self.cast = P.Cast()

    def construct(self, embedded_ND, hidden_ND, enorm_D, hnorm_D, weight_DC):
        both_NC = self.concat((self.embedding_norm(embedded_ND, enorm_D), self.hidden_norm(hidden_ND, hnorm_D)))
        return self.cast(self.project(both_NC, weight_DC), hidden_ND.dtype)
