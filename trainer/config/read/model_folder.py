"""Reads a model folder as Hugging Face publishes it (``pretrained_model_dir``), for keys that the YAML leaves out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.config.checks.problem import ConfigError, one_of, problem_at
from trainer.config.families import FAMILIES, known_class, known_families, named_family
from trainer.config.family.record import Family
from trainer.config.location import NO_LOCATION, SourceLocation
from trainer.config.note import Note
from trainer.config.other_models import NOT_BUILT, differences, is_known_effect
from trainer.config.read.defaults import apply_derived_defaults
from trainer.config.read.nodes import Entry, Scalar, Table, plain, tree
from trainer.config.read.relocate import move_to_canonical_sections
from trainer.config.read.resolve import Resolved, resolve
from trainer.config.read.yaml_reader import MAX_BYTES, parse_document
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import Activation, ModelConfig, RopeScaling
from trainer.config.schema.moe import MoEConfig
from trainer.errors import UserError, value_text
from trainer.input_files import missing_path_fix, path_error

KEY = "pretrained_model_dir"
_ARCH = "model.arch.type"
_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"
CAUSAL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
_SIZES = (
    *(f"{_MODEL}.{name}" for name in "num_layers hidden_size num_heads n_kv_heads head_dim intermediate_size vocab_size"
      " tie_word_embeddings q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()),
    *(f"{_EXPERTS}.{name}" for name in "expert_num moe_intermediate_size shared_expert_num first_k_dense_replace"
      " moe_shared_expert_intermediate_size decoder_sparse_step mlp_only_layers moe_layer_end_index".split()),
)  # fmt: skip
"""Keys on which the sizes of weights depend: if the YAML contradicts the folder, its weights do not fit."""
_NAMES = ("architectures", "model_type")
"""Keys that name the family of a model."""
_GENERATION = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_TOP_K = 50
"""The top_k of transformers where generation_config.json leaves it out."""
_VALUES = {
    "hidden_act": get_args(Activation),
    "rope_type": ("default", "linear", "llama3", "yarn", "longrope", "su"),
}
"""The supported values of these keys; su is an older name of longrope."""
_QWENS_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
"""The defaults of transformers if use_sliding_window is True."""
_EVERY_CLASS = frozenset(
    "architectures model_type head_dim rope_scaling rope_parameters quantization_config auto_map".split()
)
_HARMLESS = frozenset(
    "_name_or_path bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version use_cache id2label"
    " label2id pretraining_tp return_dict output_attentions output_hidden_states is_encoder_decoder problem_type"
    " chunk_size_feed_forward tokenizer_class attn_implementation _attn_implementation"
    " attention_type bos_token eos_token pad_token do_sample temperature top_k top_p repetition_penalty max_length"
    " qk_head_dim embd_pdrop eod_token_id".split()
)
"""Keys that do not change what a model computes, or that other code checks."""
_WINDOW_KEYS = (
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "_sliding_window_pattern",
)  # fmt: skip
_FIX = "name a folder with config.json, as Hugging Face publishes it or `export` writes it"


def add_model_folder(resolved: Resolved, key: str = KEY) -> None:
    """Adds the keys of the folder that neither the YAML nor a flag sets; checks that the family is known.

    Args:
        key: The key that messages about the folder name.

    Raises:
        UserError: The folder or its files cannot be read, or the family is not known.
    """
    name = resolved.data.get(KEY)
    place = resolved.positions.get(KEY)
    if not isinstance(name, str) or not name or place is None:
        places = {key: resolved.positions.get(f"{_MODEL}.{key}", NO_LOCATION) for key in _NAMES}
        try:
            _family(resolved, resolved.section(_MODEL), places)
        except UserError as error:  # reported together with the other problems
            resolved.problems.append(ConfigError(max(places.values(), key=lambda place: place.order), error))
        return
    if rule := path_error(name):
        resolved.problems.append(problem_at(place, key, rule, _FIX, name))
        del resolved.data[KEY]
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        rule = "there is no such folder"
        if folder.exists():
            rule = "is a file, not a folder"
        fix = missing_path_fix(folder, _FIX)
        resolved.problems.append(problem_at(place, key, rule, fix, name)._replace(is_absent=not folder.exists()))
        return
    facts = _model(_read_json(folder / "config.json", place, name, key), f"{folder}/config.json", resolved)
    _report_contradictions(resolved, facts)
    if (folder / "generation_config.json").exists():
        _add(facts, _generation(_read_json(folder / "generation_config.json", place, name, key)))
    if resolved.value(f"{_EXPERTS}.aux_loss_factor") is not None:  # the same setting on another scale
        facts.section(_EXPERTS).pop("router_aux_loss_coef", None)
    _add(resolved, facts)
    resolved.problems += facts.problems
    resolved.notes += facts.notes
    _use_folder(resolved, name, key)


def saved_dtype(folder: Path, place: SourceLocation, key: str) -> str:
    """Returns the dtype of the weights that config.json names; empty if it names none. For the rest see `_read_json`.
    """
    values = plain(_read_json(folder / "config.json", place, str(folder), key))
    return str(values.get("dtype") or values.get("torch_dtype") or "")


def _newest_checkpoint(folder: Path, file: str) -> Path | None:
    """Returns the checkpoint of the highest step that has a file, in a folder of checkpoints or of a run; or None."""
    files = [*folder.glob(f"step-*/{file}"), *folder.glob(f"checkpoints/step-*/{file}")]
    return max((path.parent for path in files), default=None)


def _read_json(file: Path, place: SourceLocation, name: str, folder_key: str = KEY) -> Table:
    """Reads a JSON file of the folder `name` as a tree with line numbers; `place` is where `folder_key` names it.

    Raises:
        UserError: The file cannot be read, or is not a JSON object.
    """
    from trainer.storage.marker import read_saved  # loads numpy: its threads would start before signals are blocked

    try:
        text = read_saved(file, MAX_BYTES).decode("utf-8-sig")
        parsed = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        rule = f"{file.name} cannot be read ({error})"
        fix = _FIX
        if isinstance(error, FileNotFoundError):
            rule = f"the folder has no {file.name}"
            if newest := _newest_checkpoint(file.parent, file.name):
                fix = f"name its newest checkpoint, {newest}"
        raise UserError(rule, where=place.text, key=folder_key, value=name, fix=fix) from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        rule = f"is not valid JSON: {getattr(error, 'msg', error)}"
        raise UserError(rule, where=f"{file}:{line}", key=file.name, fix="correct the file, or copy it again") from None
    except RecursionError:
        raise UserError("is nested too deep", where=f"{file}:1", key=file.name, fix="copy the file again") from None
    if not isinstance(parsed, dict):
        raise UserError("must be a JSON object", where=f"{file}:1", key=file.name, fix="copy the file again")
    # JSON is YAML except for tabs, which occur between values only: in a string they are written as \\t.
    if parsed:
        return parse_document(str(file), text.replace("\t", " "))[0]
    return Table()


def _family(resolved: Resolved, settings: Mapping[str, Any], places: Mapping[str, SourceLocation]) -> tuple[str, str]:
    """Returns the class as which a model is built, and the known class that its settings name, or "".

    Args:
        resolved: The values of the YAML and the flags; their ``model.arch.type`` wins.
        settings: The keys of the file that describes the model.
        places: The locations of the keys that name the family.

    Raises:
        UserError: The settings name an unknown class, and ``model.arch.type`` is not set.
    """
    classes = settings.get("architectures")
    model_type = settings.get("model_type")
    written = resolved.value(_ARCH)
    by_class, by_type = (named_family({key: settings.get(key)})[0] for key in ("architectures", "model_type"))
    unknown = ""
    if classes and not by_class:
        unknown = "architectures"
    elif model_type and not by_type:
        unknown = "model_type"
    named = ""
    if not unknown:
        named = by_class or by_type
    is_ambiguous = by_class and by_type and by_class != by_type
    if written is not None or (not unknown and not is_ambiguous):
        return known_class(written) or named, named
    if by_type:  # another class of a known family
        place = places["architectures"]
        rule = f"is not the known class of model_type {model_type}, which is {by_type}"
        candidates = by_type
        if by_class:
            candidates = f"{by_type} or {by_class}"
        fix = f"write {_ARCH}: {candidates}, whichever it is"
        raise UserError(rule, where=place.text, key=place.key, value=classes, fix=fix)
    features = list(differences(settings))
    rule = "this family is not known here"
    fix = f"use a model of a known family: {known_families()}"
    if features:
        rule += f": unlike a Llama, this model needs what is not built here: {'; '.join(features)}"
    else:
        rule += ", and its keys do not say how it differs"
        fix += f"; if this model computes the same as a Llama, write {_ARCH}: LlamaForCausalLM"
    place = places[unknown]
    raise UserError(rule, where=place.text, key=place.key, value=settings[unknown], fix=fix)


def _resolve_json(entries: dict[str, Entry]) -> Resolved:
    """Resolves keys of a config.json: their values have the schema's names and sections."""
    root = Table({"model_config": Entry(Table(entries))})
    move_to_canonical_sections(root)
    return resolve(root)


