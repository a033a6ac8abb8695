"""Tiny Hugging Face models with weights from a seed, their outputs, and a check that each case tests its feature.

Part of make_golden.py. Shapes: B rows, T tokens, V vocabulary, E experts, F width of an expert, D hidden.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

ROWS, TOKENS, VOCABULARY = 2, 24, 64
IGNORE_INDEX = -100
TOLERANCE = 1e-4
REQUIRED_EFFECT = 100 * TOLERANCE
REQUIRED_MARGIN = 1e-3
"""Least gap between the scores of the last chosen expert and the next one, so that rounding decides no choice."""

BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}
"""By the keys of config.json before transformers 5, which converts rope_theta and rope_scaling into rope_parameters."""

# Lengths of the documents in a packed sequence.
DOCUMENT_LENGTHS = ((7, 1, 16), (15, 9))

EXPERT_BIAS = "e_score_correction_bias"
NEVER_CHOSEN = 3
"""The expert that this expert bias excludes: the gradient of its weights is zero."""


@dataclass(frozen=True)
class Removal:
    """Removes a feature: other configuration, and weights (by the end of their name) replaced by a value."""

    changes: dict[str, Any] = field(default_factory=dict)
    neutral: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Describes a model and its batch.

    Attributes:
        what: What the case tests.
        changes: Changes of its configuration to BASE.
        packed: Several documents share a row: positions restart and no token attends to another document.
        without: Configuration changes that remove the tested feature.
        neutral: Weights (by the end of their name) that are replaced by a value to remove the feature instead.
        removals: Changes that remove each of several features, in place of these two.
        salt: Selects other weights and tokens, for which no router has a near-tie.
        mtp_depth: Number of multi-token prediction modules; see golden_mtp.py.
    """

    what: str
    changes: dict[str, Any] = field(default_factory=dict)
    model_type: str = "llama"
    packed: bool = False
    without: dict[str, Any] = field(default_factory=dict)
    neutral: dict[str, float] = field(default_factory=dict)
    removals: dict[str, Removal] = field(default_factory=dict)
    salt: str = ""
    mtp_depth: int = 0

    @property
    def all_removals(self) -> dict[str, Removal]:
        return self.removals or {self.what: Removal(self.without, self.neutral)}


def build_model(case: Case, name: str, changes: dict[str, Any]) -> torch.nn.Module:
    """Builds the model in evaluation mode and float32; its weights depend on the names of the case and of the
    weights."""
    config = {**BASE, **case.changes, **changes}
    how = {"attn_implementation": "eager"}
    if "num_experts_per_tok" in config or "moe_k" in config:
        how["experts_implementation"] = "eager"
    hf_config = AutoConfig.for_model(case.model_type, **how, use_cache=False, **_copy(config))
    check_rotary_keys(hf_config, config)
    model = AutoModelForCausalLM.from_config(hf_config, **how).float().eval()
    fill_weights(model, name + case.salt)
    return model


def fill_weights(model: torch.nn.Module, seed_text: str) -> None:
    """Draws every weight from its own stream. The expert bias keeps one expert from ever being chosen."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(make_weight(f"{seed_text}/{name}", tuple(weight.shape))))
            centered = model.config.model_type.startswith(("gemma", "nemotron"))
            if centered and name.endswith("norm.weight"):  # it multiplies by 1 + weight
                weight -= 1
            if name.endswith(EXPERT_BIAS):
                weight[..., NEVER_CHOSEN] = -10.0
        for name, bias in model.named_buffers():
            if name.endswith(EXPERT_BIAS):
                bias.copy_(torch.from_numpy(make_weight(f"{seed_text}/{name}.bias", tuple(bias.shape))))
                bias[NEVER_CHOSEN] = -10.0


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    """Copies a dictionary, because transformers changes its arguments."""
    return json.loads(json.dumps(config))


def check_rotary_keys(hf_config: Any, config: dict[str, Any]) -> None:
    """Fails unless transformers understood rope_theta and rope_scaling: version 5 keeps both in ``rope_parameters``."""
    understood = getattr(hf_config, "rope_parameters", None)
    if understood is None:
        understood = {"rope_theta": hf_config.rope_theta, **(hf_config.rope_scaling or {"rope_type": "default"})}
    understood = understood.get("full_attention", understood)
    wanted = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    if "partial_rotary_factor" in config:
        wanted["partial_rotary_factor"] = config["partial_rotary_factor"]
    if any(understood.get(key) != value for key, value in wanted.items()):
        raise SystemExit(f"transformers {transformers.__version__} made {understood} of {wanted}")


def make_weight(seed_text: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms around 1, biases around 0, matrices large enough for attention to be far from uniform."""
    generator = np.random.RandomState(zlib.crc32(seed_text.encode()))  # a stream that numpy promises never to change
    normal = generator.standard_normal(shape)
    if seed_text.endswith("norm.weight"):
        return (1.0 + 0.2 * normal).astype(np.float32)
    scale = 0.2 if seed_text.endswith(".bias") else 0.3 if "self_attn" in seed_text or ".gate." in seed_text else 0.15
    return (scale * normal).astype(np.float32)


