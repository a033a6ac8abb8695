"""What a rank of test_tensor_parallel.py trains: a tiny model whose matrices or experts the ranks share."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import TOKENS, config_of, make_batch  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.data.batches.context import SequencePart  # noqa: E402
from trainer.models.shapes import all_shapes  # noqa: E402
from trainer.ops.context import over_context  # noqa: E402
from trainer.ops.kernel_set import load_kernels  # noqa: E402
from trainer.ops.precision import resolve_precision  # noqa: E402
from trainer.ops.routing import SharedTokens  # noqa: E402
from trainer.ops.select import select_kernels  # noqa: E402
from trainer.optim.freeze import trained_shapes  # noqa: E402
from trainer.optim.groups import parameter_groups  # noqa: E402
from trainer.optim.optimizer import build_optimizer  # noqa: E402
from trainer.parallel.collectives import Group  # noqa: E402
from trainer.parallel.communicator import ModelParallel, SingleProcess, model_parallel  # noqa: E402
from trainer.parallel.layout import ModelLayout, model_layout  # noqa: E402
from trainer.parallel.mesh import Degrees, Mesh  # noqa: E402
from trainer.parallel.tensor import ModelShard, TensorParallel  # noqa: E402
from trainer.run.session import build_model, check_same_weights  # noqa: E402
from trainer.step.evaluate import evaluate  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

VOCABULARY = 21  # parts of unequal size
ROWS = 3  # sequences: two ranks that share their tokens share one of the sequences
COUNTED_TWICE, NOT_COUNTED = "counted twice", "tokens of other ranks not counted"
EVERY_KIND = {"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True, "use_qk_norm": True,
              "post_self_attn_layernorm": True, "post_mlp_layernorm": True}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
LORA = {"pet_config": {"target_modules": ".*", "lora_rank": 3, "lora_dropout": 0.2}}
LATENT = {"architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 10, "kv_lora_rank": 6,
          "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
CLIPPED = {"runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 1.0, "local_norm": True}}
SMOOTH = {"optimizer": {"eps": 1e-5}}  # AdamW's update for gradients that are nothing but rounding
IN_TURN = {"context": {"mode": 1}}  # operator by operator: nothing is compiled
CASES: dict[str, dict[str, Any]] = {
    "biases, norms, dropout, clipping": {"model": EVERY_KIND | DROPOUT, **CLIPPED},
    "one key head, adapters": {"model": LORA | DROPOUT | {"n_kv_heads": 1, "use_qk_norm": True}, **IN_TURN},
    "tied, mapped, recomputed": {
        "model": {"tie_word_embeddings": True, "embedding_size": 12} | DROPOUT,
        "recompute_config": {"recompute": True},
    },
    "multi-token prediction, frozen": {
        "model": {"mtp_depth": 1}, "freeze": {"include": ["*embed_tokens*", "*q_proj*"]}, **IN_TURN,
    },
    "latent attention, adapters": {"model": LATENT | LORA | DROPOUT, **IN_TURN},
    "capacity, shared gate": {
        "model": {"mtp_depth": 1, "moe_config": {
            "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "moe_shared_expert_intermediate_size": 20, "use_shared_expert_gating": True, "z_loss_factor": 0.1,
            "aux_loss_factor": 0.3, "capacity_factor": 1.0, "norm_topk_prob": False}} | DROPOUT,
        **IN_TURN, **CLIPPED, **SMOOTH,
    },
    "latent attention, sigmoid, bias": {
        "model": LATENT | {"mtp_depth": 1, "moe_config": {
            "expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 8, "shared_expert_num": 2,
            "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.01,
            "n_group": 4, "topk_group": 2, "aux_loss_factor": 0.3, "first_k_dense_replace": 1,
            "moe_token_dispatcher_type": "allgather"}},
        "recompute_config": {"recompute": True}, **IN_TURN, **CLIPPED, **SMOOTH,
    },
    "compiled experts, load of the step": {
        "model": {"num_layers": 1, "sliding_window": 5, "moe_config": {
            "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "capacity_factor": 1.2, "enable_sdrop": True, "aux_loss_factor": 0.3,
            "moe_router_load_balancing_type": "gbs_aux_loss"}} | DROPOUT,
        "recompute_config": {"recompute": True}, **CLIPPED, **SMOOTH,
    },
    "experts": {
        "model": {"mtp_depth": 1, "moe_config": {
            "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "aux_loss_factor": 0.3, "capacity_factor": 1.5, "first_k_dense_replace": 1}},
        "recompute_config": {"recompute": True}, **IN_TURN, **CLIPPED,
    },
}  # fmt: skip


class Trained(NamedTuple):
    """What a training has computed; weights and norms by name."""

    losses: list[float]
    norms: list[float]
    local_norms: dict[str, float]
    evaluated: float
    weights: dict[str, np.ndarray]
    saved: dict[str, np.ndarray]  # whole weights and optimizer state
    others: list[list[float]]  # auxiliary losses of each step
    routers: np.ndarray  # drop rates, imbalance of the load and entropy of each step


def config(name: str, in_turn: bool = False) -> Config:
    sections = CASES[name] | (IN_TURN if in_turn else {})
    model = {"vocab_size": VOCABULARY} | sections["model"]
    return config_of(**({"context": {"mode": 0}} | sections | {"model": model}))


class Layout(NamedTuple):
    """How ranks divide a model: degrees, whether tensor-parallel ones share the residual stream by rows, and whether
    context-parallel ones are a ring."""

    tensor: int = 1
    rows: bool = False
    context: int = 1
    in_ring: bool = True
    experts: int = 1

    def degrees(self, ranks: int) -> Degrees:
        return Degrees(1, self.data(ranks), self.context, self.tensor, self.experts)

    def data(self, ranks: int) -> int:
        return ranks // self.tensor // self.context


def parted(
    world: Group, names: list[str], layout: dict, steps: int, mistakes: Sequence[str] = ()
) -> dict[str, Trained]:
    """Trainings by ranks, then one of the first case with each mistake, under its name."""
    how = Layout(**layout)
    found = {name: trained(name, steps, world, how) for name in names}
    return found | {mistake: trained(names[0], steps, world, how, mistake=mistake) for mistake in mistakes}


def make_mistake(communicator: ModelParallel, mistake: str) -> None:
    """Forgets the sum of the gradients of a parameter, or counts what all ranks hold on each of them, or leaves out the
    tokens of other ranks from the load of experts: that for the rest of the process."""
    if mistake == COUNTED_TWICE:
        communicator.counted = lambda names, scattered: np.ones(len(names))
    elif mistake == NOT_COUNTED:
        SharedTokens.sum = lambda shared, own: own
    elif mistake:
        parameters = dict(communicator.layout.parameters)
        one = parameters[mistake]
        parameters[mistake] = one._replace(sums=tuple(kind for kind in one.sums if kind == "dp_cp"))
        communicator.layout = replace(communicator.layout, parameters=parameters)


def whole(world: Group, names: list[str], data: int, steps: int) -> dict[str, Trained]:
    """The same trainings by one rank, with the sequences of `data` ranks as micro-batches."""
    return {name: trained(name, steps, None, Layout(), data) for name in names}


def trained(
    name: str, steps: int, world: Group | None, layout: Layout, data: int = 1, mistake: str = ""
) -> Trained:
    """A training by the ranks of `world`; None: by one rank with the sequences of `data` data-parallel ranks."""
    one = config(name, in_turn=world is None)  # to compile what one rank trains costs most of its time
    settings, communicator, shard = one.decoder, SingleProcess(), None
    kernels = load_kernels(select_kernels(settings, "CPU"), resolve_precision(settings, None, "CPU"))
    if world is not None:
        parts = model_layout(settings, layout.degrees(world.size), sequence_parallel=layout.rows)
        communicator = model_parallel(world, settings, parts)
        make_mistake(communicator, mistake)
        groups, where, data = communicator.groups, communicator.where, layout.data(world.size)
        tensor = TensorParallel(groups.tp, layout.rows) if layout.tensor > 1 else None
        tokens = SequencePart(where.context, layout.context, layout.in_ring)
        shard = ModelShard(communicator.layout, where, tensor, groups.ep, tokens, groups.tp_cp)
        if layout.context > 1:
            kernels = over_context(kernels, groups.cp, tokens, one.context.mode == 0)
    model, build_inputs = build_model(one, kernels, shard=shard)
    spread(model, settings, shard)
    check_same_weights(model, communicator)
    shapes = trained_shapes(one)
    groups = parameter_groups(shapes, one.optimizer.weight_decay, one.optimizer.type)
    weights = {name: model.parameters_by_name[name] for name in shapes}
    optimizer = build_optimizer(weights, groups, one.optimizer, compiled=False)
    step = TrainStep(model, optimizer, lambda update: 0.004, build_inputs, one.runner_wrapper, seed=one.seed,
                     communicator=communicator)  # fmt: skip
    results = []
    for number in range(steps):
        # A window of two micro-batches on every data-parallel rank; the last has fewer labels.
        window = [[make_batch(10 * number + 2 * rank + micro, 2 * TOKENS - 5 * micro, ROWS) for micro in range(2)]
                  for rank in range(data)]  # fmt: skip
        own = sum(window, []) if world is None else window[communicator.data_rank]
        results.append(step(own))
    # Ranks that share experts evaluate equally many batches; those of all but the first have no label.
    batches = [make_batch(99, 9 if world is None or communicator.data_rank == 0 else 0, ROWS)]
    found = evaluate(model, build_inputs, batches, lambda: False, communicator)
    routed = [result.router_rates for result in results if result.router_rates is not None]
    routers = np.array([[one.drop_rate, one.load_imbalance, one.entropy] for one in routed])
    others = [list(result.losses.values()) for result in results]
    last = {name: parameter.asnumpy() for name, parameter in model.parameters_by_name.items()}
    losses, norms = ([getattr(result, field) for result in results] for field in ("loss", "global_norm"))
    kept = saved(step)
    if world is not None:  # what is saved can be loaded again, by all ranks
        step.load_optimizer({key: array.reshape(-1) for key, array in kept.items() if key not in last}, steps)
        again = saved(step)
        assert all(np.array_equal(array, again[key]) for key, array in kept.items())
    return Trained(losses, norms, dict(results[-1].local_norms or {}), found.loss, last, kept, others, routers)


def saved(step: TrainStep) -> dict[str, np.ndarray]:
    """What all ranks write to a checkpoint, put together."""
    own, whole_arrays = step.to_save(), {}
    pieces = {key: (each.part, each.array.copy()) for key, each in (own.weights | own.optimizer).items()}
    for of_rank in map(pickle.loads, step.communicator.gather_bytes(pickle.dumps(pieces))):
        for key, (part, array) in of_rank.items():
            whole_arrays.setdefault(key, np.full(part.whole, np.nan, np.float32))[part.shard.slices] = array
    return whole_arrays


def spread(model: Any, settings: Any, shard: ModelShard | None) -> None:
    """Values of their own for norms, biases and the adapters' B, which begin as ones and zeros."""
    draw = np.random.default_rng(4)
    for name, shape in all_shapes(settings).items():
        value = draw.normal(0, 0.2, shape).astype(np.float32) + np.float32(name.endswith("norm.weight"))
        if (len(shape) == 1 or "lora_B" in name) and name in model.parameters_by_name:
            own = value if shard is None else shard.part(name).shard.of(value)
            model.parameters_by_name[name].set_data(Tensor(np.ascontiguousarray(own)))
    model.compute_weights.refresh()


def assembled(layout: ModelLayout, ranks: list[Trained]) -> dict[str, np.ndarray]:
    """Whole weights from the parts of the ranks, which agree where they hold the same."""
    found = {}
    degrees = layout.degrees
    for name, one in layout.parameters.items():
        whole_array = np.full(one.shape, np.nan, np.float32)
        for rank, result in enumerate(ranks):
            where = Mesh(degrees).coordinate_of(rank)
            place = layout.shard(name, where).slices
            there = whole_array[place]
            assert np.isnan(there).all() or np.array_equal(there, result.weights[name]), (name, rank)
            whole_array[place] = result.weights[name]
        found[name] = whole_array
    return found
