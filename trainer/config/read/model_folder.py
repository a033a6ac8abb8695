"""A model folder as Hugging Face publishes it (``pretrained_model_dir``): its files say what the YAML leaves out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.checks.problem import ConfigError, one_of, problem_at
from trainer.config.families import FAMILIES, known_class, known_families, named_family
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.other_models import NOT_BUILT, differences, is_known_effect
from trainer.config.read.defaults import apply_derived_defaults
from trainer.config.read.nodes import Entry, Scalar, Table, plain, tree
from trainer.config.read.relocate import move_to_canonical_sections
from trainer.config.read.resolve import Resolved, resolve
from trainer.config.read.yaml_reader import MAX_BYTES, parse_document
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import ModelConfig, RopeScaling
from trainer.config.schema.moe import MoEConfig
from trainer.errors import UserError
from trainer.input_files import path_error

KEY = "pretrained_model_dir"
_ARCH = "model.arch.type"
_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"
_SIZES = (
    *(f"{_MODEL}.{name}" for name in "num_layers hidden_size num_heads n_kv_heads head_dim intermediate_size vocab_size"
      " tie_word_embeddings q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()),
    *(f"{_EXPERTS}.{name}" for name in "expert_num moe_intermediate_size shared_expert_num first_k_dense_replace"
      " moe_shared_expert_intermediate_size decoder_sparse_step mlp_only_layers".split()),
)  # fmt: skip
"""Where the YAML says something else, the weights of the folder do not fit."""
_GENERATION = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_TOP_K = 50
"""What transformers takes for a top_k that generation_config.json leaves out."""
_VALUES = {"hidden_act": ("silu",), "rope_type": ("default", "linear", "llama3", "yarn")}
"""The values of these keys for which there is code."""
_QWENS_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
"""What transformers takes where use_sliding_window is True."""
_EVERY_CLASS = frozenset(
    "architectures model_type head_dim rope_scaling rope_parameters quantization_config auto_map".split()
)
_HARMLESS = frozenset(
    "_name_or_path bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version use_cache id2label"
    " label2id pretraining_tp return_dict output_attentions output_hidden_states is_encoder_decoder problem_type"
    " chunk_size_feed_forward tokenizer_class attn_implementation _attn_implementation"
    " attention_type bos_token eos_token pad_token do_sample temperature top_k top_p repetition_penalty max_length"
    " no_rope_layers no_rope_layer_interval qk_head_dim".split()
)
"""Keys that change nothing of what a model computes, or that are judged elsewhere."""
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_FIX = "name a folder with config.json, as Hugging Face publishes it or `export` writes it"


def add_model_folder(resolved: Resolved) -> None:
    """Adds what the folder says to what the YAML and the flags say, which win; checks that the family is known.

    Raises:
        UserError: The folder or its files cannot be read, or the family is not known.
    """
    name = resolved.data.get(KEY)
    place = resolved.positions.get(KEY)
    if not isinstance(name, str) or not name or place is None:
        try:
            _family(resolved, resolved, _value(resolved.data, _MODEL) or {})
        except UserError as error:  # told together with what else is wrong
            resolved.problems.append(ConfigError(_named_at(resolved), error))
        return
    if mistake := path_error(name):
        resolved.problems.append(problem_at(place, KEY, mistake, _FIX, name))
        del resolved.data[KEY]
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        rule = "there is no such folder"
        if folder.exists():
            rule = "is a file, not a folder"
        resolved.problems.append(problem_at(place, KEY, rule, _FIX, name)._replace(is_absent=not folder.exists()))
        return
    facts = _model(_read_json(folder / "config.json", place, name), f"{folder}/config.json", resolved)
    _report_contradictions(resolved, facts)
    if (folder / "generation_config.json").exists():
        _add(facts, _generation(_read_json(folder / "generation_config.json", place, name)))
    if _value(resolved.data, f"{_EXPERTS}.aux_loss_factor") is not None:  # which says it in its own way
        (_value(facts.data, _EXPERTS) or {}).pop("router_aux_loss_coef", None)
    _add(resolved, facts)
    resolved.problems += facts.problems
    resolved.notes += facts.notes
    _use_folder(resolved, name)


def _value(data: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for part in key.split("."):
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = None
    return data


def _read_json(file: Path, place: SourceLocation, name: str) -> Table:
    """A JSON file as a tree with line numbers."""
    from trainer.storage.marker import read_saved  # loads numpy: its threads would start before signals are blocked

    try:
        text = read_saved(file, MAX_BYTES).decode("utf-8-sig")
        parsed = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        absent = isinstance(error, FileNotFoundError)
        if absent:
            rule = f"the folder has no {file.name}"
        else:
            rule = f"{file.name} cannot be read ({error})"
        raise UserError(rule, where=place.text, key=KEY, value=name, fix=_FIX) from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        rule = f"is not valid JSON: {getattr(error, 'msg', error)}"
        raise UserError(rule, where=f"{file}:{line}", key=file.name, fix="correct the file, or copy it again") from None
    except RecursionError:
        rule = "is nested too deep"
        raise UserError(rule, where=f"{file}:1", key=file.name, fix="copy the file again") from None
    if not isinstance(parsed, dict):
        raise UserError("must hold a JSON object", where=f"{file}:1", key=file.name, fix="copy the file again")
    # JSON is YAML but for tabs, which stand between values only: in a string they are written as \\t.
    if parsed:
        return parse_document(str(file), text.replace("\t", " "))[0]
    return Table()


def _family(resolved: Resolved, described: Resolved, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The class that a model is taken as, and the known class that its `settings` name, if any.

    `resolved` is what the YAML says: its ``model.arch.type`` decides. `settings` are those of `described`.

    Raises:
        UserError: The settings name a class that is not known, and the YAML does not say what to take it as.
    """
    classes = settings.get("architectures")
    kind = settings.get("model_type")
    written = _value(resolved.data, _ARCH)
    by_class, by_kind = (named_family({key: settings.get(key)})[0] for key in ("architectures", "model_type"))
    if classes and not by_class:
        unknown = "architectures"
    else:
        unknown = ""
        if kind and not by_kind:
            unknown = "model_type"
    if unknown:
        named = ""
    else:
        named = by_class or by_kind
    if written is not None or not (unknown or (by_class and by_kind and by_class != by_kind)):
        return known_class(written) or named, named
    if by_kind:  # another class of a known family
        where = described.positions[f"{_MODEL}.architectures"].text
        key = f"{_MODEL}.architectures"
        rule = f"is not the class that is known of model_type {kind}: {by_kind}"
        fix = f"write {_ARCH}: {by_kind}{f' or {by_class}' if by_class else ''}, whichever it is"
        raise UserError(rule, where=where, key=key, value=classes, fix=fix)
    told = list(differences(settings))
    rule = "this family is not known here"
    fix = (
        f"use a model of a known family: {known_families()}; where this one computes what a Llama does,"
        f" {_ARCH}: LlamaForCausalLM takes it as one"
    )
    if told:
        rule += f": unlike in a Llama, {'; '.join(told)}"
    else:
        rule += ", and its keys do not say how it differs"
    key = f"{_MODEL}.{unknown}"
    raise UserError(rule, where=described.positions[key].text, key=key, value=settings[unknown], fix=fix)


