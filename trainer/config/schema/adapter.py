"""Adapters: YAML ``model_config.pet_config``."""

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import AfterValidator, Field

from trainer.config.patterns import read_pattern
from trainer.config.schema.fields import WIDTH, Section, refuse_value, setting

_Expression: TypeAlias = Annotated[str, Field(min_length=1)]
_METHODS = re.compile(r"true|olora|pissa(_niter_[1-9]\d?)?")


def _validate_initial(value: bool | str) -> bool | str:
    if not _METHODS.fullmatch(str(value).lower()):
        refuse_value("must be true, pissa, pissa_niter_N (N from 1 to 99) or olora")
    return value


_Initial: TypeAlias = Annotated[bool | str, AfterValidator(_validate_initial)]


class ModuleNames(NamedTuple):
    """The full names of a matrix, such as ``model.layers.0.self_attn.q_proj``."""

    others: tuple[str, ...]
    """Those of Hugging Face and of MindSpore Transformers' graph mode."""
    pynative: tuple[str, ...]
    """Those of MindSpore Transformers' PyNative mode; a matrix of it may be several matrices here."""


class PetConfig(Section):
    """Low-rank adapters (YAML ``model_config.pet_config``): Hu et al. 2021, y = x W^T + alpha / rank x A^T B^T."""

    pet_type: Literal["lora"] = setting("lora", "Kind of adapter.")
    lora_rank: int = setting(8, "LoRA rank: rows of A and columns of B.", ge=1, le=WIDTH)
    lora_alpha: float = setting(16.0, "Adapters are scaled by lora_alpha / lora_rank.", gt=0)
    use_rslora: bool = setting(False, "Scale adapters by lora_alpha / sqrt(lora_rank): rsLoRA (Kalajdzievski 2023).")
    lora_dropout: float = setting(0.0, "Dropout on the input of an adapter.", ge=0, lt=1)
    use_dora: bool = setting(
        False, "DoRA (Liu et al. 2024): trains a magnitude for each row of a matrix, and its direction by the adapter.")
    rank_pattern: dict[_Expression, Annotated[int, Field(ge=1, le=WIDTH)]] = setting(
        {}, "Ranks of some matrices: regular expression for the end of a name -> rank. As in PEFT, the first one that"
        " matches q_proj or model.layers.0.self_attn.q_proj counts. Default: lora_rank for all.")
    alpha_pattern: dict[_Expression, Annotated[float, Field(gt=0)]] = setting(
        {}, "lora_alpha of some matrices, as rank_pattern. Default: lora_alpha for all.")
    init_lora_weights: _Initial = setting(
        True, "Values that adapters start with. true: lora_a_std and lora_b_std say it. pissa: principal singular"
        " vectors of the matrix (Meng et al. 2024); pissa_niter_N: approximately, by N iterations. olora: its QR"
        " decomposition (Büyükakyüz 2024). These three take the adapter's product out of the frozen matrix.")
    base_dtype: Literal["float32", "bfloat16", "int8", "nf4"] = setting(
        "float32", "How the frozen matrices of the base model are held in memory. int8 and nf4 (QLoRA, Dettmers et al."
        " 2023) quantize the matrices of layers in blocks of 64; embedding and head are then bfloat16. Norms, biases"
        " and routers stay float32. On a CPU with context.mode 0, on one rank or with data parallelism.",
        fix="write float32 (4 bytes a number, as it is), bfloat16 (2 bytes), int8 (1.06) or nf4 (0.52): fewer bytes"
        " round more")
    lora_a_std: float | None = setting(
        None, "Standard deviation of the normal values that A starts with. Default null: uniform values in +-1 /"
        " sqrt(columns), as in PEFT.", gt=0)
    lora_b_std: float = setting(
        0.0, "Standard deviation of the normal values that B starts with. Default 0: B is zero, so that training starts"
        " from the base model.", ge=0)
    target_modules: str = setting(
        ".*wq|.*wk|.*wv|.*wo", "Regular expression for the full name of the matrices to adapt: q_proj, k_proj, v_proj,"
        " o_proj, gate_proj, up_proj, down_proj or wq, wk, wv, wo, w1, w3, w2 or linear_qkv, linear_proj, linear_fc1,"
        " linear_fc2, with or without a prefix such as model.layers.0.self_attn. embed_tokens and lm_head (or"
        " tok_embeddings, word_embeddings, output_layer) have adapters if they are named. Multi-head latent attention"
        " has q_a_proj and q_b_proj (q_proj without q_lora_rank), kv_a_proj_with_mqa, kv_b_proj and o_proj.",
        min_length=1)
    exclude_layers: _Expression | list[_Expression] = setting(
        [], "Regular expressions for matrices without adapters: for the full name of a matrix or of a module that"
        " contains it, or for the beginning of one part of the name. Default: none.")
    match: Literal["full", "search"] = setting(
        "full", "full: target_modules matches the full name of a matrix or its last part. search: target_modules and"
        " exclude_layers are found anywhere in the full name that MindSpore Transformers' PyNative mode has, such as"
        " model.decoder.layers.0.self_attention.linear_qkv.")

    @property
    def scale(self) -> float:
        """Returns the factor on the output of an adapter that no pattern matches."""
        return self.lora_alpha / self.divisor(self.lora_rank)

    def rank_of(self, name: str) -> int:
        """Returns the rank of the adapter of a matrix, by its full name in Hugging Face's models."""
        return first_match(self.rank_pattern, name, self.lora_rank)

    def alpha_of(self, name: str) -> float:
        """Returns the alpha of the adapter of a matrix, by its full name in Hugging Face's models."""
        return first_match(self.alpha_pattern, name, self.lora_alpha)

    def divisor(self, rank: int) -> float:
        """Returns the number that alpha is divided by: the rank, or with rsLoRA its square root."""
        if self.use_rslora:
            return math.sqrt(rank)
        return rank

    @property
    def initial(self) -> str:
        """Returns `init_lora_weights` as text in lower case: "true" by default."""
        return str(self.init_lora_weights).lower()

    @property
    def changes_base(self) -> bool:
        """Returns whether adapters start with a part of the base model's weights, which is taken out of these."""
        return self.initial != "true"

    @property
    def needs_whole_matrices(self) -> str:
        """Returns the key of what takes whole matrices of the base model; empty if ranks may shard these."""
        if self.changes_base:
            return "init_lora_weights"
        if self.base_dtype != "float32":
            return "base_dtype"
        if self.use_dora:
            return "use_dora"
        return ""

    @property
    def as_saved(self) -> "PetConfig":
        """Returns the settings of the adapters on disk: plain LoRA, of twice the rank for those that change the base.

        The factor on an adapter's output stays the same.
        """
        if not self.changes_base:
            return self
        factor = self.divisor(2)
        saved = {
            "lora_rank": 2 * self.lora_rank,
            "lora_alpha": self.lora_alpha * factor,
            "rank_pattern": {pattern: 2 * rank for pattern, rank in self.rank_pattern.items()},
            "alpha_pattern": {pattern: alpha * factor for pattern, alpha in self.alpha_pattern.items()},
            "init_lora_weights": True,
        }
        return self.model_copy(update=saved)

    @property
    def excluding(self) -> tuple[str, ...]:
        """Returns the expressions of `exclude_layers`."""
        if isinstance(self.exclude_layers, str):
            return (self.exclude_layers,)
        return tuple(self.exclude_layers)

    def adapts(self, names: ModuleNames) -> bool:
        """Returns whether a matrix has an adapter; raises a PatternError for an invalid expression."""
        return self.targets(names) and not any(self.excludes(expression, names) for expression in self.excluding)

    def targets(self, names: ModuleNames) -> bool:
        """Returns whether `target_modules` matches a matrix, which may be excluded."""
        if self.match == "search":
            return _is_found(self.target_modules, names.pynative)
        return _is_full_match(self.target_modules, names.others + names.pynative)

    def excludes(self, expression: str, names: ModuleNames) -> bool:
        """Returns whether an expression of `exclude_layers` matches a matrix or a module that contains it."""
        if self.match == "search":
            return _is_found(expression, tuple(_paths(names.pynative)))
        return _is_module(expression, names.others + names.pynative)


