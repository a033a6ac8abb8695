"""LoRA adapters on disk, in the format of Hugging Face's PEFT, and the files that our checkpoints add. No MindSpore.

    step-00000100/adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...
                 /adapter_config.json         rank, alpha, targets
                 /optimizer.safetensors, state.json, COMPLETE

They contain no weights of the base model. `state.json` has a digest of the base model that they were trained on, which
must match; adapters from elsewhere have no digest and are not checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.checkpoint import adapter_values
from trainer.checkpoint.json_models import AdapterDescription, BaseRecord, read_base
from trainer.checkpoint.store import (
    OPTIMIZER,
    STATE,
    errors_at,
    find_checkpoint,
    read_checkpoint,
    read_safetensors,
)
from trainer.checkpoint.weights import (
    CheckedWeights,
    ShardSpecs,
    check_files,
    check_weights,
    from_seed,
    open_initial_weights,
)
from trainer.errors import UserError, shorten_repr, value_text
from trainer.models.spec.adapters import (
    SECTION,
    adapted_matrices,
    adapter_factors,
    changes_base,
    layer_targets,
    merged_matrix,
    projections,
    saved_settings,
    target_pattern,
    vocabulary_adapters,
    with_magnitudes,
)
from trainer.models.spec.names import layer_prefix, magnitude_name
from trainer.models.spec.shapes import adapter_shapes, all_shapes, base_dtypes, parameter_shapes, parameter_specs
from trainer.optim.groups import EMA
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.storage.json_files import JsonError, parse_json
from trainer.storage.marker import MARKER, read_saved
from trainer.storage.tensor_file import ArrayOrLazyArray, LazyArray, read_row_blocks

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig

PREFIX = "base_model.model."
"""PEFT's prefix of every parameter name."""
PART = "adapter_model"
ADAPTER_CONFIG = "adapter_config.json"

_KEY = "adapter_id"
_ADAPTER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(?:lora_[AB]\.weight|lora_magnitude_vector)")