def make_batch(name: str, packed: bool, vocabulary: int = VOCABULARY) -> dict[str, np.ndarray]:
    """Makes int32 [B, T] arrays as trainer.data does; some labels are ignored in every sequence."""
    generator = np.random.RandomState(zlib.crc32(f"{name}/tokens".encode()))
    tokens = generator.randint(0, vocabulary, size=(ROWS, TOKENS + 1))
    lengths = DOCUMENT_LENGTHS if packed else ((TOKENS,),) * ROWS
    labels = tokens[:, 1:].copy()
    if packed:
        for row, row_lengths in enumerate(lengths):
            labels[row, np.cumsum(row_lengths) - 1] = IGNORE_INDEX
    else:
        labels[0, :5] = IGNORE_INDEX  # a masked prompt
        labels[1, -1] = IGNORE_INDEX
    arrays = {
        "input_ids": tokens[:, :-1],
        "labels": labels,
        "positions": np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths]),
        "segment_ids": np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]),
    }
    return {key: np.ascontiguousarray(array, dtype=np.int32) for key, array in arrays.items()}


def attention_mask(batch: dict[str, np.ndarray], window: int = TOKENS) -> torch.Tensor:
    """Returns the additive mask [B, 1, T, T]: causal, within a document and the last `window` tokens."""
    segments = torch.from_numpy(batch["segment_ids"])
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - window)
    may_attend = (segments[:, :, None] == segments[:, None, :]) & causal
    mask = torch.zeros(may_attend.shape).masked_fill(~may_attend, torch.finfo(torch.float32).min)
    return mask[:, None]


def forward(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """Logits [B, T, V]. A model with a sliding window makes its masks itself where no row has several documents."""
    window = getattr(model.config, "sliding_window", None)
    if window and not batch["segment_ids"].any():
        return model(input_ids=torch.from_numpy(batch["input_ids"]).long()).logits
    masks: Any = attention_mask(batch)
    if window:
        windowed = attention_mask(batch, window)
        masks = {"full_attention": masks, "sliding_attention": windowed}
        if getattr(model.config, "layer_types", None) is None:  # every layer has the window
            masks = windowed
    return model(input_ids=torch.from_numpy(batch["input_ids"]).long(), attention_mask=masks,
                 position_ids=torch.from_numpy(batch["positions"]).long()).logits


def loss_sum(logits: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    """Returns the sum of the token losses over the labels that count."""
    return functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).long().flatten(),
                                    ignore_index=IGNORE_INDEX, reduction="sum")


def effect(case: Case, name: str, removal: Removal, batch: dict[str, np.ndarray], logits: np.ndarray) -> float:
    """Returns how far the logits move when a feature is removed (packed: the document boundaries).

    Restarting positions alone have no effect, because rotary embeddings depend on differences of positions only.
    """
    model = build_model(case, name, removal.changes)
    if case.packed:
        batch = {**batch, "segment_ids": np.zeros_like(batch["segment_ids"])}
    with torch.no_grad():
        for weight_name, weight in (*model.named_parameters(), *model.named_buffers()):
            for ending, value in removal.neutral.items():
                if weight_name.endswith(ending):
                    weight.fill_(value)
        return float(np.abs(forward(model, batch).numpy() - logits).max())


def require_effect(name: str, effects: dict[str, float]) -> float:
    """Returns the smallest effect.

    Raises:
        SystemExit: It is too small for a test to notice.
    """
    for what, moved in effects.items():
        if moved < REQUIRED_EFFECT:
            raise SystemExit(f"{name}: without '{what}' the logits move by {moved:.2g} only, too little to test it")
    return min(effects.values())


