"""The feed-forward half of a block: norm, gate and up projections, SwiGLU, down projection. Pure, like attention.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn

from trainer.models.shapes import mlp_shapes

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class MlpLayer(nn.Cell):
    """x_ND -> what the feed-forward layer adds to the residual stream, [N, D]. Weights: order of `mlp_shapes`."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.num_weights = len(mlp_shapes(settings))
        self.bias = settings.mlp_has_bias
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        linear = kernels.linear_bias if self.bias else kernels.linear
        self.gate, self.up, self.down, self.swiglu = linear(), linear(), linear(), kernels.swiglu()

    def construct(self, x_ND, weights):
        y_ND = self.norm(x_ND, weights[0])
        if self.bias:
            gate_NF, up_NF = self.gate(y_ND, weights[1], weights[2]), self.up(y_ND, weights[3], weights[4])
            return self.down(self.swiglu(gate_NF, up_NF), weights[5], weights[6])
        gate_NF, up_NF = self.gate(y_ND, weights[1]), self.up(y_ND, weights[2])
        return self.down(self.swiglu(gate_NF, up_NF), weights[3])