Weights = dict[str, np.ndarray]
# Keys of PEFT's adapter_config.json that change what adapters compute, and the values that are supported.
_SUPPORTED_VALUES = {
    "peft_type": "LORA", "bias": "none", "fan_in_fan_out": False,
    "modules_to_save": None, "layer_replication": None, "lora_bias": False,
    "use_qalora": False, "trainable_token_indices": None, "target_parameters": None,
}  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights with which PEFT changes the base model; after a conversion it writes True."""
# Keys that every version of PEFT knows; an older version rejects unknown keys.
_WRITTEN = ("bias", "fan_in_fan_out", "modules_to_save")


def load_initial_weights(
    config: Config, note: Callable[[str], None] | None = None, *, new_modules: bool = True, averages: bool = False,
    parts: ShardSpecs | None = None, world: World = SINGLE_PROCESS,
) -> Weights | None:  # fmt: skip
    """Loads the initial weights of a run: `load_checkpoint`, and with `pet_config` also the adapters of `adapter_id`.

    Args:
        note: Called with a sentence about tensors that are not loaded, and about missing ones that start from the seed.
        new_modules: Initialise MTP modules that the file lacks from the seed; False: they are missing in the result.
        averages: Load the moving averages of the trained weights instead of these.
        parts: Shards of the parameters to read; None: read all parameters unsharded.
        world: The ranks that all read the files, see `read_checkpoint`.

    Returns:
        All parameters by name, initialised from `seed` where no file has them; None without a file.

    Raises:
        UserError: The files cannot be read, or belong to another model or base model.
    """
    weights = _load_weights(config, note, new_modules, parts, world)
    if averages and weights is not None:
        weights |= _open_averages(config, weights if parts is None else parts, world).read(parts)
    return weights


def _open_averages(config: Config, names: Collection[str], world: World) -> CheckedWeights:
    """Opens the moving averages of a checkpoint's trained weights; `names` are the parameters that the run has.

    Raises a UserError if the checkpoint has none, or they do not fit the model.
    """
    key = "load_checkpoint"
    if config.has_adapters:
        key = "adapter_id"
    path = Path(getattr(config, key) or "").expanduser()
    where = config.source.where(key)
    prefix = f"{EMA}."
    stored: dict[str, LazyArray] = {}
    checkpoint = path
    with errors_at(where, key):
        if path.is_dir():
            checkpoint = find_checkpoint(path)
            tensors = read_checkpoint(checkpoint, (OPTIMIZER,), world=world).tensors[OPTIMIZER]
            stored = {name[len(prefix) :]: array for name, array in tensors.arrays().items() if name.startswith(prefix)}
        if not stored:
            rule = "there are no moving averages of weights, which use_ema asks for"
            fix = "name a checkpoint of a training with optimizer.ema_decay, or leave use_ema out"
            raise UserError(rule, value=str(path), fix=fix)
        shapes = {name: shape for name, shape in all_shapes(config.network).items() if name in stored}
        check_weights(stored, shapes, checkpoint)
    arrays: dict[str, ArrayOrLazyArray] = {name: array for name, array in stored.items() if name in names}
    return CheckedWeights(arrays, arrays, checkpoint, where, key)


def _load_weights(
    config: Config, note: Callable[[str], None] | None, new_modules: bool, parts: ShardSpecs | None, world: World
) -> Weights | None:
    if not config.has_adapters:
        stored = open_initial_weights(config, note, new_modules=new_modules, world=world)
        return stored and stored.read(parts)
    weights, compared = read_base_weights(config, parts, world, note, new_modules=new_modules)
    if config.adapter_id:
        adapters = read_adapters(config, Path(config.adapter_id).expanduser(), compared).read(parts)
    elif changes_base(config.decoder):
        adapters = adapter_values.decompose(weights, config.decoder, config.seed)
    else:
        adapters = _from_seed(config, adapters=True).read(parts)
        adapters |= adapter_values.row_lengths(weights | adapters, config.decoder)
    return join_weights(config, weights, adapters)


def join_weights(config: Config, base: Weights, adapters: Weights) -> Weights:
    """Returns the weights that a run computes with, from those of the base model and adapters as they are saved."""
    if changes_base(config.decoder):
        return adapter_values.take_out(base | adapters, config.decoder)
    return base | adapters


def first_weights(config: Config, world: World = SINGLE_PROCESS) -> Mapping[str, np.ndarray]:
    """Returns the weights with which a training began that now continues a checkpoint: all parameters, unsharded."""
    return load_initial_weights(config, world=world) or _from_seed(config, adapters=False).read(None)


def check_starting_files(config: Config) -> None:
    """Raises the UserError that `load_initial_weights` would raise, without reading numbers; for a plan."""
    check_files(config)
    if config.has_adapters and config.adapter_id:
        read_adapters(config, Path(config.adapter_id).expanduser(), None)


def read_base_weights(
    config: Config, parts: ShardSpecs | None, world: World, note: Callable[[str], None] | None = None, *,
    new_modules: bool = True,
) -> tuple[Weights, Mapping[str, ArrayOrLazyArray]]:  # fmt: skip
    """Reads the weights of the base model as a run holds them: those of `load_checkpoint`, else of `seed`.

    Also returns all of them in float32, for a digest.
    """
    stored = open_initial_weights(config, note, new_modules=new_modules, world=world)
    base = stored or _from_seed(config, adapters=False)
    dtypes = base_dtypes(config.decoder)
    weights = base.read(parts, dtypes)
    if parts is None and not dtypes:
        return weights, weights
    return weights, base.arrays


def _from_seed(config: Config, adapters: bool) -> CheckedWeights:
    """Returns the initial values of the adapters, or of the model without them."""
    specs = parameter_specs(config.decoder).values()
    parameters = [each for each in specs if (each.role == "adapter") == adapters]
    arrays: dict[str, ArrayOrLazyArray] = {**from_seed(parameters, config.decoder, config.seed)}
    return CheckedWeights(arrays, {}, Path())


def base_record(config: Config, weights: Mapping[str, np.ndarray], parts: ShardSpecs | None = None) -> dict[str, Any]:
    """Returns a checkpoint's record of the adapters' base model: the origin of its weights, and their digest.

    Args:
        weights: The weights of the run.
        parts: The shards that `weights` has; the base model is then read again for the digest, as it is where adapters
            change it and where the run holds it in few bytes. None: all weights.
    """
    record = {"load_checkpoint": config.load_checkpoint, "seed": config.seed}
    base: Mapping[str, ArrayOrLazyArray] = weights
    if parts is not None or changes_base(config.decoder) or base_dtypes(config.decoder):
        base = (open_initial_weights(config) or _from_seed(config, adapters=False)).arrays
    return record | {"digest": base_model_digest(base, config.decoder)}


def base_model_digest(weights: Mapping[str, ArrayOrLazyArray], settings: ModelConfig) -> str:
    """Computes the SHA-256 of names, shapes and float32 values of the decoder's parameters, without adapters."""
    digest = hashlib.sha256()
    for name, shape in sorted(parameter_shapes(settings).items()):
        if name in weights:  # a multi-token prediction module may be missing
            digest.update(f"{name} {list(shape)}\n".encode())
            for block in read_row_blocks(weights[name]):
                digest.update(np.ascontiguousarray(block, np.float32).data)
    return digest.hexdigest()