@contextmanager
def routers_watched(name: str, model: torch.nn.Module) -> Iterator[list[float]]:
    """Collects the margins of all routers' choices.

    Raises:
        SystemExit: One of them is a close one, or no token goes to some expert that no bias excludes.
    """
    margins: list[float] = []
    unused: list[int] = []

    def watch(router: torch.nn.Module, _: Any, out: tuple[torch.Tensor, ...]) -> None:
        margins.append(margin(router, out[0], out[2]))
        excluded = {NEVER_CHOSEN} if expert_bias(router) is not None else set()
        unused.extend({*range(out[0].shape[1])} - {*out[2].unique().tolist()} - excluded)

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    yield margins
    for hook in hooks:
        hook.remove()
    if len(margins) < len(routers) or min(margins, default=1.0) < REQUIRED_MARGIN or unused:
        found = f"a margin of {min(margins, default=0):.2g}, and {len(unused)} experts no token"
        raise SystemExit(f"{name}: a router's choice has {found}: change the salt")


def expert_bias(router: torch.nn.Module) -> torch.Tensor | None:
    """Returns a router's expert bias, [E]; None without one. ERNIE 4.5 has a module for it, where it is [1, E]."""
    bias = getattr(getattr(router, "moe_statics", router), EXPERT_BIAS, None)
    return None if bias is None else bias.flatten()


def margin(router: torch.nn.Module, logits_NE: torch.Tensor, chosen_Nk: torch.Tensor) -> float:
    """Returns the gap between the scores of the last chosen expert or group and the next one."""
    bias_E = expert_bias(router)
    is_sigmoid = bias_E is not None and not hasattr(router, "moe_statics")
    scores_NE = logits_NE.sigmoid() if is_sigmoid else logits_NE.softmax(-1)
    scores_NE = scores_NE if bias_E is None else scores_NE + bias_E
    smallest, others_NE = scores_NE.gather(1, chosen_Nk).amin(1), scores_NE.scatter(1, chosen_Nk, -torch.inf)
    margins = []
    has_groups = is_sigmoid or getattr(router, "topk_method", "") == "group_limited_greedy"
    if has_groups and router.topk_group < router.num_group:
        groups_NG = scores_NE.unflatten(1, (router.num_group, -1)).topk(1 + is_sigmoid).values.sum(-1)
        ordered_NG, order_NG = groups_NG.sort(descending=True)
        margins.append(ordered_NG[:, router.topk_group - 1] - ordered_NG[:, router.topk_group])
        group_E = torch.arange(scores_NE.shape[1]) // (scores_NE.shape[1] // router.num_group)
        open_NE = (order_NG[:, : router.topk_group, None] == group_E).any(1)
        others_NE = others_NE.masked_fill(~open_NE, -torch.inf)
    margins.append(smallest - others_NE.amax(1))
    return min(float(found.detach().min()) for found in margins)


GRANITE_EXPERTS = {
    ".experts.gate_up_proj": ".input_linear.weight", ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}  # fmt: skip


def on_disk(model_type: str, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Splits a tensor of transformers 5, which stacks experts and joins gate and up, into those of published files."""
    if model_type == "gpt_oss":
        return {name: array}
    if model_type.startswith("granitemoe"):
        for ours, theirs in GRANITE_EXPERTS.items():
            name = name.replace(ours, theirs)
        return {name: array}
    layer, found, part = name.partition(".mlp.")
    if not found or not part.startswith(("experts.", "gate.")):
        return {name: array}
    home, parts = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    if model_type == "ernie4_5_moe":
        part = part.replace("gate.moe_statics.", "moe_statics.")
        if part.startswith("moe_statics."):
            return {f"{home}.{part}": array}
    if model_type == "mixtral":
        home, parts = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    if part.startswith("gate."):
        return {f"{home}.{part}": array}
    names = parts[:2] if part == "experts.gate_up_proj" else parts[2:]
    return {
        f"{home}.experts.{expert}.{one}.weight": matrix
        for expert, joined in enumerate(array)
        for one, matrix in zip(names, np.split(joined, len(names)), strict=True)
    }


def state_on_disk(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Returns all weights and the routers' biases under the names of published files."""
    state = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    state |= {name: bias.numpy() for name, bias in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    kind, found = model.config.model_type, {}
    for name, array in state.items():
        found |= on_disk(kind, name, array)
    return found


def gradients_on_disk(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Gradients under the same names; an expert bias has none."""
    found = {}
    for name, weight in model.named_parameters():
        if not name.endswith(EXPERT_BIAS):
            found |= on_disk(model.config.model_type, name, weight.grad.numpy())
    return found


def check_names(name: str, model: torch.nn.Module) -> None:
    """Fails unless `state_on_disk` is what transformers itself writes."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    ours = state_on_disk(model)
    wrong = {key for key in ours.keys() | saved.keys()
             if key not in ours or key not in saved or not np.array_equal(ours[key], saved[key])}
    if wrong:
        version = transformers.__version__
        raise SystemExit(f"{name}: transformers {version} saves other names or values: {sorted(wrong)}")
