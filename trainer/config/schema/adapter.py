"""Adapters: YAML ``model_config.pet_config``."""

from collections.abc import Mapping
from typing import Literal

from trainer.config.patterns import read_pattern
from trainer.config.schema.fields import WIDTH, Section, setting


class PetConfig(Section):
    """Low-rank adapters (YAML ``model_config.pet_config``): Hu et al. 2021, y = x W^T + alpha / rank x A^T B^T."""

    pet_type: Literal["lora"] = setting("lora", "Kind of adapter.")
    lora_rank: int = setting(8, "Rows of A and columns of B.", ge=1, le=WIDTH)
    lora_alpha: float = setting(16.0, "Adapters are scaled by lora_alpha / lora_rank.", gt=0)
    lora_dropout: float = setting(0.0, "Dropout on what enters an adapter.", ge=0, lt=1)
    target_modules: str = setting(
        ".*wq|.*wk|.*wv|.*wo", "Regular expression for the whole name of the matrices to adapt: q_proj, k_proj, v_proj,"
        " o_proj, gate_proj, up_proj, down_proj or wq, wk, wv, wo, w1, w3, w2, with or without what stands before, as"
        " in model.layers.0.self_attn.q_proj. Latent attention has q_a_proj and q_b_proj, or q_proj without"
        " q_lora_rank, then kv_a_proj_with_mqa, kv_b_proj, o_proj.", min_length=1)

    @property
    def scale(self) -> float:
        """Factor on an adapter's output."""
        return self.lora_alpha / self.lora_rank

    def targets(self, layer: int, names: Mapping[str, str]) -> tuple[str, ...]:
        """Those of the matrices `names` of a layer that have an adapter, by their name in the block, in that order."""
        return tuple(name for name in names if self._is_target(layer, name, names[name]))

    def _is_target(self, layer: int, *both: str) -> bool:
        names = [f"model.layers.{layer}.{one}" for one in both] + [one.split(".")[-1] for one in both]
        pattern = read_pattern(self.target_modules)
        return any(pattern.fullmatch(one) for one in names)
