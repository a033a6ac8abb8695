"""Reads weights by name, as float32 arrays, from our checkpoints and Hugging Face's safetensors. No MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors

from trainer.checkpoint.expert_names import disk_shapes, form_of, from_disk
from trainer.checkpoint.joined_names import split_joined
from trainer.checkpoint.store import behind_link, find_checkpoint, loads_weights, read_checkpoint, use_another
from trainer.config.layer_ranges import layer_text
from trainer.errors import UserError
from trainer.input_files import open_file
from trainer.models.init import initial_value
from trainer.models.shapes import EMBEDDING, EXPERT_BIAS, HEAD, layer_prefix, parameter_name, parameter_shapes
from trainer.storage.marker import MARKER, read_saved

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
# A folder with one of them is a checkpoint of this trainer, complete or not.
_OUR_FILES = (MARKER, "state.json", "optimizer.safetensors")
_LAYERS = "model.layers."
_OF_MODULES = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Ends of the names that only multi-token prediction (MTP) modules have."""
# Tables that older Hugging Face files contain; here they are computed from the configuration.
_BUFFERS = (".rotary_emb.inv_freq",)


def requested_weights(
    config: Config, notice: Callable[[str], None] | None = None, *, new_modules: bool = True
) -> dict[str, np.ndarray] | None:
    """The weights of `load_checkpoint`, checked against the model; None when the key is not set.

    `notice` is called with a sentence about weights that are left out, and about missing ones that start from the seed.
    Multi-token prediction modules that the file lacks are initialised from the seed with `new_modules`, as a model has
    them even where only training reads them; otherwise they are missing here too.

    Raises:
        UserError: The file cannot be read, or belongs to another model.
    """
    if not config.load_checkpoint:
        return None
    weights, absent, biases = _fitting_model(config, notice, new_modules=new_modules)
    shapes = parameter_shapes(config.network)
    found = from_disk(weights, {name: shape for name, shape in shapes.items() if name not in absent})
    new = [name for name in shapes if name in (absent if new_modules else biases)]
    return found | {name: initial_value(name, shapes[name], config.decoder, config.seed) for name in new}


def check_files(config: Config) -> None:
    """Raises the UserError of `requested_weights` without reading numbers: files, names, dtypes and shapes alone."""
    if config.load_checkpoint:
        _fitting_model(config, numbers=False)


def _fitting_model(
    config: Config, notice: Callable[[str], None] | None = None, *, new_modules: bool = True, numbers: bool = True
) -> tuple[dict[str, np.ndarray], set[str], set[str]]:
    """The tensors of `load_checkpoint`, which fit the model; the parameters that they lack, and the expert biases among
    those."""
    path, where = Path(config.load_checkpoint).expanduser(), config.source.where("load_checkpoint")
    weights = read_weights(path, where, numbers=numbers)
    if config.classifier is not None:
        return _fitting(weights, parameter_shapes(config.network), config.network, path, where), set(), set()
    settings = config.decoder
    weights = split_joined(weights, settings)
    unused, *notices = unused_modules(weights, settings)
    modules, about_modules = missing_modules(weights, settings, new_modules and config.trains)
    if config.trains and settings.pet_config is not None:  # frozen ones from the seed would predict nothing
        modules = set()
    biases, about_biases = missing_biases(weights, settings)
    absent = biases | modules
    for text in (*notices, about_biases if biases else "", about_modules if modules else ""):
        if text and notice is not None:
            notice(text)
    used = {name: array for name, array in weights.items() if name not in unused}
    shapes = {name: shape for name, shape in parameter_shapes(settings).items() if name not in absent}
    return _fitting(used, shapes, settings, path, where), absent, biases


def fitting_weights(
    weights: Mapping[str, np.ndarray],
    settings: ModelConfig,
    path: Path,
    where: str = "",
    key: str = "load_checkpoint",
) -> dict[str, np.ndarray]:
    """Checks weights from `read_weights` and returns them by parameter name, with the experts of a layer stacked.

    `path`, `where` and `key` are for messages.

    Raises:
        UserError: They belong to another model.
    """
    shapes = parameter_shapes(settings)
    return from_disk(_fitting(split_joined(weights, settings), shapes, settings, path, where, key), shapes)


def _fitting(
    weights: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    settings: ModelConfig,
    path: Path,
    where: str,
    key: str = "load_checkpoint",
) -> dict[str, np.ndarray]:
    """The tensors without copies, under their names on disk; raises a UserError unless they are those of `shapes`."""
    own = {name: array for name, array in weights.items() if not _is_copy(name, weights, settings)}
    check_weights(own, disk_shapes(shapes, form_of(own)), path, where, key, settings)
    return own


