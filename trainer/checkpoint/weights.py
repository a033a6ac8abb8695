"""Reads weights by name, as float32 arrays or parts of them, from our checkpoints and Hugging Face's safetensors. No
MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from trainer.checkpoint.mindformers.folders import find_source, open_source
from trainer.checkpoint.mindformers.names import SourceTensor, convert_weights, has_mindformers_names, is_run_state
from trainer.checkpoint.store import (
    ENDING,
    INDEX,
    STATE,
    errors_at,
    fallback_fix,
    find_checkpoint,
    first_of,
    read_checkpoint,
    read_safetensors,
    resolve_best_link,
)
from trainer.checkpoint.tensor_names import disk_shapes, find_expert_names, from_disk, split_fused_tensors
from trainer.config.layer_ranges import layer_text
from trainer.config.schema.model import ModelConfig
from trainer.config.teacher import teacher_run
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.models.spec.init import initial_value
from trainer.models.spec.model import ParameterSpec
from trainer.models.spec.names import EMBEDDING, EXPERT_BIAS, HEAD, LAYERS, SCORE, layer_prefix
from trainer.models.spec.shapes import parameter_shapes, parameter_specs
from trainer.parallel.sharding import ShardSpec
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.storage.base_dtypes import BaseDtype
from trainer.storage.json_files import JsonError, LenientModel, parse_json
from trainer.storage.marker import MARKER
from trainer.storage.quantized import quantize
from trainer.storage.tensor_file import ArrayOrLazyArray, LazyArray, read_row_blocks, read_shard

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.root import Network

ShardSpecs: TypeAlias = Mapping[str, ShardSpec]
"""The shard of each parameter that a rank has; other parameters are left out."""
# A folder with one of them is a checkpoint of this trainer, complete or not.
_OUR_FILES = (MARKER, "state.json", "optimizer.safetensors")
_OF_MODULES = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Ends of the names that only multi-token prediction (MTP) modules have."""
# Tables that older Hugging Face files contain; here they are computed from the configuration.
_BUFFERS = (".rotary_emb.inv_freq",)
_MISTRALS = "consolidated"
"""How the names of files of Mistral's own program begin."""
_KEY = "load_checkpoint"
_TEACHER = "loss.teacher"
_OTHER_MODULES = "model.mtp_"
"""How names in MTP modules of ERNIE 4.5 begin, which are not those of DeepSeek-V3."""


class _Index(LenientModel):
    weight_map: dict[str, str]


def open_initial_weights(
    config: Config, note: Callable[[str], None] | None = None, *, new_modules: bool = True,
    world: World = SINGLE_PROCESS,
) -> CheckedWeights | None:  # fmt: skip
    """Opens the weights of `load_checkpoint` and checks them against the model, before their numbers are read.

    The arguments are those of `trainer.checkpoint.adapters.load_initial_weights`. Returns None if the key is not set.

    Raises:
        UserError: The file cannot be read, or belongs to another model.
    """
    if not config.load_checkpoint:
        return None
    where = config.source.where(_KEY)
    with errors_at(where, _KEY):
        checked, absent, biases = _fitting_model(config, note, new_modules=new_modules, world=world)
    names = biases
    if new_modules:
        names = absent
    new = [parameter for name, parameter in parameter_specs(config.network).items() if name in names]
    arrays = {**checked.arrays, **from_seed(new, config.decoder, config.seed)}
    return checked._replace(arrays=arrays, where=where, key=_KEY)


def from_seed(parameters: Iterable[ParameterSpec], settings: ModelConfig, seed: int) -> dict[str, LazyArray]:
    """Returns the initial values of parameters by their names, drawn when they are read."""
    return {each.name: LazyArray(each.shape, partial(initial_value, each, settings, seed), reads_from_start=True)
            for each in parameters}  # fmt: skip


def check_files(config: Config) -> None:
    """Raises the UserError of `open_initial_weights` without reading numbers: files, names, dtypes and shapes alone."""
    if config.load_checkpoint:
        with errors_at(config.source.where(_KEY), _KEY):
            _fitting_model(config, numbers=False)


