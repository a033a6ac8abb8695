"""The feed-forward half of a block: norm, gate and up projections, SwiGLU, down projection. Pure, like attention.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn

from trainer.models.lora import Projection
from trainer.models.shapes import block_names

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class MlpLayer(nn.Cell):
    """x_ND -> what the feed-forward layer adds to the residual stream, [N, D].

    `weights` is all that the block takes, in the order of `block_names`.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.norm_weight = block_names(settings).index("post_attention_layernorm.weight")
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        # One instance for every call site: see trainer/ops/__init__.py.
        self.gate, self.up = (Projection(f"mlp.{name}_proj", settings, kernels) for name in ("gate", "up"))
        self.down, self.swiglu = Projection("mlp.down_proj", settings, kernels), kernels.swiglu()

    def construct(self, x_ND, weights):
        y_ND = self.norm(x_ND, weights[self.norm_weight])
        return self.down(self.swiglu(self.gate(y_ND, weights), self.up(y_ND, weights)), weights)