def _is_copy(name: str, weights: Mapping[str, np.ndarray], settings: ModelConfig) -> bool:
    """Whether it is a copy of a weight that layers share, or of embedding or head in a published multi-token
    prediction module."""
    if (shared := _owner(name, settings)) != name and shared in weights:
        return _is_equal(weights[name], weights[shared])
    for ending, main in ((".embed_tokens.weight", EMBEDDING), (".shared_head.head.weight", HEAD)):
        if name.endswith(ending) and name != main and settings.mtp_depth:
            whole = EMBEDDING if settings.tie_word_embeddings else main
            return whole in weights and _is_equal(weights[name], weights[whole])
    return False


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.array_equal(_without_repeats(one), _without_repeats(other))


def _without_repeats(array: np.ndarray) -> np.ndarray:
    """The array; one number where it is that number everywhere in memory, as in `read_weights` without numbers."""
    return array if any(array.strides) else array[(slice(1),) * array.ndim]


def _owner(name: str, settings: ModelConfig) -> str:
    """The name under which the model has a parameter that layers of a group share (layers_group)."""
    layer = _layer(name)
    return name if layer < 0 else parameter_name(settings, layer, name.removeprefix(layer_prefix(layer)))


def read_weights(path: Path, where: str = "", *, numbers: bool = True) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name.

    Args:
        path: A `.safetensors` file, a folder of them as Hugging Face publishes it, a checkpoint folder of this trainer,
            or a folder of checkpoints (the newest complete one).
        where: Location of the setting, for messages.
        numbers: False: all numbers are 0 and take no memory, and no checksum is compared; only headers are read.

    Raises:
        UserError: There are no readable weights.
    """
    path = behind_link(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if files and not any((path / name).exists() for name in _OUR_FILES):
        weights: dict[str, np.ndarray] = {}
        file_of: dict[str, Path] = {}
        for file in files:
            found = read_safetensors(file, where, numbers=numbers)
            if twice := sorted(found.keys() & weights.keys()):
                rule = f"{file_of[twice[0]].name} and {file.name} both hold {first_of(twice)}"
                fix = "remove the file that does not belong there, or name one file"
                raise UserError(rule, where=where, key="load_checkpoint", value=str(path), fix=fix)
            weights |= found
            file_of |= dict.fromkeys(found, file)
        return weights
    try:
        found = find_checkpoint(path)
        if (found / "adapter_model.safetensors").exists():
            rule = "the checkpoint holds adapters, not the weights of a model"
            raise UserError(rule, value=str(found), fix="give it as --adapter_id, and their base as --load_checkpoint")
        return model_part(found, "model", numbers)
    except UserError as error:
        raise loads_weights(error, where, "load_checkpoint") from error


def model_part(path: Path, part: str, numbers: bool) -> dict[str, np.ndarray]:
    """The weights of a complete checkpoint of this trainer; `numbers` as in `read_weights`."""
    found = read_checkpoint(path, (part,), lazy=() if numbers else (part,), checksums=numbers).tensors[part]
    return dict(found) if numbers else {name: _stand_in(found.about(name)[1]) for name in found}


def check_weights(
    weights: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
    where: str = "",
    key: str = "load_checkpoint",
    settings: ModelConfig | None = None,
) -> None:
    """Checks that every parameter is there with its shape and is finite; the file may also contain a tied head.

    `path`, `where` and `key` are for messages; `settings` is the model section, None for adapters.

    Raises:
        UserError: Names the first parameter that is missing, unknown or of another shape, and counts the others.
    """
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes and name != HEAD and not name.endswith(_BUFFERS)]
    other = [name for name in shapes if name in weights and weights[name].shape != tuple(shapes[name])]
    problems = [f"lacks {first_of(missing)}"] if missing else []
    if unknown:
        problems.append(f"holds {first_of(unknown)}, which this model does not have")
    if other:
        theirs, ours = weights[other[0]].shape, tuple(shapes[other[0]])
        problems.append(f"has {first_of(other)} of shape {list(theirs)} where this model has {list(ours)}")
    if not problems and (bad := [name for name in shapes if not is_finite(weights[name])]):
        rule = f"the weights are not finite: {first_of(bad)} has NaN or infinity"
        fix = use_another(path) if (path / MARKER).exists() else "use another checkpoint"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix)
    if problems:
        fix = "" if settings is None or other else fix_for(missing, unknown, settings)
        fix = fix or "use the model_config of the checkpoint (config.yaml beside it), or another checkpoint"
        rule = f"the checkpoint does not fit model.model_config: it {'; it '.join(problems)}"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix)


def is_finite(array: np.ndarray) -> bool:
    """Whether no number is NaN or infinite; makes no array of its size."""
    array = _without_repeats(array)
    with np.errstate(invalid="ignore"):
        return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def first_of(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def read_safetensors(
    file: Path, where: str, key: str = "load_checkpoint", *, numbers: bool = True
) -> dict[str, np.ndarray]:
    """The arrays of a file by name; `numbers` as in `read_weights`.

    Raises:
        UserError: The file cannot be read, or has tensors that are not floating-point.
    """
    try:
        header = _header(file)
        entries = safetensors.deserialize(read_saved(file)) if numbers else []
    except (OSError, safetensors.SafetensorError) as error:
        fix = "name a checkpoint folder or a complete .safetensors file"
        rule = f"not a readable safetensors file ({getattr(error, 'strerror', None) or error})"
        raise UserError(rule, where=where, key=key, value=str(file), fix=fix) from error
    other = [f"{name} is {dtype}" for name, (dtype, _) in header.items() if dtype not in ("BF16", *_DTYPES)]
    if other:
        rule = f"weights must be floating-point numbers of 16 to 64 bits; {first_of(other)}"
        raise UserError(rule, where=where, key=key, value=str(file), fix="use a checkpoint that is not quantized")
    if not numbers:
        return {name: _stand_in(shape) for name, (_, shape) in header.items()}
    arrays = {}
    for name, entry in entries:
        if entry["dtype"] == "BF16":  # numpy has no bfloat16, which is the upper half of a float32
            values = (np.frombuffer(entry["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).astype(np.float32)
        arrays[name] = values.reshape(entry["shape"])
    return arrays


def _header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor of a file; raises SafetensorError and OSError."""
    open_file(file).close()  # opening a pipe would wait
    with safetensors.safe_open(file, "numpy") as found:
        slices = ((name, found.get_slice(name)) for name in found.offset_keys())
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices}