def check_teacher_files(config: Config) -> None:
    """Raises the UserError of `open_teacher_weights` without reading numbers: files, names, dtypes and shapes alone."""
    teacher = teacher_run(config)
    if teacher is not None:
        with errors_at(config.source.where(_TEACHER), _TEACHER, replaces=True):
            check_files(teacher)


def open_teacher_weights(config: Config, world: World = SINGLE_PROCESS) -> CheckedWeights:
    """Opens the weights of a distillation's teacher, which each rank of `world` reads.

    Raises:
        UserError: The files cannot be read, or belong to another model than the config.json beside them.
    """
    teacher = teacher_run(config)
    assert teacher is not None, "only a distillation has a teacher"
    where = config.source.where(_TEACHER)
    with errors_at(where, _TEACHER, replaces=True):
        checked = open_initial_weights(teacher, world=world)
    assert checked is not None, "a teacher has a folder"
    return checked._replace(where=where, key=_TEACHER)


class CheckedWeights(NamedTuple):
    """Weights that fit a model and whose numbers have not been read.

    Attributes:
        arrays: The parameters by name.
        tensors: The tensors of the file by name.
        path: The file or folder, for messages.
        where, key: The setting that names it, if the caller of `read` does not add them to errors.
    """

    arrays: dict[str, ArrayOrLazyArray]
    tensors: Mapping[str, ArrayOrLazyArray]
    path: Path
    where: str = ""
    key: str = ""

    def read(
        self, parts: ShardSpecs | None = None, dtypes: Mapping[str, BaseDtype] = MappingProxyType({})
    ) -> dict[str, np.ndarray]:
        """Reads the float32 numbers of these shards, or of all parameters.

        Args:
            dtypes: By name, the parameters that are returned in few bytes, as a `QuantizedArray`: only one of them is
                in memory in float32 at a time.

        Raises:
            UserError: They are not finite, or cannot be read.
        """
        return dict(self.read_in_turn(parts, dtypes))

    def read_in_turn(
        self, parts: ShardSpecs | None = None, dtypes: Mapping[str, BaseDtype] = MappingProxyType({})
    ) -> Iterator[tuple[str, Any]]:
        """Yields what `read` returns, each parameter when it is needed; raises its errors."""
        for name, array in self.arrays.items():
            if parts is None or name in parts:
                with errors_at(self.where, self.key):
                    shard = read_shard(array, None if parts is None else parts[name])
                    numbers: Any = np.ascontiguousarray(shard, np.float32)
                    if not is_finite(numbers):
                        raise self._not_finite()
                if name in dtypes:
                    numbers = quantize(numbers, dtypes[name])
                yield name, numbers

    def _not_finite(self) -> UserError:
        """Makes the error, which names the first bad tensor of the file, whichever shards are read."""
        bad = [name for name, array in self.tensors.items() if not all(map(is_finite, read_row_blocks(array)))]
        rule = f"the weights are not finite: {first_of(bad)} has NaN or infinity"
        fix = "use another checkpoint"
        if (self.path / MARKER).exists():
            fix = fallback_fix(self.path)
        return UserError(rule, value=str(self.path), fix=fix)


def _fitting_model(
    config: Config, note: Callable[[str], None] | None = None, *, new_modules: bool = True, numbers: bool = True,
    world: World = SINGLE_PROCESS,
) -> tuple[CheckedWeights, set[str], set[str]]:  # fmt: skip
    """Opens the weights of `load_checkpoint` and checks them against the model; for `numbers` see `read_weights`.

    Returns them, the names of the parameters that the file lacks, and the expert biases among these.
    """
    path = Path(config.load_checkpoint).expanduser()
    settings = config.decoder
    stored, about_source = _open_weights(config, path, numbers, world)
    weights = split_fused_tensors(stored, settings)
    unused, *notes = unused_modules(weights, settings)
    modules, about_modules = missing_modules(weights, settings, new_modules and config.trains)
    if config.trains and config.has_adapters:  # frozen ones from the seed would predict nothing
        modules = set()
    biases, about_biases = missing_biases(weights, settings)
    absent = biases | modules
    about_score = ""
    if settings.num_labels and config.trains and new_modules and SCORE not in weights:
        absent = absent | {SCORE}
        about_score = "the checkpoint has no score head: that of the reward model starts from the seed"
    for text in (about_source, *notes, about_biases if biases else "", about_modules if modules else "", about_score):
        if text and note is not None:
            note(text)
    used = {name: array for name, array in weights.items() if name not in unused}
    shapes = {name: shape for name, shape in parameter_shapes(config.network).items() if name not in absent}
    return _fitting(used, shapes, config.network, path, compare=numbers), absent, biases


