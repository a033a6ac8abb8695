"""Counts the fused operators in the graphs of a training step, and reports dtypes and operators without a kernel.

A model has a few kinds of layers. For each kind, a training step with one such layer is built, and a step without
layers. The difference, times the number of such layers, is what they add to the step of the model. Weights have the
sizes of the configuration. The micro-batch is small, because the counts do not depend on its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from trainer.audit.graph import Node, export_step, trained_names
from trainer.config.checks.adapters import vocabulary_device_problems
from trainer.config.checks.parallel import is_semi_auto, resolve_for_job
from trainer.config.device_defaults import apply_device_defaults, device_defaults
from trainer.config.recompute import recomputed_parts
from trainer.device.settings import device_calls, jit_options
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import LayerSpec, ModelSpec, MoeSpec
from trainer.models.spec.names import EMBEDDING, is_buffer, layer_prefix
from trainer.ops.ascend.support import CANN, HOST, NONE, SUPPORT, dtype_problem, kernel_sources
from trainer.ops.kernel_set import KernelSet, load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import KernelChoice, select_kernels
from trainer.optim.freeze import frozen_names
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.semi_auto.network import semi_auto_rows

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig

Table: TypeAlias = list[tuple[str, ...]]

_ROWS = 2
_TOKENS = 64
_NORM = "rms_norm"
# The operators of each kernel in a graph, forward and backward. The gradients of a grouped product are such products.
_OPERATORS = {
    "rotary_embedding": ("RotaryPositionEmbedding", "RotaryPositionEmbeddingGrad"),
    "swiglu": ("Swiglu", "SwigluGrad"),
    "attention": ("FlashAttentionScore", "FlashAttentionScoreGrad"),
    _NORM: ("RmsNorm", "RmsNormGrad"),
    "grouped_matmul": ("GroupedMatmulV4",),
    "token_permute": ("MoeTokenPermute", "MoeTokenPermuteGrad", "InnerMoeTokenUnpermute", "MoeTokenUnpermuteGrad"),
}


@dataclass(frozen=True)
class Fused:
    """One fused operator in a training step of the whole model."""

    operator: str
    kernel: str
    asked: int
    """The requested number, including gradients of trainable weights."""
    found: int
    dtypes: tuple[str, ...]
    """Each combination of input dtypes that occurs."""
    note: str
    """Which input dtype is not documented, or why the operator is missing."""

    @property
    def missing(self) -> bool:
        """Returns whether the graph has fewer of them than requested."""
        return self.found < self.asked


@dataclass(frozen=True)
class Other:
    """An operator of the graph for which MindSpore has no kernel on Ascend; `source` names what computes it."""

    operator: str
    count: int
    source: str


@dataclass(frozen=True)
class Audit:
    """The results of an audit.

    Attributes:
        layers: Name and number of each kind of layer.
        fused: All fused operators that a key can request.
        others: Operators for which MindSpore has no kernel on Ascend, sorted by what computes them.
        checked: The number of different operators whose kernels were looked up.
        semi_auto: The table of semi-automatic mode; empty in explicit mode.
        limits: What the audit does not show.
    """

    layers: tuple[tuple[str, int], ...]
    fused: tuple[Fused, ...]
    others: tuple[Other, ...]
    checked: int
    semi_auto: tuple[tuple[str, str], ...]
    limits: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Returns the fused operators that are requested and missing."""
        return tuple(fused.operator for fused in self.fused if fused.missing)


class _Kind(NamedTuple):
    """A kind of layer. All layers of a kind have the same operators."""

    has_experts: bool
    is_module: bool
    is_rotated: bool
    """Whether the layer has rotary positions."""
    needs_input_gradient: bool
    """Whether a weight before the layer is trained, so that a gradient flows to its input."""
    trained: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def name(self) -> str:
        """Returns the name of the kind in the report."""
        name = "dense"
        if self.has_experts:
            name = "experts"
        if self.is_module:
            name = f"multi-token prediction module, {name}"
        if not self.is_rotated:
            name = f"{name}, without rotary positions"
        if not self.trained:
            return f"{name}, frozen"
        if len(self.trained) < sum(not is_buffer(weight) for weight in self.weights):
            return f"{name}, partly frozen"
        return name