_Number = TypeVar("_Number", int, float)


def first_match(patterns: Mapping[str, _Number], name: str, default: _Number) -> _Number:
    """Returns the value of the first expression that matches a name, or the part of it that begins after some dot."""
    return next((value for expression, value in patterns.items() if ends_with(expression, name)), default)


# Each name is compared once for a file, not for every micro-batch.
@lru_cache(maxsize=1 << 14)
def _is_found(expression: str, names: tuple[str, ...]) -> bool:
    pattern = read_pattern(expression)
    return any(pattern.search(name) for name in names)


@lru_cache(maxsize=1 << 14)
def ends_with(expression: str, name: str) -> bool:
    """Returns whether an expression matches a name, or the part of it that begins after some dot."""
    pattern = read_pattern(expression)
    parts = name.split(".")
    return any(pattern.fullmatch(".".join(parts[start:])) for start in range(len(parts)))


@lru_cache(maxsize=1 << 14)
def _is_full_match(expression: str, names: tuple[str, ...]) -> bool:
    pattern = read_pattern(expression)
    return any(pattern.fullmatch(name) or pattern.fullmatch(name.rpartition(".")[2]) for name in names)


@lru_cache(maxsize=1 << 14)
def _is_module(expression: str, names: tuple[str, ...]) -> bool:
    """Returns whether an expression matches a path as a whole, or the beginning of a part as in graph mode."""
    pattern = read_pattern(expression)
    parts = {part for name in names for part in name.split(".")[1:]}
    return any(map(pattern.match, parts)) or any(map(pattern.fullmatch, _paths(names)))


def _paths(names: tuple[str, ...]) -> Iterator[str]:
    """Yields names and those of the modules that contain them: ``model``, ``model.layers``, ``model.layers.0``."""
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            yield ".".join(parts[:end])
