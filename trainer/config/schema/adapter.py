"""Adapters: YAML ``model_config.pet_config``."""

from collections.abc import Mapping
from typing import Literal

from trainer.config.patterns import read_pattern
from trainer.config.schema.fields import WIDTH, Section, setting


class PetConfig(Section):
    """Low-rank adapters (YAML ``model_config.pet_config``): Hu et al. 2021, y = x W^T + alpha / rank x A^T B^T."""

    pet_type: Literal["lora"] = setting("lora", "Kind of adapter.")
    lora_rank: int = setting(8, "LoRA rank: rows of A and columns of B.", ge=1, le=WIDTH)
    lora_alpha: float = setting(16.0, "Adapters are scaled by lora_alpha / lora_rank.", gt=0)
    lora_dropout: float = setting(0.0, "Dropout on the input of an adapter.", ge=0, lt=1)
    target_modules: str = setting(
        ".*wq|.*wk|.*wv|.*wo", "Regular expression for the full name of the matrices to adapt: q_proj, k_proj, v_proj,"
        " o_proj, gate_proj, up_proj, down_proj or wq, wk, wv, wo, w1, w3, w2, with or without a prefix such as"
        " model.layers.0.self_attn. Multi-head latent attention has q_a_proj and q_b_proj (q_proj without q_lora_rank),"
        " kv_a_proj_with_mqa, kv_b_proj and o_proj.", min_length=1)

    @property
    def scale(self) -> float:
        """Returns the factor on an adapter's output."""
        return self.lora_alpha / self.lora_rank

    def targets(self, layer: int, names: Mapping[str, str]) -> tuple[str, ...]:
        """Returns the matrices of a layer that have an adapter, by their names in the block.

        `names` are the matrices of the layer: names in the block -> MindSpore Transformers' names.
        """
        return tuple(name for name in names if self._is_target(layer, name, names[name]))

    def _is_target(self, layer: int, *names: str) -> bool:
        pattern = read_pattern(self.target_modules)
        candidates = [f"model.layers.{layer}.{name}" for name in names] + [name.split(".")[-1] for name in names]
        return any(pattern.fullmatch(candidate) for candidate in candidates)
