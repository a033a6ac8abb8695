"""What a rank of test_tensor_parallel.py trains: a tiny model whose matrices, experts or sequences the ranks share.

What is guarded is how a model is divided, so a model has one layer where that shows it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from mindspore import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "parity"), str(Path(__file__).resolve().parents[1])]

from golden_files import load_model_case, model_case_names  # noqa: E402
from pipeline_cases import LATENT, world_of_group  # noqa: E402
from tiny_trainer import TOKENS, config_of, make_batch  # noqa: E402

from trainer.config import Config, parse_config  # noqa: E402
from trainer.models.spec import saved as saved_arrays  # noqa: E402
from trainer.models.spec.shapes import all_shapes  # noqa: E402
from trainer.ops.routing import SharedTokens  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.parallel.communicator import Communicator  # noqa: E402
from trainer.parallel.layout import ModelLayout  # noqa: E402
from trainer.parallel.mesh import Mesh  # noqa: E402
from trainer.parallel.tensor import RankModelShard  # noqa: E402
from trainer.run.session import open_training  # noqa: E402
from trainer.step.evaluate import evaluate  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

VOCABULARY = 21  # parts of unequal size
ROWS = 3  # sequences: two ranks that share their tokens share one of the sequences
ACCUMULATING = 2  # steps of two micro-batches; the later ones have one
# The head of ranks takes some rows at a time: two shards of the vocabulary differ in how many would be best.
HEAD_IN_BLOCKS = mock.patch.multiple(saved_arrays, _LOGITS=110, _FEWEST_ROWS=1)
COUNTED_TWICE, NOT_COUNTED = "counted twice", "tokens of other ranks not counted"
EVERY_KIND = {"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True, "use_qk_norm": True,
              "post_self_attn_layernorm": True, "post_mlp_layernorm": True}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
LORA = {"pet_config": {"target_modules": ".*", "lora_rank": 3, "lora_dropout": 0.2}}
CLIPPED = {"runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 1.0, "local_norm": True}}
# AdamW divides a gradient by its size: one that is nothing but rounding would move a weight as far as any other.
SMOOTH = {"optimizer": {"eps": 1e-5}}
CASES: dict[str, dict[str, Any]] = {
    "dense": {
        "model": EVERY_KIND | DROPOUT | {"tie_word_embeddings": True, "embedding_size": 12},
        "recompute_config": {"recompute": True}, **CLIPPED, **SMOOTH,
    },
    "one key head, adapters": {"model": LORA | DROPOUT | {"n_kv_heads": 1, "use_qk_norm": True}},
    "latent attention, adapters": {"model": LATENT | LORA | DROPOUT},
    "Mixtral, shared gate, frozen": {
        "model": {"moe_config": {
            "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "moe_shared_expert_intermediate_size": 20, "use_shared_expert_gating": True, "z_loss_factor": 0.1,
            "aux_loss_factor": 0.3, "capacity_factor": 1.0, "norm_topk_prob": False}},
        "freeze": {"include": ["*q_proj*", "model.norm.weight"]}, **CLIPPED, **SMOOTH,
    },
    "DeepSeek": {  # a dense layer, and experts in that of multi-token prediction
        "model": LATENT | DROPOUT | {"mtp_depth": 1, "moe_config": {
            "expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 8, "shared_expert_num": 2,
            "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.01,
            "n_group": 4, "topk_group": 2, "aux_loss_factor": 0.3, "first_k_dense_replace": 1,
            "moe_token_dispatcher_type": "allgather"}}, **CLIPPED, **SMOOTH,
    },
    "experts, load of the step": {
        "model": {"sliding_window": 5, "moe_config": {
            "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "capacity_factor": 1.2, "enable_sdrop": True, "aux_loss_factor": 0.3,
            "moe_router_load_balancing_type": "gbs_aux_loss"}} | DROPOUT,
        "recompute_config": {"recompute": True}, **CLIPPED, **SMOOTH,
    },
}  # fmt: skip
CASES["biases"] = {
    "model": {"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True, "use_qk_norm": True},
    **CLIPPED, **SMOOTH,
}  # fmt: skip
CASES["one key head, recomputed"] = {
    "model": {"n_kv_heads": 1, "sliding_window": 5, "mtp_depth": 1}, "recompute_config": {"recompute": True},
    **CLIPPED, **SMOOTH,
}  # fmt: skip
CASES["windows, documents, dropout"] = {
    "model": {"sliding_window": 5, "n_kv_heads": 2, "attention_sinks": True, "attn_logit_softcapping": 2.0,
              "final_logit_softcapping": 3.0} | DROPOUT,
    "recompute_config": {"recompute": True}, **SMOOTH,
}  # fmt: skip
CASES["experts with biases"] = {
    "model": {"attention_sinks": True, "moe_config": {
        "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "moe_mlp_has_bias": True,
        "moe_router_has_bias": True, "swiglu_limit": 0.5, "aux_loss_factor": 0.3}}, **CLIPPED, **SMOOTH,
}  # fmt: skip
CASES["bfloat16"] = {"model": EVERY_KIND | {"compute_dtype": "bfloat16"}, **SMOOTH}
CASES["float16"] = {"model": EVERY_KIND | DROPOUT | {"compute_dtype": "float16"}, **SMOOTH}
CASES["bfloat16, experts"] = {
    "model": LATENT | {"compute_dtype": "bfloat16", "moe_config": {
        "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1}}, **SMOOTH,
}  # fmt: skip
FAMILIES = [name for name in model_case_names("family") if not name.startswith("family_olmo")]
"""Those that tensor-parallel ranks can share: OLMo has norms over all heads."""
CASES["DeepSeek, recomputed"] = CASES["DeepSeek"] | {"recompute_config": {"recompute": True}}


class Trained(NamedTuple):
    """What a training has computed; weights and norms by name."""

    losses: list[float]
    norms: list[float]
    local_norms: list[Mapping[str, float]]  # of each step
    evaluated: float
    weights: dict[str, np.ndarray]
    saved: dict[str, np.ndarray]  # whole weights and optimizer state
    others: list[list[float]]  # auxiliary losses of each step
    routers: np.ndarray  # drop rates, imbalance of the load and entropy of each step


class Layout(NamedTuple):
    """How ranks divide a model: degrees, whether tensor-parallel ones share the residual stream by rows, and how many
    context-parallel ones exchange heads for tokens."""

    tensor: int = 1
    rows: bool = False
    context: int = 1
    ulysses: int = 1
    experts: int = 1

    def data(self, ranks: int) -> int:
        return ranks // self.tensor // self.context

    def keys(self, ranks: int) -> dict[str, Any]:
        """Returns the keys of parallel_config for so many ranks."""
        algorithm: dict[str, Any] = {"context_parallel_algo": "colossalai_cp"}
        if self.ulysses == self.context > 1:
            algorithm = {"context_parallel_algo": "ulysses_cp"}
        elif self.ulysses > 1:
            algorithm = {"context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": self.ulysses}
        return algorithm | {
            "data_parallel": self.data(ranks), "model_parallel": self.tensor, "use_seq_parallel": self.rows,
            "context_parallel": self.context, "expert_parallel": self.experts,
        }  # fmt: skip


ALONE = Layout()


def config(name: str, layout: Layout = ALONE, ranks: int = 1, layers: int = 1) -> Config:
    """Returns a configuration; one rank recomputes nothing, which would take longer and change no number."""
    if name in FAMILIES:
        return family_config(name, layout, ranks)
    sections = dict(CASES[name])
    model = {"vocab_size": VOCABULARY, "num_layers": layers} | sections.pop("model")
    if ranks > 1:
        sections |= {"use_parallel": True, "parallel_config": layout.keys(ranks)}
    else:
        sections.pop("recompute_config", None)
    return config_of(**sections, model=model)


def family_config(name: str, layout: Layout, ranks: int) -> Config:
    """Returns a configuration with the config.json of a golden model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(load_model_case(name).metadata["config_as_saved"]))
        sections = {
            **SMOOTH, "pretrained_model_dir": folder, "model": {"model_config": {"seq_length": TOKENS}},
            "use_parallel": ranks > 1, "parallel_config": layout.keys(ranks),
        }  # fmt: skip
        return parse_config(name, json.dumps(sections))


