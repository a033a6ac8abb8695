"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): modules that predict the token after next.

Module k takes what the module before it knows of a place (the first: the main model, after its final norm) and the
embedding of the token k places further, and predicts the token after that:

    h_i^k = norm_k(block_k(W_k [norm(Emb(t_{i+k})); norm(h_i^{k-1})])),   loss_k = cross entropy(head(h_i^k), t_{i+k+1})

The paper leaves open where the norm before the head stands; this, and the order of the two halves of the product, is
what transformers and vLLM compute with DeepSeek's released weights. Embedding and head are the main model's. Legend:
N tokens, D hidden.
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
    """(embedding of the further token, residual stream, its norm, two norms, projection) -> input of the block."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        sizes = settings.hidden_size, settings.rms_norm_eps
        self.final_norm, self.embedding_norm, self.hidden_norm = (kernels.rms_norm(*sizes) for _ in range(3))
        self.concat, self.project = P.Concat(1), kernels.linear()
        self.cast = P.Cast()

    def construct(self, embedded_ND, hidden_ND, final_norm_D, enorm_D, hnorm_D, weight_DC):
        known_ND = self.hidden_norm(self.final_norm(hidden_ND, final_norm_D), hnorm_D)
        both_NC = self.concat((self.embedding_norm(embedded_ND, enorm_D), known_ND))
        return self.cast(self.project(both_NC, weight_DC), hidden_ND.dtype)