def _named_at(resolved: Resolved) -> SourceLocation:
    keys = (f"{_MODEL}.{name}" for name in ("architectures", "model_type"))
    return next(resolved.positions[key] for key in keys if key in resolved.positions)


def _resolved(entries: dict[str, Entry]) -> Resolved:
    """Keys of a config.json under the schema's names and in its sections."""
    root = Table({"model_config": Entry(Table(entries))})
    move_to_canonical_sections(root)
    return resolve(root)


def _model(table: Table, file: str, resolved: Resolved) -> Resolved:
    """What config.json says, with the defaults of its class for keys that it leaves out."""
    entries = table.entries()
    values = plain(table)
    by_name = named_family(values)[0]
    for key, meaning in FAMILIES[by_name].renamed_keys.items() if by_name else ():
        if key in entries:
            entries[meaning] = entries.pop(key)
            values[meaning] = values.pop(key)
    names = {key: entries[key] for key in ("architectures", "model_type") if key in entries}
    family, named = _family(resolved, _resolved(names), values)
    if not family:
        rule = f"names no family: it has neither architectures nor model_type; known are {known_families()}"
        raise UserError(rule, where=file, key=KEY, fix=f"write {_ARCH} in the YAML")
    own: dict[str, Entry] = {}
    values = {"use_sliding_window": FAMILIES[family].defaults.get("use_sliding_window"), **values}
    unread: list[str] = []
    problems = []
    for key, entry in entries.items():
        judged = verdict(key, values[key], family, named)
        if judged == "read":
            wrong = _unsupported(key, entry)
        else:
            wrong = []
        problems += wrong
        if judged == "read" and not wrong and not _is_inactive_window(key, values):
            own[key] = entry
        elif judged == "unread":
            unread.append(key)
        elif judged == "unknown":
            rule = "nobody can tell what this key changes in a model of another family"
            problems.append(problem_at(entry.place, key, rule, "use a model of a known family", values[key]))
    facts = _resolved(own)
    place = SourceLocation(0, f"{file} (without the key: {family}'s default)")
    defaults = {
        key: Entry(tree(value), place)
        for key, value in (FAMILIES[family].defaults | (_QWENS_WINDOW if values["use_sliding_window"] else {})).items()
        if key not in ("q_lora_rank", "sliding_window") or key not in entries  # where null is a value of its own
    }
    _add(facts, _resolved(defaults))
    _derive_heads(facts)
    facts.problems += problems
    if unread:
        text = f"{file}: not used, as in transformers: {', '.join(unread)}"
        facts.notes.append(Note(text, "ignored"))
    return facts