def every_parted(world: ProcessGroup, suites: list[list[Any]]) -> list[tuple[dict[str, Trained], dict[str, Trained]]]:
    """Trains on a rank of each suite, whose arguments of `parted` are given."""
    return [parted(world, *suite) for suite in suites]


def parted(
    world: ProcessGroup, layout: dict[str, Any], cases: dict[str, int], mistakes: dict[str, list[str]]
) -> tuple[dict[str, Trained], dict[str, Trained]]:
    """Trainings of so many steps by ranks; then a step with each mistake, by the mistake."""
    how = Layout(**layout)
    data = how.data(world.size)
    with HEAD_IN_BLOCKS:
        right = {name: trained(name, {steps}, data, world, how)[steps] for name, steps in cases.items()}
        wrong = {}
        for name, every in mistakes.items():
            for mistake in every:
                with mistaken(mistake):
                    wrong[mistake] = trained(name, {1}, data, world, how)[1]
    return right, wrong


def mistaken(mistake: str) -> contextlib.AbstractContextManager:
    """Forgets the sum of the gradients of a parameter, or counts what all ranks hold on each of them, or leaves out the
    tokens of other ranks from the load of experts."""
    if mistake == COUNTED_TWICE:
        return mock.patch.object(Communicator, "norm_weights", lambda self, names, scattered=(): np.ones(len(names)))
    if mistake == NOT_COUNTED:
        return mock.patch.object(SharedTokens, "sum", lambda self, own: own)
    groups_of = Communicator.groups_of

    def without(self: Communicator, name: str) -> dict[str, ProcessGroup]:
        return {kind: group for kind, group in groups_of(self, name).items() if name != mistake or kind == "dp_cp"}

    return mock.patch.object(Communicator, "groups_of", without)


