"""Counts the fused operators in the graphs of a training step and reports their dtypes and who computes the others.

The layers of a model are of a few kinds. For each kind a training step with one such layer is built, and a step without
layers: the difference, times the number of such layers, is what they add to the step of the model. Weights have the
sizes of the configuration; the micro-batch is small, because nothing that is counted depends on its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.audit.graph import Node, export_step, trained_names
from trainer.config.checks.parallel import is_semi_auto, resolve_for_job
from trainer.config.device_defaults import apply_device_defaults, device_defaults
from trainer.device.settings import device_calls, jit_options
from trainer.errors import UserError
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

_ROWS = 2
_TOKENS = 64
_NORM = "rms_norm"
# The operators of each kernel in a graph: forward, backward. The gradient of a grouped product is grouped products.
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
    """How often the configuration asks for it, gradients of trained weights included."""
    found: int
    dtypes: tuple[str, ...]
    """Each combination of input dtypes that occurs."""
    note: str
    """Which input its documentation does not allow, or why it is missing."""

    @property
    def missing(self) -> bool:
        return self.found < self.asked


@dataclass(frozen=True)
class Other:
    """Another operator of the graph without a kernel of MindSpore's own for Ascend; `source` says who computes it."""

    operator: str
    count: int
    source: str


@dataclass(frozen=True)
class Audit:
    """What the audit found.

    Attributes:
        layers: Name and number of each kind of layer.
        fused: Every operator that some switch may ask for.
        others: Operators without a kernel of MindSpore's own for Ascend, by who computes them.
        checked: The number of different operators that were looked up.
        semi_auto: Names and values of what semi-automatic mode is given; empty in explicit mode.
        limits: What this audit does not show.
    """

    layers: tuple[tuple[str, int], ...]
    fused: tuple[Fused, ...]
    others: tuple[Other, ...]
    checked: int
    semi_auto: tuple[tuple[str, str], ...]
    limits: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(fused.operator for fused in self.fused if fused.missing)


class _Kind(NamedTuple):
    """A kind of layer: all layers of a kind are built alike."""

    has_experts: bool
    is_module: bool
    reached: bool
    """Whether something before it is trained, so that a gradient flows to its input."""
    trained: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def name(self) -> str:
        what = "dense"
        if self.has_experts:
            what = "experts"
        if not self.is_partly_frozen:
            frozen = ""
        else:
            frozen = ", frozen"
            if self.trained:
                frozen = ", partly frozen"
        if self.is_module:
            return f"multi-token prediction module, {what}{frozen}"
        return f"{what}{frozen}"

    @property
    def is_partly_frozen(self) -> bool:
        return len(self.trained) < sum(not is_buffer(name) for name in self.weights)


def audit_ascend(config: Config, world: World = SINGLE_PROCESS) -> Audit:
    """Builds the graphs of a step on Ascend, whatever the device of the configuration, and counts their operators.

    Semi-automatic mode needs the size of `world`.

    Raises:
        UserError: The model is no decoder, `freeze` names no weight, an Ascend would refuse a key of `context`, or
            semi-automatic mode cannot do what is asked.
    """
    if config.classifier is not None:
        key = "model.arch.type"
        kind = config.model.arch.type
        fix = "audit a configuration of a language model"
        raise UserError("has no fused operators", where=config.source.where(key), key=key, value=kind, fix=fix)
    config = resolve_for_job(config, world)
    device_default_keys = device_defaults(config, "Ascend")
    config = apply_device_defaults(config, "Ascend")
    for checked in (device_calls, jit_options):
        checked(config, "Ascend")  # a run there refuses what these refuse
    settings = config.decoder
    precision = resolve_precision(settings, config.amp_level, "Ascend")
    choices = select_kernels(settings, "Ascend", precision)
    kernels = load_kernels(choices, precision)
    trained = trained_names(settings, frozen_names(config))
    spec = model_spec(settings)
    kinds = _kinds(spec, trained)
    graphs = _Graphs(settings, kernels, trained)
    total = graphs.operators(kinds)
    fused = tuple(_fused(spec, choices, device_default_keys, kinds, total, graphs))
    counts = Counter({node: count for node, count in total.items() if node not in SUPPORT})
    sources = kernel_sources(total)
    return Audit(
        tuple((kind.name, len(layers)) for kind, layers in kinds.items()),
        fused,
        () if sources is None else tuple(_others(counts, sources)),
        len(total),
        tuple(semi_auto_rows(config, world)) if is_semi_auto(config) else (),
        tuple(_limits(config, sources is not None)),
    )