def verdict(key: str, value: Any, family: str, named: str) -> str:
    """What to do with a key of a config.json whose model is taken as `family`; `named` is the class that it names.

    Returns:
        "read"; "harmless": it changes nothing; "unread": the class in transformers does not read it either; "unknown":
        the class is not known, and nobody can tell what the key changes.
    """
    known = FAMILIES[family]
    if key == "auto_map" and named:  # the published code of a class that is known
        return "harmless"
    is_expert_count = key in ("num_local_experts", "num_experts") and known.is_mixture
    if key in _WINDOW_KEYS:
        if known.windows or not named:
            return "read"
        if value:
            return "unread"
        return "harmless"
    if is_known_effect(key) or key in _EVERY_CLASS or key in known.defaults or is_expert_count:
        return "read"
    if not known.in_transformers and (key in yaml_names(ModelConfig) or key in yaml_names(MoEConfig)):
        return "read"
    if key in _HARMLESS:
        return "harmless"
    if named:
        return "unread"
    if key in ("rope_interleave", "rope_interleaved"):
        return "read"
    if value in (None, False, "", [], {}):
        return "harmless"
    return "unknown"


def _is_inactive_window(key: str, values: Mapping[str, Any]) -> bool:
    """A window that is off, which Qwen's files describe all the same."""
    return key in ("sliding_window", "max_window_layers", "layer_types") and values["use_sliding_window"] is False


def _unsupported(key: str, entry: Entry) -> list[ConfigError]:
    """Values of config.json that there is no code for: a fix that names another value would be wrong advice."""
    if key == "hidden_act":
        checked = [("hidden_act", key, entry)]
    else:
        checked = []
    if key in ("rope_scaling", "rope_parameters") and isinstance(entry.node, Table):
        inside = entry.node.entries()
        checked = [("rope_type", f"{key}.{name}", inside[name]) for name in ("type", "rope_type") if name in inside]
        known = {*yaml_names(RopeScaling), "rope_theta", "partial_rotary_factor"}
        checked += [("", f"{key}.{name}", one) for name, one in inside.items() if name not in known]
    found = []
    for kind, name, one in checked:
        value = plain(one.node)
        if kind and value not in (None, *_VALUES[kind]):
            rule = f"not yet supported, only {one_of(_VALUES[kind])}"
            found.append(problem_at(one.place, name, rule, NOT_BUILT, value))
        elif not kind and value is not None:
            found.append(problem_at(one.place, name, "not yet supported", NOT_BUILT, value))
    return found