def _open_weights(
    config: Config, path: Path, numbers: bool, world: World
) -> tuple[Mapping[str, ArrayOrLazyArray], str]:
    """Opens the weights in `path` by Hugging Face name; returns them with a note if they are another program's."""
    source = find_source(path)
    if source is not None:
        tensors, fix = open_source(source, config.src_strategy_path_or_dir, numbers=numbers, world=world)
        note = f"load_checkpoint: the weights of MindSpore Transformers' checkpoint ({source.name}); a run takes its"
        weights: Mapping[str, ArrayOrLazyArray] = {name: tensor.array for name, tensor in tensors.items()}
        if has_mindformers_names(tensors):  # `split_fused_tensors` knows those of other families
            weights = convert_weights(tensors, config.decoder, path, fix)
        return weights, f"{note} weights only, no optimizer state"
    weights = read_weights(path, numbers=numbers, world=world)
    if has_mindformers_names(weights):
        tensors = {name: SourceTensor(array, path.name) for name, array in weights.items() if not is_run_state(name)}
        return convert_weights(tensors, config.decoder, path), ""
    return weights, ""


def fitting_weights(
    weights: Mapping[str, ArrayOrLazyArray], settings: Network, path: Path, parts: ShardSpecs | None = None
) -> dict[str, np.ndarray]:
    """Checks weights from `read_weights` and returns them by parameter name, with the experts of a layer stacked.

    `path` is for messages; `parts` as in `CheckedWeights.read`.

    Raises:
        UserError: They belong to another model.
    """
    shapes = parameter_shapes(settings)
    if isinstance(settings, ModelConfig):
        weights = split_fused_tensors(weights, settings)
    return _fitting(weights, shapes, settings, path).read(parts)


def _fitting(
    weights: Mapping[str, ArrayOrLazyArray], shapes: Mapping[str, tuple[int, ...]], settings: Network, path: Path, *,
    compare: bool = True,
) -> CheckedWeights:  # fmt: skip
    """Checks that a file has the parameters with these shapes in memory; raises a UserError otherwise.

    `compare` says whether copies of shared weights need equal numbers; else names and shapes suffice.
    """
    decoder = None
    if isinstance(settings, ModelConfig):
        decoder = settings
        weights = {name: array for name, array in weights.items() if not _is_copy(name, weights, settings, compare)}
    on_disk = disk_shapes(shapes, find_expert_names(weights))
    check_weights(weights, on_disk, path, decoder)
    return CheckedWeights(from_disk(weights, shapes), {name: weights[name] for name in on_disk}, path)


def _is_copy(name: str, weights: Mapping[str, ArrayOrLazyArray], settings: ModelConfig, compare: bool) -> bool:
    """Returns whether a tensor copies a weight shared by layers, or embedding or head in a published MTP module."""
    if (shared := _owner(name, settings)) != name and shared in weights:
        return _is_equal(weights[name], weights[shared], compare)
    for ending, main in ((".embed_tokens.weight", EMBEDDING), (".shared_head.head.weight", HEAD)):
        if name.endswith(ending) and name != main and settings.mtp_depth:
            if settings.tie_word_embeddings:
                main = EMBEDDING
            return main in weights and _is_equal(weights[name], weights[main], compare)
    return False