def _model(table: Table, file: str, resolved: Resolved) -> Resolved:
    """Returns the values of config.json, which must name a known family, and its class's defaults for other keys."""
    entries = table.entries()
    values = plain(table)
    problems = _score_head(entries, values)
    by_name = named_family(values)[0]
    if by_name:
        for key, meaning in FAMILIES[by_name].renamed_keys.items():
            if key in entries:
                entries[meaning] = entries.pop(key)
                values[meaning] = values.pop(key)
    family, named = _family(resolved, values, {key: entries[key].place for key in _NAMES if key in entries})
    if not family:
        rule = f"names no family: it has neither architectures nor model_type; known are {known_families()}"
        raise UserError(rule, where=file, key=KEY, fix=f"write {_ARCH} in the YAML")
    used: dict[str, Entry] = {}
    values = {"use_sliding_window": FAMILIES[family].defaults.get("use_sliding_window"), **values}
    unread: list[str] = []
    for key, entry in entries.items():
        action = classify_key(key, values[key], family, named)
        # Qwen's files describe a sliding window that is off, too.
        is_of_window = key in ("sliding_window", "max_window_layers", "layer_types")
        if action == "read":
            unsupported = _unsupported(key, entry, FAMILIES[family])
            problems += unsupported
            if not unsupported and not (is_of_window and values["use_sliding_window"] is False):
                used[key] = entry
        elif action == "unread":
            unread.append(key)
        elif action == "unknown":
            rule = "the effect of this key on a model of an unknown family is not known"
            problems.append(problem_at(entry.place, key, rule, "use a model of a known family", values[key]))
    facts = _resolve_json(used)
    place = SourceLocation(0, f"{file} (without the key: {family}'s default)")
    class_defaults = dict(FAMILIES[family].defaults)
    if values["use_sliding_window"]:
        class_defaults |= _QWENS_WINDOW
    defaults = {
        key: Entry(tree(value), place)
        for key, value in class_defaults.items()
        if key not in ("q_lora_rank", "sliding_window") or key not in entries  # null is a value of these two
    }
    _add(facts, _resolve_json(defaults))
    _derive_heads(facts)
    facts.problems += problems
    if unread:
        text = f"{file}: not used, as in transformers: {', '.join(unread)}"
        facts.notes.append(Note(text, "ignored"))
    return facts