def _stand_in(shape: Sequence[int]) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.float32), shape)


# Published files have DeepSeek's MTP modules after the last layer, whether a run trains them or not. Expert biases
# belong to the training, and the files of most families have none.


def unused_modules(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Tensors of MTP modules that the model does not have, and a notice about them; `names` are those of the file."""
    beyond = [name for name in names if _layer(name) >= settings.num_layers]
    layers = {_layer(name) for name in beyond}
    modules = _modules(beyond)
    unused = {layer for layer in modules if layer >= settings.num_layers + settings.mtp_depth}
    # If there are other layers among them, the file is of a deeper model.
    if not unused or layers != modules:
        return set(), ""
    depth = max(unused) - settings.num_layers + 1
    one, them = ("module", "it") if len(unused) == 1 else ("modules", "them")
    text = f"not loaded from the checkpoint: the multi-token prediction {one} ({layer_text(unused)})"
    return {name for name in beyond if _layer(name) in unused}, f"{text}; mtp_depth: {depth} would use {them}"


def module_layers(names: Iterable[str], settings: ModelConfig) -> set[int]:
    """The layers of multi-token prediction modules among names of tensors."""
    return {_layer(name) for name in names if _layer(name) >= settings.num_layers}


def missing_modules(names: Iterable[str], settings: ModelConfig, trains: bool) -> tuple[set[str], str]:
    """Parameters of MTP modules that the file lacks completely, and a notice about them."""
    there = {_layer(name) for name in names}
    depth = range(settings.num_layers, settings.num_layers + settings.mtp_depth)
    missing = [layer for layer in depth if layer not in there]
    prefixes = tuple(layer_prefix(layer) for layer in missing)
    text = f"the checkpoint has no multi-token prediction module: {layer_text(missing)}"
    starts = f"(mtp_depth {settings.mtp_depth}) {'starts' if len(missing) == 1 else 'start'} from the seed"
    starts = starts if trains else f"(mtp_depth {settings.mtp_depth}); only training uses it"
    return {name for name in parameter_shapes(settings) if name.startswith(prefixes)}, f"{text} {starts}"


def missing_biases(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """The expert biases of balance_via_topk_bias, where the file has none at all, and a notice about them."""
    moe = settings.experts
    if moe is None or not moe.balance_via_topk_bias or any(name.endswith(EXPERT_BIAS) for name in names):
        return set(), ""
    found = {name for name in parameter_shapes(settings) if name.endswith(EXPERT_BIAS)}
    return found, "balance_via_topk_bias: the checkpoint has no expert bias, which starts at 0"


def fix_for(missing: Collection[str], unknown: Collection[str], settings: ModelConfig) -> str:
    """The fix, where the file differs in MTP modules alone; else empty."""
    beyond = [name for name in (*missing, *unknown) if _layer(name) >= settings.num_layers]
    if len(beyond) < len(missing) + len(unknown) or not beyond or _modules(beyond) != set(map(_layer, beyond)):
        return ""
    if unknown:
        return f"write mtp_depth: {max(map(_layer, unknown)) - settings.num_layers + 1}, as in the checkpoint"
    depths = f"{min(map(_layer, missing)) - settings.num_layers} instead of {settings.mtp_depth}"
    return f"write mtp_depth: {depths}, as in the checkpoint, or name one with its modules"


def _modules(names: Iterable[str]) -> set[int]:
    return {_layer(name) for name in names if name.endswith(_OF_MODULES)}


def _layer(name: str) -> int:
    """The layer of a tensor; -1 for a tensor outside the layers."""
    number = name.removeprefix(_LAYERS).partition(".")[0]
    return int(number) if name.startswith(_LAYERS) and number.isdecimal() else -1