def audit_ascend(config: Config, world: World = SINGLE_PROCESS) -> Audit:
    """Builds the graphs of a step on an Ascend, on any device, and counts their operators.

    Args:
        world: The world of the job, whose size semi-automatic mode needs.

    Raises:
        UserError: `freeze` matches no weight, an Ascend does not support a key of `context`, or semi-automatic
            mode does not support a requested feature.
    """
    for each in vocabulary_device_problems(config):
        raise each.error
    config = resolve_for_job(config, world)
    device_default_keys = device_defaults(config, "Ascend")
    config = apply_device_defaults(config, "Ascend")
    for check in (device_calls, jit_options):
        check(config, "Ascend")  # raises the errors of a run on an Ascend
    settings = config.decoder
    precision = resolve_precision(settings, config.amp_level, "Ascend")
    choices = select_kernels(settings, "Ascend", precision)
    kernels = load_kernels(choices, precision)
    trained = trained_names(settings, frozen_names(config))
    spec = model_spec(settings)
    kinds = _kinds(spec, trained)
    graphs = _Graphs(settings, kernels, trained)
    total = graphs.operators(kinds)
    fused = tuple(_fused_operators(spec, choices, device_default_keys, kinds, total, graphs))
    sources = kernel_sources(total)
    others = [
        Other(operator, total[operator], source) for operator, source in (sources or {}).items()
        if operator not in SUPPORT and source in (HOST, NONE, CANN)
    ]  # fmt: skip
    semi_auto: list[tuple[str, str]] = []
    if is_semi_auto(config):
        semi_auto = semi_auto_rows(config, world)
    return Audit(
        layers=tuple((kind.name, len(layers)) for kind, layers in kinds.items()),
        fused=fused,
        others=tuple(sorted(others, key=lambda other: (other.source, other.operator))),
        checked=len(sources or ()),
        semi_auto=tuple(semi_auto),
        limits=tuple(_limits(config, sources is not None)),
    )


def _kinds(spec: ModelSpec, trained: frozenset[str]) -> dict[_Kind, list[int]]:
    """Returns the layers of each kind."""
    names = spec.parameters()
    first = spec.first_reached(trained)
    kinds: dict[_Kind, list[int]] = {}
    for layer in range(len(spec.layers)):
        prefix = layer_prefix(layer)
        weights = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        trained_weights = tuple(name for name in weights if prefix + name in trained)
        is_rotated = spec.layers[layer].attention.is_rotated
        is_module = layer in spec.module_layers
        kind = _Kind(spec.layers[layer].is_moe, is_module, is_rotated, first < layer, trained_weights, weights)
        kinds.setdefault(kind, []).append(layer)
    return kinds


class _Graphs:
    """The operators of steps. Each step is exported once."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, trained: frozenset[str]) -> None:
        self.settings = settings
        self.kernels = kernels
        self.trained = trained
        self.known: dict[tuple[tuple[int, ...], bool], list[Node]] = {}

    def export(self, layers: Sequence[int], input_gradient: bool) -> list[Node]:
        """Exports a step with these layers, with a gradient of the first layer's input if `input_gradient`."""
        key = tuple(layers), input_gradient
        if key not in self.known:
            trained = self.trained
            if input_gradient:
                trained = trained | {EMBEDDING}
            self.known[key] = export_step(self.settings, self.kernels, layers, trained, _ROWS, _TOKENS)
        return self.known[key]

    def count(self, layers: Sequence[int], input_gradient: bool) -> Counter[str]:
        """Counts the operators of a step with these layers; see `export`."""
        return Counter(node.operator for node in self.export(layers, input_gradient))

    def count_of_layer(self, kind: _Kind, layers: Sequence[int]) -> Counter[str]:
        """Counts the operators that one layer of this kind adds to a step."""
        added = self.count(layers[:1], kind.needs_input_gradient)
        added.subtract(self.count([], kind.needs_input_gradient or bool(kind.trained)))
        return added

    def count_without_layers(self, kinds: Collection[_Kind]) -> Counter[str]:
        """Counts the operators of a step outside of its layers."""
        return self.count([], any(kind.needs_input_gradient or kind.trained for kind in kinds))

    def operators(self, kinds: dict[_Kind, list[int]]) -> Counter[str]:
        """Counts the operators of a step of the whole model."""
        total = self.count_without_layers(kinds)
        for kind, layers in kinds.items():
            for operator, count in self.count_of_layer(kind, layers).items():
                total[operator] += count * len(layers)
        return +total


def _fused_operators(
    spec: ModelSpec,
    choices: Sequence[KernelChoice],
    device_default_keys: Collection[str],
    kinds: dict[_Kind, list[int]],
    total: Counter[str],
    graphs: _Graphs,
) -> Iterator[Fused]:
    for choice in choices:
        # A kernel that is only a default of the device is not missing if the model does not allow it.
        by_default = choice.asked.split(":")[0] in device_default_keys
        is_requested = choice.fused or not by_default and not choice.asked.endswith("false")
        for operator in _OPERATORS[choice.kernel]:
            requested = 0
            if is_requested:
                requested = _requested_count(spec, operator, choice.kernel, kinds, graphs)
            nodes = (node for graph in graphs.known.values() for node in graph if node.operator == operator)
            inputs = sorted({node.inputs for node in nodes})
            notes = [dtype_problem(operator, dtypes) for dtypes in inputs]
            if total[operator] < requested and choice.fused:
                notes.append("missing in the graph")
            elif total[operator] < requested:
                notes.append(f"missing: {choice.why}")
            elif by_default and not choice.fused:
                notes.append(choice.why)
            note = "; ".join(dict.fromkeys(note for note in notes if note))
            shown = tuple(", ".join(dtypes) for dtypes in inputs)
            yield Fused(operator, choice.kernel, requested, total[operator], shown, note)