def _score_head(entries: dict[str, Entry], values: dict[str, Any]) -> list[ConfigError]:
    """Replaces the class of a reward model by that of a language model, with num_labels; returns problems."""
    classes = values.get("architectures")
    labels = values.pop("num_labels", None)
    about_labels = entries.pop("num_labels", None)
    if not isinstance(classes, list) or len(classes) != 1 or not str(classes[0]).endswith(CLASSIFIER):
        return []
    place = entries["architectures"].place
    values["architectures"] = [classes[0].removesuffix(CLASSIFIER) + CAUSAL]
    entries["architectures"] = Entry(tree(values["architectures"]), place)
    names = values.get("id2label")
    if isinstance(names, dict):
        labels = len(names)
    if labels != 1:
        rule = f"not yet supported: a classifier of sequences with {labels or 2} labels; a reward model has 1"
        return [problem_at(place, "architectures", rule, NOT_BUILT, classes[0])]
    values["num_labels"] = 1
    entries["num_labels"] = Entry(Scalar(1), (about_labels or entries["architectures"]).place)
    return []


def classify_key(key: str, value: Any, family: str, named: str) -> Literal["read", "harmless", "unread", "unknown"]:
    """Decides what to do with a key of a config.json.

    Args:
        key: The key.
        value: Its value.
        family: The class as which the model is built.
        named: The known class that the file names, or "".

    Returns:
        "read"; "harmless" if it changes nothing; "unread" if the class in transformers does not read it, either;
        "unknown" if the class, and so the effect of the key, is not known.
    """
    known = FAMILIES[family]
    if key == "auto_map" and named:  # names the published code of a known class
        return "harmless"
    if key == "quantization_config" and known.interleaves_experts and isinstance(value, dict):
        if value.get("quant_method") == "mxfp4":
            return "harmless"  # the weights are read as numbers
    is_expert_count = key in ("num_local_experts", "num_experts") and known.is_mixture
    if key in _WINDOW_KEYS:
        if known.windows or not named:
            return "read"
        if value:
            return "unread"
        return "harmless"
    if is_known_effect(key) or key == "num_labels" or key in _EVERY_CLASS or key in known.defaults or is_expert_count:
        return "read"
    if not known.in_transformers and (key in yaml_names(ModelConfig) or key in yaml_names(MoEConfig)):
        return "read"
    if key in _HARMLESS:
        return "harmless"
    if named:
        return "unread"
    if key in yaml_names(ModelConfig) or key in yaml_names(MoEConfig):
        return "read"
    if value in (None, False, "", [], {}):
        return "harmless"
    return "unknown"