def whole(world: ProcessGroup, wanted: list[tuple[str, int, list[int]]]) -> list[dict[int, Trained]]:
    """Trainings by one rank: a case, the data-parallel ranks whose sequences are its micro-batches, and after which
    steps to tell what there is."""
    return [trained(name, stops, data) for name, data, stops in wanted]


def trained(
    name: str, stops: Collection[int], data: int, group: ProcessGroup | None = None, layout: Layout = ALONE
) -> dict[int, Trained]:
    """Returns a training by the ranks of `group`, or by one with the sequences of `data` data-parallel ranks; as it is
    after each of these numbers of steps."""
    ranks = 1 if group is None else group.size
    one = config(name, layout, ranks)
    step = open_training(one, lambda update: 0.004, None, world_of_group(group), "CPU", group)
    spread(step.model, one.decoder, step.model.shard)
    results, found = [], {}
    for number in range(max(stops)):
        # The second micro-batch of a window has fewer labels.
        window = [[make_batch(10 * number + 2 * rank + micro, 2 * TOKENS - 5 * micro, ROWS)
                   for micro in range(2 if number < ACCUMULATING else 1)] for rank in range(data)]  # fmt: skip
        results.append(step(sum(window, []) if group is None else window[step.communicator.data_rank]))
        if number + 1 in stops:
            found[number + 1] = told(step, results, one, group)
    return found


def told(step: TrainStep, results: Sequence[Any], one: Config, group: ProcessGroup | None) -> Trained:
    # Ranks that share experts evaluate equally many batches; those of all but the first have no label.
    batches = [make_batch(99, 9 if step.communicator.data_rank == 0 else 0, ROWS)]
    evaluated = evaluate(step.model, step.build_inputs, batches, lambda: False, step.communicator).loss
    routed = [result.router_rates for result in results if result.router_rates is not None]
    routers = np.array([[one.drop_rate, one.load_imbalance, one.entropy] for one in routed])
    others = [list(result.losses.values()) for result in results]
    weights = {name: parameter.asnumpy().copy() for name, parameter in step.model.parameters_by_name.items()}
    losses, norms = ([getattr(result, field) for result in results] for field in ("loss", "global_norm"))
    local_norms = [dict(result.local_norms or {}) for result in results]
    kept = saved(step)
    if group is not None:  # what is saved can be loaded again, by all ranks
        step.load_optimizer({key: array.reshape(-1) for key, array in kept.items() if key not in weights}, len(results))
        again = saved(step)
        assert all(np.array_equal(array, again[key]) for key, array in kept.items())
    return Trained(losses, norms, local_norms, evaluated, weights, kept, others, routers)


def saved(step: TrainStep) -> dict[str, np.ndarray]:
    """Joins what all ranks write to a checkpoint."""
    own, whole_arrays = step.state_dict_shard(), {}
    pieces = {key: (each.spec, each.array.copy()) for key, each in (own.weights | own.optimizer).items()}
    for of_rank in map(pickle.loads, step.communicator.gather_bytes(pickle.dumps(pieces))):
        for key, (part, array) in of_rank.items():
            whole_arrays.setdefault(key, np.full(part.global_shape, np.nan, np.float32))[part.shard.slices] = array
    return whole_arrays


def spread(model: Any, settings: Any, shard: RankModelShard | None) -> None:
    """Values of their own for norms, biases and the adapters' B, which begin as ones and zeros."""
    draw = np.random.default_rng(4)
    for name, shape in all_shapes(settings).items():
        value = draw.normal(0, 0.2, shape).astype(np.float32) + np.float32(name.endswith("norm.weight"))
        if (len(shape) == 1 or "lora_B" in name) and name in model.parameters_by_name:
            own = value if shard is None else shard.shard_spec(name).shard.of(value)
            model.parameters_by_name[name].set_data(Tensor(np.ascontiguousarray(own)))
    model.compute_weights.refresh()


def assembled(layout: ModelLayout, ranks: list[Trained]) -> dict[str, np.ndarray]:
    """Joins the shards of the ranks to unsharded weights; ranks with the same shard agree."""
    found = {}
    degrees = layout.degrees
    for name, one in layout.parameters.items():
        full_shard_spec = np.full(one.shape, np.nan, np.float32)
        for rank, result in enumerate(ranks):
            where = Mesh(degrees).coordinate_of(rank)
            place = layout.shard(name, where).slices
            there = full_shard_spec[place]
            assert np.isnan(there).all() or np.array_equal(there, result.weights[name]), (name, rank)
            full_shard_spec[place] = result.weights[name]
        found[name] = full_shard_spec
    return found