def _is_equal(one: ArrayOrLazyArray, other: ArrayOrLazyArray, compare: bool) -> bool:
    if one.shape != other.shape:
        return False
    return not compare or all(map(np.array_equal, read_row_blocks(one), read_row_blocks(other)))


def _owner(name: str, settings: ModelConfig) -> str:
    """Returns the name under which the model has a parameter that layers of a group share (layers_group)."""
    layer = _layer(name)
    name_in_layer = name.removeprefix(layer_prefix(layer))
    if not (0 <= layer < settings.num_layers and name_in_layer.startswith("self_attn.")):
        return name
    return layer_prefix(layer - layer % settings.layers_group) + name_in_layer


def read_weights(path: Path, *, numbers: bool = True, world: World = SINGLE_PROCESS) -> dict[str, LazyArray]:
    """Opens weights by Hugging Face name; shards of them are read when they are used.

    Args:
        path: A `.safetensors` file, a folder of them as Hugging Face publishes it, a checkpoint folder of this trainer,
            or a folder of checkpoints (the newest complete one).
        numbers: False: the numbers will not be read, so no checksum is compared.
        world: The ranks that all read them, see `read_checkpoint`.

    Raises:
        UserError: There are no readable weights.
    """
    path = resolve_best_link(path)
    files = _weight_files(path)
    if files and not any((path / name).exists() for name in _OUR_FILES):
        weights: dict[str, LazyArray] = {}
        file_of: dict[str, Path] = {}
        for file in files:
            stored = read_safetensors(file, numbers=numbers, world=world)
            if twice := sorted(stored.keys() & weights.keys()):
                rule = f"{file_of[twice[0]].name} and {file.name} both contain {first_of(twice)}"
                fix = "remove the file that does not belong there, or name one file"
                raise UserError(rule, value=str(path), fix=fix)
            weights |= stored
            file_of |= dict.fromkeys(stored, file)
        return weights
    if (path / "config.json").is_file() and not (path / STATE).exists():
        rule = "the folder of Hugging Face has no weights: no *.safetensors"
        raise UserError(rule, value=str(path), fix="copy the files of the weights into it, or name another folder")
    checkpoint = find_checkpoint(path)
    if (checkpoint / "adapter_model.safetensors").exists():
        rule = "the checkpoint contains adapters, not the weights of a model"
        fix = "give it as --adapter_id and their base as --load_checkpoint, or merge them: export --adapter FOLDER"
        raise UserError(rule, value=str(checkpoint), fix=fix)
    return read_checkpoint(checkpoint, ("model",), checksums=numbers, world=world).tensors["model"].arrays()


def _weight_files(path: Path) -> list[Path]:
    """Returns the files of weights that a path names: of a folder those that its index names, as in transformers.

    Published folders may have the weights twice, the second time under the names of Mistral's own program.
    """
    if path.is_file():
        return [path]
    if not (path / INDEX).exists() or (path / "model.safetensors").exists():
        files = sorted(path.glob(f"*{ENDING}"))
        return [file for file in files if not file.name.startswith(_MISTRALS)] or files
    try:
        index: _Index = parse_json(read_bytes(path / INDEX), _Index, INDEX)
    except (OSError, JsonError) as error:
        rule = f"{INDEX} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UserError(rule, value=str(path), fix="copy the complete folder") from None
    return [path / name for name in sorted(set(index.weight_map.values()))]