def _requested_count(
    spec: ModelSpec, operator: str, kernel: str, kinds: dict[_Kind, list[int]], graphs: _Graphs
) -> int:
    """Returns the least number of an operator in a step of the whole model if every kernel is the requested one.

    Outside of layers, and in the first layer with a trained weight, gradients count as they are in the graphs.
    """
    is_gradient = operator.endswith("Grad")
    total = 0
    if kernel == _NORM:
        total = 1  # the final norm
    if is_gradient:
        total = min(total, graphs.count_without_layers(kinds)[operator])
    for kind, layers in kinds.items():
        each = _in_layer(spec.layers[layers[0]], kernel)
        if kernel == "grouped_matmul" and each:
            each = _grouped_products(kind)
        elif kind.is_module and kernel == _NORM and is_gradient:
            # The norm before the module is that of the main head. A graph computes it once, but with two gradients.
            each += 1
        if is_gradient and not kind.needs_input_gradient:
            # In the first layer with a trained weight, the weight determines which operators have a gradient.
            each = max(_certain_gradients(kernel, kind, each), graphs.count_of_layer(kind, layers)[operator])
        total += each * len(layers)
    return total


def _grouped_products(kind: _Kind) -> int:
    """Counts the grouped products of a MoE layer: three forward, and one for each operand that needs a gradient."""
    gate, up, down = (f"mlp.experts.{name}_proj.weight" in kind.trained for name in ("gate", "up", "down"))
    rows = kind.needs_input_gradient or _trains(kind, "self_attn.", "input_layernorm.", "post_attention_layernorm.")
    return 3 + 2 * rows + (rows or gate or up) + gate + up + down


def _certain_gradients(kernel: str, kind: _Kind, each: int) -> int:
    """Returns the number of gradients that the trained weights of a layer need in any case."""
    through_scores = _trains(kind, "self_attn.q_", "self_attn.k", "self_attn.v_", "input_layernorm.")
    through_mlp = _trains(kind, "self_attn.", "input_layernorm.", "post_attention_layernorm.")
    return {"attention": each * through_scores, "swiglu": each * through_mlp}.get(kernel, 0)


def _trains(kind: _Kind, *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in kind.trained)


def _in_layer(layer: LayerSpec, kernel: str) -> int:
    """Returns the calls of a kernel in a layer's forward pass; an MTP module includes the norm before its head."""
    has_shared = isinstance(layer.mlp, MoeSpec) and layer.mlp.shared_width > 0
    return {
        "rotary_embedding": 2 * layer.attention.is_rotated,
        "swiglu": 1 + has_shared,
        "attention": 1,
        _NORM: sum(parameter.role == "norm" for parameter in layer.parameters),
        "grouped_matmul": 3 * layer.is_moe,
        "token_permute": 1 * layer.is_moe,
    }[kernel]


def _limits(config: Config, libraries: bool) -> Iterator[str]:
    yield (
        f"one layer of each kind was built, with weights of full size and {_ROWS} x {_TOKENS} tokens; counts are for"
        " the whole model, one micro-batch and one device"
    )
    yield "types, shapes and gradients are MindSpore's own; numbers, speed and memory are not looked at"
    if any(recomputed_parts(config)):
        yield "recomputation runs forward operators again: they are counted once"
    if libraries:
        yield (
            "kernels are looked up in the Ascend libraries of the installed MindSpore; operators handed to CANN run on"
            " the AI cores or the slower AI CPUs, as the CANN on the machine decides"
        )
    else:
        yield "the installed MindSpore brings no Ascend libraries: which operators have kernels is not known"
    yield "the optimizer, the clipping and the loss scale run outside this graph, operator by operator"


def audit_dict(audit: Audit) -> dict[str, Any]:
    """Returns the audit for `--json`."""
    return {**asdict(audit), "missing": audit.missing}


def audit_sections(audit: Audit) -> list[tuple[str, Table]]:
    """Returns title, header and rows of each table that `plan` prints."""
    fused: Table = [("operator", "kernel", "asked for", "found", "dtypes of its inputs", "")]
    fused += [
        (each.operator, each.kernel, str(each.asked), str(each.found), "; ".join(each.dtypes), each.note)
        for each in audit.fused
    ]
    computed_by = {CANN: "handed to CANN", NONE: "NO KERNEL FOUND", HOST: "RUNS ON THE HOST"}
    others: Table = [("operator", "count", "computed by")]
    others += [(each.operator, str(each.count), computed_by[each.source]) for each in audit.others]
    if audit.others:
        others.append((f"all other {audit.checked - len(audit.others)}", "", "kernels of MindSpore"))
    verdict = "every fused operator asked for is there"
    if audit.missing:
        verdict = f"missing: {', '.join(audit.missing)}"
    sections: list[tuple[str, Table]] = [
        ("Layers", [("kind", "number"), *((name, str(number)) for name, number in audit.layers)]),
        ("Fused operators", fused),
        ("Other operators", others),
    ]
    if audit.semi_auto:
        sections.append(("Semi-automatic parallelism, built and not compiled", [("", ""), *audit.semi_auto]))
    sections.append(("What this shows", [("",), *((text,) for text in audit.limits)]))
    return [*sections, ("Result", [("",), (verdict,)])]