def _derive_heads(facts: Resolved) -> None:
    """Key heads and the width of a head where config.json leaves them to transformers, as it derives them."""
    settings = _value(facts.data, _MODEL)
    if "kv_lora_rank" in settings:  # multi-head latent attention has widths of its own
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
    """How generation_config.json wants tokens drawn."""
    entries = {key: entry for key, entry in table.entries().items() if key in _GENERATION}
    # A temperature of 0 stands for do_sample False.
    entries = {key: entry for key, entry in entries.items() if plain(entry.node) not in (None, 0) or key == "do_sample"}
    if "do_sample" in entries and plain(entries["do_sample"].node) is True and "top_k" not in table.entries():
        entries["top_k"] = Entry(Scalar(_TOP_K), entries["do_sample"].place)
    return _resolved({key: entry for key, entry in entries.items() if plain(entry.node) is not None})


def _add(resolved: Resolved, more: Resolved) -> None:
    """Adds the values of `more` that `resolved` lacks, or has as null, with their locations."""

    def add(own: dict[str, Any], other: dict[str, Any], path: str) -> None:
        for name, value in other.items():
            key = f"{path}{name}"
            if isinstance(value, dict) and isinstance(own.get(name), dict):
                if not (name == "rope_scaling" and "rope_type" in own[name]):  # another type has other keys
                    add(own[name], value, f"{key}.")
            elif own.get(name) is None and value is not None:
                own[name] = value
                for table in ("positions", "written"):
                    ours = getattr(resolved, table)
                    theirs = getattr(more, table)
                    ours |= {one: theirs[one] for one in theirs if f"{one}.".startswith(f"{key}.")}

    add(resolved.data, more.data, "")
    resolved.positions |= {key: place for key, place in more.positions.items() if key not in resolved.positions}


def _report_contradictions(resolved: Resolved, facts: Resolved) -> None:
    """Adds a problem for each size that the YAML gives otherwise; a note where the weights are not read."""
    names = []
    for key in _SIZES:
        ours = _value(resolved.data, key)
        theirs = _value(facts.data, key)
        if ours is None or theirs is None or ours == theirs:
            continue
        if resolved.data.get("run_mode", "train") == "train" and not resolved.data.get("load_checkpoint"):
            names.append(f"{resolved.written.get(key, key).rpartition('.')[2]} {ours} instead of {theirs}")
        else:
            source = facts.positions[key].text
            rule = f"{source} says {theirs}: weights of that size do not fit a model of this one"
            name = key
            if key in resolved.written:
                name = resolved.written[key]
            fix = "leave it out, or name another folder"
            resolved.problems.append(problem_at(resolved.positions[key], name, rule, fix, ours))
    if names:
        text = f"this training starts from new weights, of other sizes than those in {KEY}: {', '.join(names)}"
        resolved.notes.append(Note(text))


def _use_folder(resolved: Resolved, name: str) -> None:
    """The folder as load_checkpoint, but where a run trains from random weights, and as the tokenizer."""
    place = resolved.positions[KEY]
    place = SourceLocation(place.order, f"{place.text} ({KEY})")
    data = resolved.data
    resumes = bool(data.get("resume_training")) and _value(data, f"{_MODEL}.pet_config") is None
    if data.get("run_mode", "train") != "train":
        if resumes and data.get("load_checkpoint") == name:  # a resolved config.yaml: these were the first weights
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
    """Reads the config.json of a known class as that of a model folder is read. Its values are not validated: they are
    those of a model."""
    facts = _model(tree(config_json), "config.json", Resolved())
    apply_derived_defaults(facts)
    settings = facts.data["model"]["model_config"]
    for name, kind in (("moe_config", MoEConfig), ("rope_scaling", RopeScaling)):
        if name in settings:
            settings[name] = kind.model_construct(**settings[name])
    return ModelConfig.model_construct(**settings)