def _kinds(spec: ModelSpec, trained: frozenset[str]) -> dict[_Kind, list[int]]:
    names = spec.parameters()
    first = spec.first_reached(trained)
    kinds: dict[_Kind, list[int]] = {}
    for layer in range(len(spec.layers)):
        prefix = layer_prefix(layer)
        own = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        learns = tuple(name for name in own if prefix + name in trained)
        kind = _Kind(spec.layers[layer].is_moe, layer in spec.module_layers, first < layer, learns, own)
        kinds.setdefault(kind, []).append(layer)
    return kinds


class _Graphs:
    """Operators of exported steps, each exported once."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, trained: frozenset[str]) -> None:
        self.settings = settings
        self.kernels = kernels
        self.trained = trained
        self.known: dict[tuple[tuple[int, ...], bool], list[Node]] = {}

    def export(self, layers: Sequence[int], reached: bool) -> list[Node]:
        """A step with these layers; `reached`: a gradient flows to the input of the first."""
        key = tuple(layers), reached
        if key not in self.known:
            if reached:
                trained = self.trained | {EMBEDDING}
            else:
                trained = self.trained
            self.known[key] = export_step(self.settings, self.kernels, layers, trained, _ROWS, _TOKENS)
        return self.known[key]

    def count(self, layers: Sequence[int], reached: bool) -> Counter[str]:
        return Counter(node.operator for node in self.export(layers, reached))

    def of_kind(self, kind: _Kind, layers: Sequence[int]) -> Counter[str]:
        """What one layer of this kind adds to a step."""
        added = self.count(layers[:1], kind.reached)
        added.subtract(self.count([], kind.reached or bool(kind.trained)))
        return added

    def operators(self, kinds: dict[_Kind, list[int]]) -> Counter[str]:
        """The number of each operator in a step of the whole model."""
        total = Counter(self.count([], any(kind.reached or kind.trained for kind in kinds)))
        for kind, layers in kinds.items():
            for operator, count in self.of_kind(kind, layers).items():
                total[operator] += count * len(layers)
        return +total


def _fused(
    spec: ModelSpec,
    choices: Sequence[KernelChoice],
    device_default_keys: Collection[str],
    kinds: dict[_Kind, list[int]],
    total: Counter[str],
    graphs: _Graphs,
) -> Iterator[Fused]:
    for choice in choices:
        # A default that the model does not allow is not missing.
        by_default = choice.asked.split(":")[0] in device_default_keys
        wanted = choice.fused or not (by_default or choice.asked.endswith("False"))
        for operator in _OPERATORS[choice.kernel]:
            asked = 0
            if wanted:
                asked = _asked(spec, operator, choice.kernel, kinds, graphs)
            nodes = (node for graph in graphs.known.values() for node in graph if node.operator == operator)
            inputs = sorted({node.inputs for node in nodes})
            notes = [dtype_problem(operator, dtypes) for dtypes in inputs]
            if total[operator] < asked:
                notes.append(f"missing: {choice.why}" if not choice.fused else "missing in the graph")
            elif by_default and not choice.fused:
                notes.append(choice.why)
            note = "; ".join(dict.fromkeys(note for note in notes if note))
            shown = tuple(", ".join(dtypes) for dtypes in inputs)
            yield Fused(operator, choice.kernel, asked, total[operator], shown, note)


def _asked(
    spec: ModelSpec, operator: str, kernel: str, kinds: dict[_Kind, list[int]], graphs: _Graphs
) -> int:
    """How often a step of the whole model has an operator if every kernel is the one that was asked for."""
    is_gradient = operator.endswith("Grad")
    final = 0
    if kernel == _NORM:
        final = 1
    if not is_gradient:
        base = []
        total = final
    else:
        base = graphs.count([], any(kind.reached or kind.trained for kind in kinds))
        total = min(final, base[operator])
    for kind, layers in kinds.items():
        each = _in_layer(spec.layers[layers[0]], kernel)
        if kernel == "grouped_matmul" and each:
            each = _grouped_products(kind)
        elif kind.is_module and kernel == _NORM and is_gradient:
            # The norm of the stream before the module is the main head's, which a graph computes once, but each has
            # its own gradient.
            each += 1
        if is_gradient and not kind.reached:
            # In the first layer with a trained weight it depends on the weight which operators have a gradient.
            each = max(_sure_gradients(kernel, kind, each), graphs.of_kind(kind, layers)[operator])
        total += each * len(layers)
    return total


def _grouped_products(kind: _Kind) -> int:
    """In a layer with experts: three forwards, and one for each operand whose gradient is needed."""
    gate, up, down = (f"mlp.experts.{name}_proj.weight" in kind.trained for name in ("gate", "up", "down"))
    rows = kind.reached or _trains(kind, "self_attn.", "input_layernorm.", "post_attention_layernorm.")
    return 3 + 2 * rows + (rows or gate or up) + gate + up + down


def _sure_gradients(kernel: str, kind: _Kind, each: int) -> int:
    """Gradients that the trained weights of a layer need, whatever else is frozen."""
    through_scores = _trains(kind, "self_attn.q_", "self_attn.k", "self_attn.v_", "input_layernorm.")
    through_mlp = _trains(kind, "self_attn.", "input_layernorm.", "post_attention_layernorm.")
    return {"attention": each * through_scores, "swiglu": each * through_mlp}.get(kernel, 0)


def _trains(kind: _Kind, *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in kind.trained)


def _in_layer(layer: LayerSpec, kernel: str) -> int:
    """Calls of a kernel in the forward pass of a layer, or of a module with the norm before its head."""
    has_shared = isinstance(layer.mlp, MoeSpec) and layer.mlp.shared_width > 0
    return {
        "rotary_embedding": 2,
        "swiglu": 1 + has_shared,
        "attention": 1,
        _NORM: sum(parameter.role == "norm" for parameter in layer.parameters),
        "grouped_matmul": 3 * layer.is_moe,
        "token_permute": 1 * layer.is_moe,
    }[kernel]


def _others(counts: Counter[str], sources: dict[str, str]) -> list[Other]:
    found = [Other(operator, count, sources[operator]) for operator, count in counts.items()]
    doubtful = [other for other in found if other.source in (HOST, NONE, CANN)]
    return sorted(doubtful, key=lambda other: (other.source, other.operator))


def _limits(config: Config, libraries: bool) -> Iterator[str]:
    yield (
        f"one layer of each kind was built, with weights of full size and {_ROWS} x {_TOKENS} tokens; counts are for"
        " the whole model, one micro-batch and one device"
    )
    yield "types, shapes and gradients are MindSpore's own; numbers, speed and memory are not looked at"
    if config.recompute_config.recompute or config.recompute_config.select_recompute:
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
    """The audit for `--json`."""
    return {**asdict(audit), "missing": audit.missing}


def audit_sections(audit: Audit) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Title, header and rows of each table that `plan` prints."""
    fused = [("operator", "kernel", "asked for", "found", "dtypes of its inputs", "")]
    fused += [
        (each.operator, each.kernel, str(each.asked), str(each.found), "; ".join(each.dtypes), each.note)
        for each in audit.fused
    ]
    named = {CANN: "handed to CANN", NONE: "NO KERNEL FOUND", HOST: "RUNS ON THE HOST"}
    others = [("operator", "count", "computed by")]
    others += [(each.operator, str(each.count), named[each.source]) for each in audit.others]
    others += [(f"all other {audit.checked - len(audit.others)}", "", "kernels of MindSpore")] if audit.others else []
    verdict = "every fused operator asked for is there"
    if audit.missing:
        verdict = f"missing: {', '.join(audit.missing)}"
    sections = [
        ("Layers", [("kind", "number"), *((name, str(number)) for name, number in audit.layers)]),
        ("Fused operators", fused),
        ("Other operators", others),
    ]
    if audit.semi_auto:
        sections.append(("Semi-automatic parallelism, built and not compiled", [("", ""), *audit.semi_auto]))
    sections.append(("What this shows", [("",), *((text,) for text in audit.limits)]))
    return [*sections, ("Result", [("",), (verdict,)])]