def _unsupported(key: str, entry: Entry, family: Family) -> list[ConfigError]:
    """Returns problems for unsupported values of config.json. Their fix is another model, not another value."""
    if key == "hidden_act":
        return _unsupported_value(_VALUES[key], key, entry)
    problems: list[ConfigError] = []
    if key in ("rope_scaling", "rope_parameters") and isinstance(entry.node, Table):
        entries = entry.node.entries()
        types = _VALUES["rope_type"]
        if family.accepts_scaling("dynamic") and "alpha" in entries and plain(entries["alpha"].node) is not None:
            types += ("dynamic",)
        for name in ("type", "rope_type"):
            if name in entries:
                problems += _unsupported_value(types, f"{key}.{name}", entries[name])
        known = {*yaml_names(RopeScaling), "rope_theta", "partial_rotary_factor"}
        for name, nested in entries.items():
            value = plain(nested.node)
            if name in ("full_attention", "sliding_attention"):  # each kind of layers has its own
                problems += _unsupported(key, nested, family)
                continue
            if name not in known and value is not None:
                rule = "not yet supported"
                problems.append(problem_at(nested.place, f"{key}.{name}", rule, NOT_BUILT, value))
    return problems


def _unsupported_value(supported: tuple[str, ...], key: str, entry: Entry) -> list[ConfigError]:
    value = plain(entry.node)
    if value in (None, *supported):
        return []
    rule = f"not yet supported, only {one_of(supported)}"
    return [problem_at(entry.place, key, rule, NOT_BUILT, value)]