def check_weights(
    weights: Mapping[str, ArrayOrLazyArray], shapes: Mapping[str, tuple[int, ...]], path: Path,
    settings: ModelConfig | None = None, fix: str = "",
) -> None:  # fmt: skip
    """Checks that every parameter is there with its shape; the file may also contain a tied head.

    `path` and `fix` are for messages; `settings` is the model section, None for adapters.

    Raises:
        UserError: Names the first parameter that is missing, unknown or of another shape, and counts the others.
    """
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes and name != HEAD and not name.endswith(_BUFFERS)]
    other = [name for name in shapes if name in weights and weights[name].shape != tuple(shapes[name])]
    problems = []
    if missing:
        problems.append(f"lacks {first_of(missing)}")
    if unknown:
        problems.append(f"holds {first_of(unknown)}, which this model does not have")
    if other:
        theirs = weights[other[0]].shape
        ours = tuple(shapes[other[0]])
        problems.append(f"has {first_of(other)} of shape {list(theirs)} where this model has {list(ours)}")
    if problems:
        if settings is not None and not other:
            fix = fix_for(missing, unknown, settings)
        fix = fix or "use the model_config of the checkpoint (config.yaml beside it), or another checkpoint"
        rule = f"the checkpoint does not fit model.model_config: it {'; it '.join(problems)}"
        raise UserError(rule, value=str(path), fix=fix)


def is_finite(array: np.ndarray) -> bool:
    """Returns whether all numbers are finite, without a temporary array of this size."""
    with np.errstate(invalid="ignore"):
        return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


# Published files have DeepSeek's MTP modules after the last layer, whether a run trains them or not. Expert biases
# belong to the training, and the files of most families have none.


def unused_modules(names: Collection[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Returns the tensors of MTP modules in the file that the model does not have, and a note about them."""
    if others := {name for name in names if name.startswith(_OTHER_MODULES)}:
        return others, "not loaded from the checkpoint, as in transformers: the multi-token prediction modules of ERNIE"
    beyond = [name for name in names if _layer(name) >= settings.num_layers]
    layers = {_layer(name) for name in beyond}
    modules = _modules(beyond)
    unused = {layer for layer in modules if layer not in settings.layers}
    # If there are other layers among them, the file is of a deeper model.
    if not unused or layers != modules:
        return set(), ""
    depth = max(unused) - settings.num_layers + 1
    one = "modules"
    them = "them"
    if len(unused) == 1:
        one = "module"
        them = "it"
    text = f"not loaded from the checkpoint: the multi-token prediction {one} ({layer_text(unused)})"
    return {name for name in beyond if _layer(name) in unused}, f"{text}; mtp_depth: {depth} would use {them}"


def module_layers(names: Iterable[str], settings: ModelConfig) -> set[int]:
    """Returns the layers of MTP modules among names of tensors."""
    return {_layer(name) for name in names if _layer(name) >= settings.num_layers}


def missing_modules(names: Iterable[str], settings: ModelConfig, trains: bool) -> tuple[set[str], str]:
    """Returns the parameters of MTP modules that the file lacks completely, and a note about them."""
    present = {_layer(name) for name in names}
    missing = [layer for layer in settings.layers[settings.num_layers :] if layer not in present]
    prefixes = tuple(layer_prefix(layer) for layer in missing)
    text = f"the checkpoint has no multi-token prediction module: {layer_text(missing)}"
    starts = f"(mtp_depth {settings.mtp_depth}) {'starts' if len(missing) == 1 else 'start'} from the seed"
    if not trains:
        starts = f"(mtp_depth {settings.mtp_depth}); only training uses it"
    return {name for name in parameter_shapes(settings) if name.startswith(prefixes)}, f"{text} {starts}"


def missing_biases(names: Iterable[str], settings: ModelConfig) -> tuple[set[str], str]:
    """Returns the expert biases of balance_via_topk_bias if the file has none at all, and a note about them."""
    moe = settings.experts
    if moe is None or not moe.balance_via_topk_bias or any(name.endswith(EXPERT_BIAS) for name in names):
        return set(), ""
    biases = {name for name in parameter_shapes(settings) if name.endswith(EXPERT_BIAS)}
    return biases, "balance_via_topk_bias: the checkpoint has no expert bias, which starts at 0"


def fix_for(missing: Collection[str], unknown: Collection[str], settings: ModelConfig) -> str:
    """Returns the fix if the file differs only in MTP modules; else empty."""
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
    """Returns the layer of a tensor; -1 for a tensor outside the layers."""
    number = name.removeprefix(LAYERS).partition(".")[0]
    if name.startswith(LAYERS) and number.isdecimal():
        return int(number)
    return -1
