"""The JSON Schema of a configuration, by what an editor does with it: checks values and completes keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from config_helpers import BASE
from pydantic import TypeAdapter
from test_config_dump import FULL
from test_config_places import SNIPPETS
from test_newer_schema import FULL as NEWER_FULL
from test_newer_schema import SMALL as NEWER_SMALL

from trainer.config import json_schema, parse_config
from trainer.config.pynative.json_schema import NEWER, OLDER, file_schema
from trainer.config.pynative.table import ROWS
from trainer.config.read.json_schema import _all_sections
from trainer.config.read.nodes import plain
from trainer.config.read.yaml_reader import parse_document
from trainer.config.schema import unsupported

SCHEMA = json_schema()
FILE = file_schema()
REPOSITORY = Path(__file__).resolve().parents[3]
STORED = REPOSITORY / "docs" / "schema.json"
NEWER_VALID = [
    NEWER_SMALL + more
    for more in (
        "parallelism:\nrecompute: {mode: None}\n",
        "parallelism: {data_parallel_shard_strategy: optim, reshard_after_forward_policy: never}\n",
        "monitor: {train_state: {local_norm: True}}\nprofiler: {enable_profiling: True, end_step: 3}\n",
    )
]
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
CHECKED = {"$ref", "anyOf", "oneOf", "type", "enum", "const", "properties", "additionalProperties", "required", "items"}
CHECKED |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "minLength"}
CHECKED |= {"propertyNames"}
SPOKEN = {
    "title", "description", "default", "$defs", "$schema", "x-aliases", "x-beside", "x-support", "x-reason", "x-fix",
}  # fmt: skip


def complaints(value: Any, rule: Any, path: str = "") -> list[str]:
    """Validates against the part of JSON Schema that our schema uses; returns the complaints."""
    if rule is True:
        return []
    unknown = set(rule) - CHECKED - SPOKEN - {"if", "then", "else"}
    assert not unknown, f"the schema uses {unknown}, which this test does not check"
    if "$ref" in rule:
        return complaints(value, FILE["$defs"][rule["$ref"].removeprefix("#/$defs/")], path)
    if "if" in rule:
        branch = "else" if complaints(value, rule["if"], path) else "then"
        return complaints(value, rule[branch], path)
    for word in ("anyOf", "oneOf"):
        if word in rule:
            tried = [complaints(value, option, path) for option in rule[word]]
            fitting = sum(not found for found in tried)
            if not fitting:
                return [f"{path}: no option fits", *(text for found in tried for text in found)]
            if word == "oneOf" and fitting != 1:
                return [f"{path}: {fitting} options fit"]
    return _own_complaints(value, rule, path)


def _own_complaints(value: Any, rule: dict[str, Any], path: str) -> list[str]:
    wanted = rule["type"] if "type" in rule else None
    if wanted and (
        not isinstance(value, TYPES[wanted]) or (isinstance(value, bool) and wanted in ("integer", "number"))
    ):
        return [f"{path}: {value!r} is no {wanted}"]
    if "const" in rule and value != rule["const"] or "enum" in rule and value not in rule["enum"]:
        return [f"{path}: {value!r} is not one of the values"]
    if isinstance(value, dict) and ("properties" in rule or "required" in rule or "propertyNames" in rule):
        return _of_object(value, rule, path)
    if isinstance(value, list) and "items" in rule:
        return [
            text for number, item in enumerate(value) for text in complaints(item, rule["items"], f"{path}.{number}")
        ]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low = value < rule.get("minimum", value) or value <= rule.get("exclusiveMinimum", value - 1)
        high = value > rule.get("maximum", value) or value >= rule.get("exclusiveMaximum", value + 1)
        return [f"{path}: {value} is out of bounds"] if low or high else []
    return []


def _of_object(value: dict[str, Any], rule: dict[str, Any], path: str) -> list[str]:
    properties, others = rule.get("properties", {}), rule.get("additionalProperties")
    names, more = rule.get("propertyNames", True), others if isinstance(others, dict) else True
    found = [f"{path}.{key} is required" for key in rule.get("required", []) if key not in value]
    for key, item in value.items():
        if key in properties:
            found += complaints(item, properties[key], f"{path}.{key}")
        elif others is False:
            found.append(f"{path}.{key} is unknown")
        else:
            found += complaints(key, names, f"{path}.{key}") + complaints(item, more, f"{path}.{key}")
    return found


def check(text: str) -> list[str]:
    """Returns the complaints about a YAML text, for which both schemas of the older files are one."""
    root, _ = parse_document("a.yaml", text)
    found = complaints(plain(root), SCHEMA)
    assert complaints(plain(root), FILE) == found
    return found


# Keys that lost their indentation are repaired by the loader only: an editor may well complain about them.
INDENTED = [text for text, _ in SNIPPETS.values() if "\n..." not in text]


@pytest.mark.parametrize("text", [BASE, FULL, *INDENTED])
def test_valid_files_satisfy_the_schema(text):
    assert check(text) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("runner_config: {epoch: 1}\n", "epoch is unknown"),
        ("zzz: 1\n", "zzz is unknown"),
        ("train_dataset: {data_loader: {type: JsonlDataset, columns: {txt: a}}}\n", "columns.txt: 'txt' is not one of"),
        ("train_dataset: {data_loader: {type: JsonlDataset, columns: {text: 3}}}\n", "columns.text: 3 is no string"),
        ("train_dataset: {data_loader: {sources: [{path: a, weight: 0}]}}\n", "weight: 0 is out of bounds"),
        ("runner_config: {epochs: one}\n", "is no integer"),
        ("runner_config: {epochs: 0}\n", "out of bounds"),
        ("runner_wrapper: {max_grad_norm: 0}\n", "out of bounds"),
        ("lr_schedule: {type: Cosine}\n", "no option fits"),
        ("lr_schedule: {type: CosineAnnealingLR}\n", "t_max is required"),
        ("callbacks: [{type: MFLossMonitor, keep_checkpoint_max: 3}]\n", "no option fits"),
        ("callbacks: [{per_print_times: 3}]\n", "no option fits"),
        ("run_mode: evaluate\n", "not one of the values"),
        ("seed: True\n", "is no integer"),
    ],
)
def test_invalid_files_do_not(text, part):
    assert any(part in complaint for complaint in check(text)), check(text)


@pytest.mark.parametrize(
    "text",
    [
        "model_config: {num_hidden_layers: 3, moe_grouped_gemm: True}\n",
        "callback: [{type: CheckpointMointor}]\n",
        "moe_config: {moe_expert_capacity_factor: 2}\n",
        "train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: {held_out: 0.1}}\n",
        "optimizer: {type: FusedAdamW}\n",
        "lr_schedule: {learning_rate: 1}\n",
        "lr_schedule: {type: CosineAnnealingLR, learning_rate: 0.1, t_max: 3}\n",
        "runner_config:\ncallbacks:\nmodel:\n",
        "eval_dataset: null\n",
        "train_dataset: {data_loader: {dataset_dir: a}}\n",
        "runner_wrapper: {scale_sense: {type: DynamicLossScaleUpdateCell}}\n",
        "resume_training: step-1\n",
        "optimizer: {beta1: 0.9}\nmodel_config: {rope_parameters: {rope_theta: 500000.0}}\n",
    ],
)
def test_other_names_places_and_empty_sections_satisfy_it(text):
    assert check(text) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_satisfies_the_schema_of_the_repository_and_names_it(path: Path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    name, _, place = first.partition("=")
    assert name == "# yaml-language-server: $schema" and (path.parent / place).resolve() == STORED
    root, _ = parse_document(path.name, path.read_text(encoding="utf-8"))
    assert complaints(plain(root), json.loads(STORED.read_text(encoding="utf-8"))) == []


def test_the_stored_schema_is_current():
    """`python run_trainer.py schema > docs/schema.json` writes it."""
    assert STORED.read_text(encoding="utf-8") == json.dumps(FILE, indent=1) + "\n"


@pytest.mark.parametrize("text", [NEWER_SMALL, NEWER_FULL, *NEWER_VALID])
def test_valid_files_of_the_newer_schema_satisfy_it(text: str):
    parse_config("a.yaml", text)
    root, _ = parse_document("a.yaml", text)
    assert complaints(plain(root), FILE) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("training: {step: 1}", "training.step is unknown"),
        ("training: {steps: 0}", "training.steps: 0 is out of bounds"),
        ("training: {steps: '1'}", "'1' is no integer"),
        ("runner_config: {epochs: 1}\ntraining: {}", "runner_config is unknown"),
        ("parallelism: {data_parallel_shard_strategy: level1}", "strategy: 'level1' is not one of the values"),
        ("parallelism: {context_parallel_mask_type: full}", "mask_type: 'full' is not one of the values"),
        ("training: {}\nmodel: {num_hiden_layers: 3}", "num_hiden_layers is unknown"),
        ("lr_scheduler: {type: Cosine}", "type: 'Cosine' is not one of the values"),
        ("checkpoint: {save_max: many}", "save_max: 'many' is no integer"),
        ("train_dataset: {dataloader: {type: MindDataset, dataset_dri: a}}", "dataloader.dataset_dri is unknown"),
    ],
)
def test_mistakes_in_files_of_the_newer_schema_do_not(change: str, part: str):
    root, _ = parse_document("a.yaml", change)
    found = complaints(plain(root), FILE)
    assert any(part in complaint for complaint in found), found


def test_every_key_of_the_newer_schema_has_a_description_and_the_default_there():
    def walk(schema: dict[str, Any], path: str) -> None:
        for choice in (schema, *schema.get("anyOf", ())):
            for name, rule in choice.get("properties", {}).items():
                assert rule["description"], f"{path}{name}"
                walk(rule, f"{path}{name}.")

    walk(FILE["$defs"][NEWER], "")
    training = FILE["$defs"][NEWER]["properties"]["training"]["anyOf"][0]["properties"]
    written = {row.old.partition(".")[2]: row.default for row in ROWS
               if row.old.startswith("training.") and row.default is not None}  # fmt: skip
    assert {name: rule["default"] for name, rule in training.items() if "default" in rule} == written
    assert not any("title" in rule for rule in FILE["$defs"][OLDER]["properties"].values())


def test_it_is_json_with_a_description_for_every_key_and_no_free_objects():
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$schema"].startswith("https://json-schema.org/")
    for name, described in {"": SCHEMA, **SCHEMA["$defs"]}.items():
        assert described["additionalProperties"] is False, name
        for key, rule in described["properties"].items():
            assert rule["description"], f"{name}.{key}"


def test_texts_call_booleans_what_files_call_them():
    text = json.dumps([SCHEMA, FILE])
    texts = re.findall(r'"(?:description|x-reason|x-fix)": "((?:[^"\\]|\\.)*)"', text)
    assert len(texts) > 500 and not [text for text in texts if re.search(r"\b(True|False)\b", text)]


def test_the_table_of_unsupported_keys_names_sections_once_and_known_types():
    path = Path(unsupported.__file__).with_suffix(".yaml")
    table, _ = parse_document(path.name, path.read_text(encoding="utf-8"))  # refuses a key that stands twice
    assert {*plain(table)} <= {kind.__name__ for kind in _all_sections()}
    for section, kinds in plain(table).items():
        assert {*kinds} <= {"whole"} or {*kinds} <= {"ignored", "not_yet"}, section
        for name, annotation, default, support, reason in unsupported.unsupported_keys(section):
            choices = [get_args(part) for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
            assert all(len(words) > 1 for words in choices), f"{section}.{name}: a word that is no type"
            assert (support == "supported") == (not reason)
            values = () if default is None else (default,)
            assert all(TypeAdapter(annotation).validate_python(value, strict=True) == value for value in values)


def test_the_real_library_agrees_where_it_is_installed():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    root, _ = parse_document("a.yaml", FULL)
    jsonschema.validate(plain(root), SCHEMA)
    jsonschema.Draft202012Validator.check_schema(FILE)
    jsonschema.validate(plain(root), FILE)