def read_adapters(config: Config, path: Path, base: Mapping[str, ArrayOrLazyArray] | None) -> CheckedWeights:
    """Opens adapters, which must have been trained on the base model `base`; None: their numbers are not read.

    Args:
        path: A folder as PEFT writes it, a checkpoint of a run with `pet_config`, or a folder of such checkpoints.

    Raises:
        UserError: There are no adapters, or they do not fit `pet_config` or `base`.
    """
    where = config.source.where(_KEY)
    with errors_at(where, _KEY):
        path, tensors, record = _open_adapters(path, numbers=base is not None)
    if record is not None and base is not None:
        check_base(record, config, base)
    with errors_at(where, _KEY):
        return fitting_adapters(tensors, config, path, base)._replace(where=where, key=_KEY)


def _open_adapters(path: Path, numbers: bool) -> tuple[Path, dict[str, LazyArray], BaseRecord | None]:
    """Opens the tensors of adapters; returns them with their folder, and the record of their base model if it has one.
    """
    file = path / f"{PART}.safetensors"
    if file.exists() and not (path / MARKER).exists() and not (path / STATE).exists():
        return path, read_safetensors(file, numbers=numbers), None
    path = find_checkpoint(path)
    if (path / MARKER).exists() and not (path / file.name).exists():
        rule = "the checkpoint contains a full model, not adapters"
        raise UserError(rule, value=str(path), fix="give it as --load_checkpoint")
    checkpoint = read_checkpoint(path, (PART,), checksums=numbers)
    return path, checkpoint.tensors[PART].arrays(), read_base(checkpoint)


def fitting_adapters(
    tensors: Mapping[str, ArrayOrLazyArray], config: Config, path: Path,
    base: Mapping[str, ArrayOrLazyArray] | None = None,
) -> CheckedWeights:  # fmt: skip
    """Checks the adapters of a folder; raises a UserError if they do not fit `pet_config`, or the base model `base`."""
    _check_description(path, config)
    adapters = {name.removeprefix(PREFIX): array for name, array in tensors.items()}
    if vocabulary_adapters(config.decoder):
        _drop_base_layers(adapters, base, path)
    shapes = adapter_shapes(saved_settings(config.decoder))
    fix = ""
    if adapters.keys() != shapes.keys():
        fix = _fix_for_targets(adapters, config.decoder)
    check_weights(adapters, shapes, path, fix=fix)
    arrays = {name: adapters[name] for name in shapes}
    return CheckedWeights(arrays, arrays, path)


def _drop_base_layers(
    adapters: dict[str, ArrayOrLazyArray], base: Mapping[str, ArrayOrLazyArray] | None, path: Path
) -> None:
    """Removes the embedding and the head, which PEFT saves beside their adapters.

    Raises a UserError if they are not those of the base model.
    """
    ending = ".base_layer.weight"
    for name in [name for name in adapters if name.endswith(ending)]:
        saved = adapters.pop(name)
        matrix = name.removesuffix(ending) + ".weight"
        if base is None or matrix not in base:
            continue
        if not np.array_equal(saved, base[matrix]):
            rule = f"the folder has another {matrix} than the base model, which adapters cannot replace"
            raise UserError(rule, value=str(path), fix="merge them into a model with PEFT")


def _fix_for_targets(names: Iterable[str], settings: ModelConfig) -> str:
    """Returns a fix with the `target_modules` of adapters with these names.

    Returns an empty text if the model lacks a matrix, or if `target_modules` has other names of matrices.
    """
    if settings.pet_config is None or settings.pet_config.match == "search":
        return ""
    targets: dict[int, list[str]] = {}
    for name in sorted(names):
        match = _ADAPTER.fullmatch(name)
        if match is None or match[2] not in projections(settings):
            return ""
        layer = targets.setdefault(int(match[1]), [])
        if match[2] not in layer:
            layer.append(match[2])
    return f"write {SECTION}.target_modules: '{target_pattern(dict(sorted(targets.items())))}'"


def check_base(before: BaseRecord, config: Config, base: Mapping[str, ArrayOrLazyArray]) -> None:
    """Raises a UserError unless the adapters of a checkpoint with the record `before` were trained on `base`."""
    now = base_model_digest(base, config.decoder)
    if before.digest == now:
        return
    fix = f"give the same base model with --load_checkpoint {before.load_checkpoint}"
    if not before.load_checkpoint:
        fix = f"their base model had random weights: leave load_checkpoint out and use --seed {before.seed}"
    rule = (
        f"the adapters were trained on another base model (its SHA-256 is {before.digest[:12]}..., that of this one"
        f" is {now[:12]}...)"
    )
    where = config.source.where("load_checkpoint")
    raise UserError(rule, where=where, key="load_checkpoint", value=config.load_checkpoint, fix=fix)