def _derive_heads(facts: Resolved) -> None:
    """Sets the number of key-value heads and the head size as transformers derives them, if config.json lacks them."""
    settings = facts.section(_MODEL)
    if "kv_lora_rank" in settings:  # multi-head latent attention has other sizes
        settings.pop("head_dim", None)
        return
    width = settings.get("hidden_size")
    heads = settings.get("num_heads")
    place = f"{_MODEL}.num_heads"
    if isinstance(heads, int) and heads > 0 and isinstance(width, int):
        for name, value in (("n_kv_heads", heads), ("head_dim", width // heads)):
            if settings.get(name) is None:
                settings[name] = value
                facts.positions[f"{_MODEL}.{name}"] = facts.positions[place]


def _generation(table: Table) -> Resolved:
    """Returns the sampling keys of generation_config.json."""
    entries = {key: entry for key, entry in table.entries().items() if key in _GENERATION}
    # A temperature of 0 means do_sample False.
    entries = {key: entry for key, entry in entries.items() if plain(entry.node) not in (None, 0) or key == "do_sample"}
    if "do_sample" in entries and plain(entries["do_sample"].node) is True and "top_k" not in table.entries():
        entries["top_k"] = Entry(Scalar(_TOP_K), entries["do_sample"].place)
    return _resolve_json({key: entry for key, entry in entries.items() if plain(entry.node) is not None})


def _add(resolved: Resolved, more: Resolved) -> None:
    """Adds the values of `more` that `resolved` lacks, or has as null, with their locations."""

    def add(target: dict[str, Any], source: dict[str, Any], path: str) -> None:
        """Adds the keys of `source` that `target` does not have, also in nested sections."""
        for name, value in source.items():
            key = f"{path}{name}"
            if isinstance(value, dict) and isinstance(target.get(name), dict):
                if name != "rope_scaling" or "rope_type" not in target[name]:  # another type has other keys
                    add(target[name], value, f"{key}.")
            elif target.get(name) is None and value is not None:
                target[name] = value
                below = {path: place for path, place in more.positions.items() if f"{path}.".startswith(f"{key}.")}
                resolved.positions.update(below)

    add(resolved.data, more.data, "")
    resolved.positions |= {key: place for key, place in more.positions.items() if key not in resolved.positions}


def _report_contradictions(resolved: Resolved, facts: Resolved) -> None:
    """Adds a problem for each size that differs in the YAML, or a note if the weights of the folder are not read."""
    differing = []
    for key in _SIZES:
        value = resolved.value(key)
        folder_value = facts.value(key)
        if value is None or folder_value is None or value == folder_value:
            continue
        name = resolved.positions[key].key or key
        if resolved.data.get("run_mode", "train") == "train" and not resolved.data.get("load_checkpoint"):
            differing.append(f"{name.rpartition('.')[2]} {value_text(value)} instead of {value_text(folder_value)}")
        else:
            rule = f"{facts.positions[key].text} has {value_text(folder_value)}: its weights do not fit this size"
            fix = "leave it out, or name another folder"
            resolved.problems.append(problem_at(resolved.positions[key], name, rule, fix, value))
    if differing:
        text = f"this training starts from new weights, of other sizes than those in {KEY}: {', '.join(differing)}"
        resolved.notes.append(Note(text))


def _use_folder(resolved: Resolved, name: str, key: str) -> None:
    """Uses the folder as the tokenizer, and as load_checkpoint unless the run trains from random weights."""
    place = resolved.positions[KEY]
    place = SourceLocation(place.order, f"{place.text} ({key})")
    data = resolved.data
    resumes = bool(data.get("resume_training")) and resolved.value(f"{_MODEL}.pet_config") is None
    if data.get("run_mode", "train") != "train":
        if resumes and data.get("load_checkpoint") == name:  # a resolved config.yaml names the initial weights
            data["load_checkpoint"] = ""
        elif not resumes and not data.get("load_checkpoint"):
            data["load_checkpoint"] = name
            resolved.positions["load_checkpoint"] = place
    tokenizer = data.setdefault("train_dataset", {}).setdefault("tokenizer", {})
    if not tokenizer.get("path") and tokenizer.get("type") != "bytes":
        for key, value in (("type", "huggingface"), ("path", name)):
            tokenizer[key] = value
            resolved.positions[f"train_dataset.tokenizer.{key}"] = place


def model_from_config_json(config_json: Mapping[str, Any]) -> ModelConfig:
    """Returns the model that a config.json of a known class describes, without validating its values."""
    table = tree(config_json)
    assert isinstance(table, Table), "a config.json is a mapping"
    facts = _model(table, "config.json", Resolved())
    apply_derived_defaults(facts, is_complete=True)  # with all defaults, which are those of transformers
    settings = facts.data["model"]["model_config"]
    if "moe_config" in settings:
        experts = {name: value for name, value in settings["moe_config"].items() if value is not None}
        settings["moe_config"] = MoEConfig.model_construct(**experts)
    if "rope_scaling" in settings:
        settings["rope_scaling"] = RopeScaling.model_construct(**settings["rope_scaling"])
    return ModelConfig.model_construct(**settings)
