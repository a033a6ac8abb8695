"""What a rank of test_traffic.py trains, with a count of the bytes that it sends to other ranks."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from pipeline_cases import LATENT, world_of_group  # noqa: E402
from tiny_trainer import TOKENS, config_of, make_batch  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees  # noqa: E402
from trainer.models.spec import saved  # noqa: E402
from trainer.parallel import stage_link  # noqa: E402
from trainer.parallel.connections import Connections  # noqa: E402
from trainer.parallel.host_group import CpuGroup  # noqa: E402
from trainer.parallel.mesh import Mesh  # noqa: E402
from trainer.run.session import open_training  # noqa: E402

Sent = Counter[tuple[tuple[int, ...], str, str]]
"""(ranks of a group, collective, dtype) -> bytes sent to its other ranks."""
_AGAIN = {"recompute_config": {"recompute": [1]}}
_EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "first_k_dense_replace": 1}
_SHARED = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 1}}
_PAIRS = {"parallel_optimizer_threshold": 0, "optimizer_weight_shard_size": 2}
_SHARED_WEIGHTS = {"enable_parallel_optimizer": True,
                   "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "optimizer_level": "level3"}}
CASES: dict[str, dict[str, Any]] = {
    # degrees; further keys of parallel_config; the model's; other sections
    "rows": {"degrees": {"model_parallel": 2}, "more": {"use_seq_parallel": True},
             "model": {"n_kv_heads": 1, "use_qk_norm": True, "post_mlp_layernorm": True, "z_loss_weight": 0.1},
             "sections": {"recompute_config": {"recompute": [1], "select_recompute": {"attention": [0]}}}},
    "mapped, bfloat16": {"degrees": {"model_parallel": 2}, "more": {"use_seq_parallel": True},
                         "model": {"num_layers": 1, "embedding_size": 12, "compute_dtype": "bfloat16"},
                         "sections": {"freeze": {"include": ["*embed*"]}, "runner_config": {"batch_size": 3}}},
    "Muon": {"degrees": {"model_parallel": 2, "data_parallel": 2}, "model": {"n_kv_heads": 1, "num_layers": 1},
             "sections": {"optimizer": {"type": "Muon", "ns_steps": 1}, "parallel": _SHARED}},
    "side by side": {"degrees": {"model_parallel": 2}, "more": {"use_seq_parallel": True}, "sections": _AGAIN,
                     "model": {"parallel_attn": True, "normalization": "LayerNorm", "gated_linear_unit": False,
                               "hidden_act": "gelu_pytorch_tanh", "mlp_has_bias": True}},
    "latent": {"degrees": {"model_parallel": 2}, "model": LATENT | {"mtp_depth": 1},
               "sections": _AGAIN | {"runner_config": {"gradient_accumulation_steps": 2}}},
    "ulysses, shared state": {"degrees": {"context_parallel": 2}, "more": {"context_parallel_algo": "ulysses_cp"},
                              "model": {"n_kv_heads": 1}, "sections": _AGAIN | {"parallel": _SHARED}},
    "ring of pairs": {"degrees": {"context_parallel": 4}, "sections": _AGAIN,
                      "more": {"context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 2}},
    "shared weights": {"degrees": {"data_parallel": 2}, "model": {"mtp_depth": 2, "tie_word_embeddings": True},
                       "sections": _AGAIN | {"freeze": {"include": ["*embed*", "*layers.0*"]},
                                             "runner_config": {"gradient_accumulation_steps": 2},
                                             "parallel": _SHARED_WEIGHTS}},
    "latent vectors of pairs, bfloat16": {
        "degrees": {"context_parallel": 2, "model_parallel": 2}, "model": LATENT | {"compute_dtype": "bfloat16"},
        "sections": _AGAIN, "more": {"context_parallel_algo": "ulysses_cp", "use_seq_parallel": True},
    },
    "experts of a context group": {
        "degrees": {"context_parallel": 2, "model_parallel": 2, "expert_parallel": 4}, "sections": _AGAIN,
        "more": {"use_seq_parallel": True},
        "model": {"moe_config": _EXPERTS | {"moe_token_dispatcher_type": "allgather"}},
    },
    "experts of stages": {
        "degrees": {"pipeline_stage": 2, "model_parallel": 2, "expert_parallel": 2}, "more": {"micro_batch_num": 2},
        "model": {"tie_word_embeddings": True, "num_layers": 4, "pp_interleave_num": 2, "mtp_depth": 1,
                  "compute_dtype": "float16",
                  "moe_config": _EXPERTS | {"capacity_factor": 1.5, "drop_policy": "probability"}},
        "sections": _AGAIN | {"parallel": {"pipeline_config": {"pipeline_interleave": True}}},
    },
    "state of pairs": {"degrees": {"data_parallel": 4}, "model": {"num_layers": 1}, "sections": {
        "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": _PAIRS}}},
    "experts and gradients of pairs": {
        "degrees": {"data_parallel": 4, "expert_parallel": 2}, "model": {"moe_config": _EXPERTS}, "sections": {
            "runner_config": {"gradient_accumulation_steps": 2}, "parallel": {
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": _PAIRS | {"optimizer_level": "level2"}}},
    },
    "stages": {"degrees": {"pipeline_stage": 2, "data_parallel": 2}, "more": {"micro_batch_num": 2},
               "model": {"tie_word_embeddings": True, "num_layers": 4, "pp_interleave_num": 2,
                         "normalization": "LayerNorm"},
               "sections": {"parallel": {"pipeline_config": {"pipeline_interleave": True}} | _SHARED_WEIGHTS}},
}  # fmt: skip


# Some rows of the head come after the others.
HEAD_IN_BLOCKS = mock.patch.multiple(saved, _LOGITS=100, _FEWEST_ROWS=1)


class CountedConnections:
    """Connections that count what is sent for the collective at hand."""

    def __init__(self, connections: Connections, sent: Sent) -> None:
        self.connections, self.sent, self.rank = connections, sent, connections.rank
        self.key: tuple[tuple[int, ...], str, str] | None = None

    def exchange(self, outgoing: Mapping[int, Sequence[memoryview]], incoming: Mapping[int, Any]) -> None:
        self.sent[self.key] += sum(each.nbytes for buffers in outgoing.values() for each in buffers)
        self.connections.exchange(outgoing, incoming)


class CountedGroup(CpuGroup):
    """A group that counts, and so do the groups made of it."""

    def new_subgroup(self, ranks: Sequence[int], name: str = "") -> CountedGroup:
        return CountedGroup(self.connections, ranks)

    def clone_connections(self, on_one_host: bool) -> CountedGroup:
        found = super().clone_connections(on_one_host)
        return CountedGroup(CountedConnections(found.connections, self.connections.sent), self.ranks)


@contextlib.contextmanager
def _named(links: CountedConnections, ranks: tuple[int, ...], name: str, array: np.ndarray) -> Iterator[None]:
    """Counts what is sent under the name of a collective, or of the one that calls it."""
    outer = links.key
    links.key = outer or (ranks, name, str(array.dtype))
    try:
        yield
    finally:
        links.key = outer


def _counted(name: str) -> Callable:
    plain = getattr(CpuGroup, name)

    def collective(self: CountedGroup, array: np.ndarray | Sequence[np.ndarray]) -> Any:
        with _named(self.connections, self.ranks, name, array if isinstance(array, np.ndarray) else array[0]):
            return plain(self, array)

    return collective


def _counted_with_more(name: str) -> Callable:
    plain = getattr(CpuGroup, name)

    def collective(self: CountedGroup, array: np.ndarray | Sequence[np.ndarray], more: Any) -> Any:
        first = array if isinstance(array, np.ndarray) else array[0]
        with _named(self.connections, self.ranks, name, first):
            return plain(self, array, more)

    return collective


for _name in ("all_gather", "all_gather_rows", "all_reduce", "reduce_scatter", "complete_ranges",
              "reduce_scatter_range"):
    setattr(CountedGroup, _name, _counted(_name))
for _name in ("all_to_all", "all_to_all_into", "all_reduce_into", "broadcast"):
    setattr(CountedGroup, _name, _counted_with_more(_name))


def config_of_case(name: str) -> Config:
    case = CASES[name]
    parallel = {"use_parallel": True, "parallel_config": case["degrees"] | case.get("more", {})}
    return config_of(model=case.get("model", {}), **parallel, **case.get("sections", {}))


def counted(world: CpuGroup, names: Sequence[str]) -> dict[str, Sent]:
    """Returns the bytes that this rank sends in a step of each case."""
    with HEAD_IN_BLOCKS:
        return {name: _step(world, config_of_case(name)) for name in names}


def _step(world: CpuGroup, config: Config) -> Sent:
    """Returns the second step, where the first one may leave weights whole; else the first one."""
    sent: Sent = Counter()
    group = CountedGroup(CountedConnections(world.connections, sent), world.ranks)
    send = stage_link.StageLink.send_array

    def counted_send(link: stage_link.StageLink, stage: int, array: np.ndarray, *owner: Any) -> None:
        sent[(), "stage", str(array.dtype)] += array.nbytes
        send(link, stage, array, *owner)

    stage_link.StageLink.send_array = counted_send
    try:
        step = open_training(config, lambda update: 1e-3, None, world_of_group(world), "CPU", group)
        degrees = parallel_degrees(config, world_of_group(world))
        where, rows = Mesh(degrees).coordinate_of(world.rank), config.runner_config.batch_size
        for number in range(config.parallel.parallel_optimizer_config.optimizer_level != "level3", 2):
            sent.clear()
            window = [make_batch(100 * number + 10 * where.data + place, rows * TOKENS, rows) for place in
                      range(micro_batches_per_step(config, degrees))]  # fmt: skip
            step(window)
        return Counter(sent)
    finally:
        stage_link.StageLink.send_array = send