def _check_description(folder: Path, config: Config) -> None:
    """Checks that `adapter_config.json` agrees with `pet_config`."""
    adapters = saved_settings(config.decoder).pet_config

    def problem(rule: str, fix: str) -> UserError:
        return UserError(rule, value=str(folder), fix=fix)

    try:
        description = _read_description(folder)
    except (OSError, JsonError) as error:
        fix = "name a folder with adapter_model.safetensors and its adapter_config.json"
        raise problem(f"the folder of the adapters has no readable {ADAPTER_CONFIG} ({error})", fix) from error
    others = description.model_extra or {}
    theirs = {
        "lora_rank": description.r,
        "lora_alpha": description.lora_alpha,
        "use_rslora": description.use_rslora,
        "use_dora": description.use_dora,
        "rank_pattern": description.rank_pattern or {},
        "alpha_pattern": description.alpha_pattern or {},
    }
    initial = str(others.get("init_lora_weights", True)).lower()
    if initial.startswith(_CHANGES_BASE):
        rule = f"{ADAPTER_CONFIG} says init_lora_weights {initial}: such adapters are for a changed base model"
        raise problem(rule, "save them in PEFT with path_initial_model_for_weight_conversion")
    for name, value in _SUPPORTED_VALUES.items():
        if name in others and others[name] != value and (others[name] or value):
            rule = f"{ADAPTER_CONFIG} says {name} {shorten_repr(others[name])}: such adapters are not supported"
            raise problem(rule, "use plain LoRA")
    for name, value in theirs.items():
        ours = getattr(adapters, name)
        if value != ours:
            text = value_text(value)
            if isinstance(value, float):
                text = f"{value:g}"
            if changes_base(config.decoder):
                rule = f"the adapters have {name} {text}, those of this {SECTION} are saved with {value_text(ours)}"
                raise problem(rule, "write the pet_config that they were trained with")
            rule = f"the adapters have {name} {text}, {SECTION} says {value_text(ours)}"
            raise problem(rule, f"set pet_config.{name} to {text}")


def base_of_adapters(folder: Path) -> str:
    """Returns the base model that the adapter_config.json of a folder names; empty if it names none."""
    try:
        return str((_read_description(folder).model_extra or {}).get("base_model_name_or_path") or "")
    except (OSError, JsonError):
        return ""


def _read_description(folder: Path) -> AdapterDescription:
    return parse_json(read_saved(folder / ADAPTER_CONFIG), AdapterDescription, ADAPTER_CONFIG)


def adapter_config(settings: ModelConfig, base: str) -> dict[str, Any]:
    """Returns the content of PEFT's adapter_config.json; `base` is `load_checkpoint`, which may be empty."""
    adapters = settings.pet_config
    assert adapters is not None
    targets = [layer_targets(settings, layer) for layer in range(settings.num_layers)]
    names = [name.split(".")[-1] for name in targets[0]]
    if len(set(targets)) > 1:  # layers differ: full names
        names = [layer_prefix(layer) + name for layer, layer_names in enumerate(targets) for name in layer_names]
    names += [name.split(".")[-1] for name in vocabulary_adapters(settings)]
    methods = {key: getattr(adapters, key) for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")}
    return {
        **{name: _SUPPORTED_VALUES[name] for name in _WRITTEN},
        **{key: value for key, value in methods.items() if value},
        "peft_type": adapters.pet_type.upper(),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": adapters.lora_rank,
        "lora_alpha": adapters.lora_alpha,
        "lora_dropout": adapters.lora_dropout,
        "target_modules": names,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def merge_adapters(weights: Mapping[str, np.ndarray], settings: ModelConfig) -> Weights:
    """Returns the decoder's parameters with the adapters merged in: W + scale B A, summed in float64."""
    merged = {name: weights[name] for name in parameter_shapes(settings) if name in weights}
    for name, adapter in adapted_matrices(settings):
        if f"{name}.weight" not in merged:  # of an MTP module that the file of the base model lacks
            continue
        a, b = (factor.astype(np.float64) for factor in adapter_factors(weights, name))
        total = merged_matrix(np.asarray(merged[f"{name}.weight"]), a, b, adapter.scale)
        if adapter.has_magnitude:
            total = with_magnitudes(total, weights[magnitude_name(name)])
        merged[f"{name}.weight"] = total.astype(np.float32)
    return {name: np.asarray(array) for name, array in merged.items()}
