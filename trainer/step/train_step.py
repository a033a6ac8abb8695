"""One optimizer step, in this order:

    forward and backward of each micro-batch -> sum over micro-batches and ranks -> unscale -> finite check
    -> loss-scale update -> norm -> clip -> update

The host waits for a device once: before the update it reads losses, token counts, norms and router rates in one small
tensor. Finite check, spike guard and loss scale decide on the host from these numbers, and the update is dispatched
right after. A device is idle between the two; in return a step without an update costs none, and every device and the
CPU decide by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from mindspore import Tensor

from trainer.arrays.vocabulary.loss_terms import TERMS, LossTerms
from trainer.arrays.vocabulary.preferences import DIVERGENCE, add_margin, divergence
from trainer.data.batches.batch import Batch, count_pairs, select_documents, sum_weights
from trainer.models.compute_weights import cast_to_float32
from trainer.models.decoder import DecoderCall
from trainer.models.inputs import LossSums, ModelInputs, PassObserver, RouterStatistics, mtp_labels
from trainer.models.spec.build import model_spec
from trainer.models.spec.sublayers import moe_config
from trainer.ops.dropout import DropoutKey
from trainer.ops.measures import metric_functions
from trainer.ops.routing import RouterRates, RoutingCounts, StepExpertLoad
from trainer.optim.groups import parameter_of
from trainer.optim.qk_clip import MaxLogits, QkClip, exchanged_heads, local_heads
from trainer.parallel.communicator import Communicator
from trainer.parallel.sharding import ShardedArray, ShardSpec, full_shard_spec
from trainer.step.accumulate import (
    MicroBatch,
    MicroBatchTotals,
    NormContribution,
    RankFlags,
    StepGradients,
    accumulate,
    count_loss_tokens,
)
from trainer.step.clip import clip, norm_groups
from trainer.step.differentiate import differentiation
from trainer.step.guards import UpdateGuard
from trainer.storage.quantized import FrozenMatrix
from trainer.storage.tensor_file import ArrayOrLazyArray

if TYPE_CHECKING:
    from trainer.config.schema.runner import LossConfig, RunnerWrapper
    from trainer.models.decoder import Decoder
    from trainer.optim.averages import WeightAverages
    from trainer.optim.optimizer import Optimizer
    from trainer.step.pipeline import Pipeline


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Norms are unscaled and before clipping.

    Attributes:
        local_norms: Norm of each parameter's gradient by name; None unless `runner_wrapper.local_norm` asks for them.
        losses: Auxiliary losses by name, before their factors: aux_loss (mean over the MoE layers; 1 is an even load),
            z_loss (likewise), mtp_loss (mean over the labels of the multi-token prediction modules), and the means over
            the loss tokens of `trainer.arrays.vocabulary.loss_terms.TERMS`, and kl, of the divergence from a teacher.
            Or the means over pairs of `trainer.arrays.vocabulary.preferences.REWARDS`.
        routing: Counts of tokens of each expert over all ranks; tensors on a device.
        reduce_seconds: Time to sum the gradients over the ranks, including the wait for the last rank;
            None where they are summed during the backward pass, which the host does not time.
    """

    loss: float  # sum of token losses of the global batch / its loss tokens, in nats; without the loss scale
    tokens: int  # loss tokens of the global batch
    lr: float
    global_norm: float  # total norm of the gradients; inf or nan on overflow
    updated: bool  # whether weights, optimizer and schedule advanced
    skipped: str = ""  # the skip reason, with details after a colon
    loss_scale: float = 1.0
    overflow: bool = False
    empty_micro_batches: int = 0  # micro-batches without a loss token
    local_norms: Mapping[str, float] | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    routing: RoutingCounts | None = None
    router_rates: RouterRates | None = None
    reduce_seconds: float | None = None
    rank_flags: Sequence[float] | None = None  # sums of the flags over the ranks
    bubble_share: float | None = None  # see StepGradients
    max_logits: np.ndarray | None = None  # largest attention logit of each layer and head, [L, H], if it was measured
    clipped_heads: int | None = None  # heads whose queries and keys QK-clip has scaled; None: it did not act


class StepObserver(Protocol):
    """Sees what a training step computes, and changes nothing."""

    def micro_batch(
        self, number: int, batch: Any, inputs: ModelInputs, statistics: RouterStatistics
    ) -> PassObserver | None:
        """Sees the inputs of a micro-batch; returns the observer of its passes."""

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sees the gradients of the step by the parameters' names, summed over the ranks, times the loss scale."""


class CheckpointShard(NamedTuple):
    """The arrays, or shards of arrays, that one rank writes to a checkpoint."""

    weights: Mapping[str, np.ndarray | ShardedArray]  # by the names of the parameters
    optimizer: Mapping[str, np.ndarray | ShardedArray]  # by `kind.parameter`
    updates: int
    shares_memory: bool = False  # later steps change these arrays


class TrainStep:
    """The training step of explicit mode; also usable without the command line, for example in a notebook.

        step = TrainStep(model, optimizer, lambda update: 1e-3, InputBuilder(settings, kernels), RunnerWrapper())
        result = step([batch_1, batch_2])       # one update from two micro-batches

    Args:
        model: Its call gives the sums of the losses of a micro-batch, see `trainer.models.inputs.LossSums`.
        optimizer: Its parameters are trained, and gradients are computed only for these. Its count of updates drives
            the schedule and the dropout masks.
        schedule: Learning rate of update number `n`, from 0.
        seed: Seed of dropout.
        communicator: The other ranks; data-parallel ranks draw different dropout masks. None: a single process.
        stop_at_bad_loss: Raise on a loss that is not finite, even where loss scaling would skip the step.
        pipeline: The pipeline whose stage the model is; None: no pipeline parallelism.
        shards_gradients: ZeRO stage 2: the ranks that shard the optimizer's state also shard the gradients.
        qk_clip_threshold: The attention logit above which QK-clip scales a head of latent attention after an update;
            None: no head.
        measures_logits: Whether native layers measure the largest attention logits; QK-clip requires it.
        averages: Averages of the weights, which are updated after each update of the weights; None: none.
        loss: The loss of answers that are compared, a mean over the pairs or records of the global batch; None: of
            tokens or images.
        has_weights: Whether the loss of tokens is their mean with the weights of a `WeightedBatch`.
        teacher: Identifies the weights of the teacher in checkpoints; empty without one.

    Attributes:
        observer: Sees what the steps compute, if it is set.
    """

    computes_together = False  # ranks evaluate different batches

    def __init__(
        self, model: Decoder, optimizer: Optimizer, schedule: Callable[[int], float],
        build_inputs: Callable[[Any], Any], wrapper: RunnerWrapper, *, seed: int = 1,
        communicator: Communicator | None = None, stop_at_bad_loss: bool = False, pipeline: Pipeline | None = None,
        shards_gradients: bool = False, qk_clip_threshold: float | None = None, measures_logits: bool = False,
        averages: WeightAverages | None = None, loss: LossConfig | None = None, has_weights: bool = False,
        teacher: str = "",
    ) -> None:  # fmt: skip
        self.averages = averages
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.build_inputs = build_inputs
        self.wrapper = wrapper
        self.seed = seed
        self.guards = UpdateGuard(wrapper, stop_at_bad_loss)
        self.observer: StepObserver | None = None
        self.communicator = communicator or Communicator()
        self.pipeline = pipeline
        self.teacher = teacher
        self.first_weights = ""  # the digest of the weights that a loss of preferences compares with
        self.count_items: Callable[[Any], float] = count_loss_tokens
        if has_weights:
            self.count_items = sum_weights
        self.has_labels = False
        self.divergence: float | None = None  # of the global batch, for the loss of labelled answers
        if loss is not None:
            self.count_items = count_pairs
            self.has_labels = loss.answers == "labels"
        names = list(optimizer.parameters)
        model.compute_weights.refresh()
        targets = model.compute_weights.grad_targets(names)
        self.reducer = self.communicator.gradient_reducer(
            dict(zip(names, targets, strict=True)),
            [name in optimizer.local_ranges for name in names],
            wrapper.accumulate_allreduce_grads_in_fp32,
            shards_gradients,
        )
        names_of_all_ranks = names
        if self.communicator.layout is not None:
            names_of_all_ranks = [name for name in self.communicator.layout.parameters if name in optimizer.group_of]
        self.norm_groups = norm_groups(names_of_all_ranks, wrapper, optimizer.group_of)
        self.norm_contribution = self._norm_contribution(names, names_of_all_ranks)
        experts = model.settings.experts
        self.load: StepExpertLoad | None = None
        if experts and experts.balances_step:
            self.load = StepExpertLoad(self.communicator.all_reduce_stage)
        self.qk_clip: QkClip | None = None
        self.max_logits: MaxLogits | None = None
        if measures_logits:
            self.measure_logits(qk_clip_threshold)
        # Where the ranks communicate in each micro-batch, none may skip one. Expert bias and QK-clip take all tokens of
        # the global batch into account, those without loss, too: they would depend on its division.
        counts_all = self.load is not None or self.qk_clip is not None or (experts and experts.balance_via_topk_bias)
        self.skips_empty = self.communicator.skips_empty and not (counts_all or shards_gradients)
        self.differentiate = differentiation(model, targets)

    def _norm_contribution(self, names: Sequence[str], names_of_all_ranks: Sequence[str]) -> NormContribution | None:
        """Returns what this rank adds to the norms of gradients that ranks shard; None if it has whole gradients."""
        if not self.communicator.shards_model and not self.reducer.returns_ranges:
            return None
        places = {name: place for place, name in enumerate(names)}
        scattered: Collection[str] = ()
        if self.reducer.returns_ranges:
            scattered = self.optimizer.local_ranges
        factors = self.communicator.norm_weights(names, scattered)
        indices = [places.get(name, len(names)) for name in names_of_all_ranks]
        return NormContribution(factors, indices)

    def measure_logits(self, qk_clip_threshold: float | None) -> None:
        """Makes the steps measure the largest attention logits, and clip heads above the threshold if there is one."""
        model = self.model
        layers = model_spec(model.settings).layers
        attention = layers[0].attention
        heads = local_heads(attention, len(layers), model.parameters_by_name, self.shard_spec)
        if qk_clip_threshold is not None:
            ranges = model.compute_weights.local_ranges
            self.qk_clip = QkClip(qk_clip_threshold, attention, heads, model.parameters_by_name, ranges)
        if model.shard is not None and model.shard.ulysses is not None:
            heads = exchanged_heads(heads, model.shard.ulysses)
        shape = len(layers), model.settings.num_heads
        self.max_logits = MaxLogits(heads, shape, self.communicator.gather_bytes)

    def __call__(self, micro_batches: Sequence[Batch], rank_flags: RankFlags | None = None) -> StepResult:
        """Runs the micro-batches of one step, one or more of int32 arrays [B, T], and updates the weights.

        Args:
            rank_flags: See `accumulate`.

        Raises:
            RunError: See `UpdateGuard.check_step`. Nothing has been updated.
        """
        lr = self.schedule(self.optimizer.updates)
        if self.load is not None:
            self.load.start()
        if self.max_logits is not None:
            self.max_logits.start()
        if self.has_labels:
            self.divergence = self._global_divergence(micro_batches)
            micro_batches = [select_documents(batch, 0) for batch in micro_batches]
        run_pipeline = None
        if self.pipeline is not None:
            run_pipeline = partial(self.run_pipeline, self.pipeline, micro_batches)
        gradients = accumulate(
            micro_batches, self.backward, self.guards.scale, self.communicator, skips_empty=self.skips_empty,
            reducer=self.reducer, norm_groups=self.norm_groups, norm_contribution=self.norm_contribution,
            rank_flags=rank_flags, run_pipeline=run_pipeline, count_items=self.count_items,
        )  # fmt: skip
        self.model.compute_weights.end_step()
        if self.observer is not None:
            self.observer.gradients(dict(zip(self.optimizer.parameters, gradients.gradients or (), strict=False)))
        result = apply_gradients(gradients, lr, self.optimizer, self.wrapper, self.guards)
        if self.has_labels:
            result = replace(result, losses=add_margin(result.losses))
        if self.max_logits is not None:
            logits_LH = self.max_logits.reduce_max()
            result = replace(result, max_logits=logits_LH)
            if result.updated and self.qk_clip is not None:
                result = replace(result, clipped_heads=self.qk_clip.clip(logits_LH))
        if result.updated:
            if self.averages is not None:
                self.averages.update()
            self.model.compute_weights.refresh(self.optimizer.parameters)
            self.model.update_expert_bias(gradients.routing)
        return result

    def backward(self, batch: Batch, number: int, factor: Tensor | float) -> MicroBatch:
        """Computes the losses of one micro-batch, summed over tokens, and the gradients of the loss times `factor`."""
        if not isinstance(factor, Tensor):
            factor = Tensor(np.float32(factor))
        call = self.decoder_call(batch, number)
        sums, gradients = self.differentiate(call, factor)
        assert call.statistics is not None
        if self.wrapper.accumulate_allreduce_grads_in_fp32:
            cast_to_float32(gradients)
        others = self.other_sums(batch, sums, self.communicator.reports_losses, call.statistics.terms)
        if isinstance(call.inputs, ModelInputs) and call.inputs.pairs is not None:  # images have none
            pairs = call.inputs.pairs
            others |= {name: (Tensor(np.float32(value)), count) for name, (value, count) in pairs.sums.items()}
        token_losses = None
        if self.communicator.reports_losses:
            token_losses = cross_entropy(sums, call.statistics.terms)
        if isinstance(call.inputs, ModelInputs) and call.inputs.distillation is not None:
            distillation = call.inputs.distillation
            token_losses = Tensor(np.float32(distillation.cross_entropy))
            others[DIVERGENCE] = Tensor(np.float32(distillation.divergence)), self.count_items(batch)
        return MicroBatch(token_losses, others, call.statistics.counts(), gradients)

    def decoder_call(self, batch: Batch, number: int) -> DecoderCall:
        """Builds the inputs of the model for micro-batch `number` of a step."""
        dropout = DropoutKey(self.seed, self.communicator.data_rank, self.optimizer.updates, number)
        statistics = RouterStatistics(load=self.load)
        if self.max_logits is not None:
            statistics.max_logits = self.max_logits.local
        inputs = self.build_inputs(batch)
        if self.has_labels:
            inputs.pairs.divergence = self.divergence
        observer = None
        if self.observer is not None:
            observer = self.observer.micro_batch(number, batch, inputs, statistics)
        return DecoderCall(inputs, dropout, statistics, observer)

    def _global_divergence(self, micro_batches: Sequence[Batch]) -> float:
        """Computes the divergence over all micro-batches and ranks, from the answers to other prompts alone.

        They need no backward pass, and the training pass does not need them: both passes together have the tokens of
        the batch once.
        """
        self.divergence = None
        total = 0.0
        count = 0
        for number, batch in enumerate(micro_batches):
            if not self.count_items(batch):
                continue
            call = self.decoder_call(select_documents(batch, 1), number)._replace(statistics=None)
            self.model(*call)
            pairs = call.inputs.pairs
            assert pairs is not None and pairs.labelled is not None
            total += float(pairs.labelled.others_P.sum())
            count += len(pairs.labelled.others_P)
        total, count = self.communicator.all_reduce_exact([total, count])
        return divergence(total, count)

    def run_pipeline(
        self, pipeline: Pipeline, micro_batches: Sequence[Batch], numbers: Sequence[int], factor: Tensor,
        results: MicroBatchTotals,
    ) -> tuple[list[Tensor], float | None]:  # fmt: skip
        """Runs this stage's passes of the micro-batches `numbers`, see `trainer.step.accumulate.PipelineRun`."""
        batches = [micro_batches[number] for number in numbers]
        settings = self.model.settings

        def make_call(place: int) -> DecoderCall:
            return self.decoder_call(batches[place], numbers[place])

        def on_forward(place: int, sums: LossSums, call: DecoderCall, is_last: bool) -> None:
            """Adds the losses and the routing of a forward pass to the results."""
            reports_losses = self.communicator.reports_losses and sums.tokens is not None
            assert call.statistics is not None
            others = self.other_sums(batches[place], sums, reports_losses, call.statistics.terms)
            token_losses = None
            if reports_losses:
                token_losses = cross_entropy(sums, call.statistics.terms)
            routing = None
            if is_last and settings.moe_layers:  # the routers of all chunks have decided
                routing = metric_functions().pad_to_all_layers(
                    call.statistics.counts(), settings.moe_layers, moe_config(settings).expert_num
                )
            results.add(MicroBatch(token_losses, others, routing, ()))

        names = list(self.optimizer.parameters)
        return pipeline.train(len(numbers), make_call, factor, on_forward, names, self.reducer.local_gradient)

    def other_sums(
        self, batch: Batch, sums: LossSums, reports_losses: bool = True, terms: LossTerms | None = None
    ) -> dict[str, tuple[Tensor | None, float]]:
        """Returns the auxiliary losses for `MicroBatch.other_sums`.

        Args:
            reports_losses: False: another rank reports the losses of tokens, including the MTP loss.
            terms: What this rank's head has added to the cross entropy.
        """
        settings = self.model.settings
        modules = self.model.mtp_modules
        tokens = 0
        labels_of_modules = 0
        if reports_losses and self.communicator.reports_tokens:
            tokens = count_loss_tokens(batch)
            # A module has fewer labels than the main model: none for the last tokens of a sequence or document.
            labels_of_modules = mtp_labels(batch, modules) if modules else 0
        others: dict[str, tuple[Tensor | None, float]] = {}
        if modules:
            others["mtp_loss"] = sums.mtp if reports_losses else None, labels_of_modules
        if settings.has_loss_terms:
            items = 0.0
            if tokens:
                items = self.count_items(batch)
            values: list[Tensor | None] = [None, None]
            if reports_losses and terms is not None:
                values = [Tensor(np.float32(value)) for value in (terms.smoothed, terms.squares)]
            others |= {name: (value, items) for name, value in zip(TERMS, values, strict=True)}
        if settings.moe_layers:
            others["aux_loss"] = sums.aux_loss, tokens * len(settings.moe_layers)
        if settings.moe_layers and moe_config(settings).z_loss_factor:
            others["z_loss"] = sums.z_loss, tokens * len(settings.moe_layers)
        return others

    def load_optimizer(self, arrays: Mapping[str, ArrayOrLazyArray], updates: int) -> None:
        """Restores the optimizer's state from unsharded arrays by `kind.parameter`; this rank reads its shards."""
        self.optimizer.load_state(arrays, updates, self.state_shard_spec)

    def state_dict_shard(self) -> CheckpointShard:
        """Returns the weights and optimizer state that this rank writes to a checkpoint."""
        ranges = self.model.compute_weights.local_ranges
        weights = {}
        for name, parameter in self.model.parameters_by_name.items():
            if isinstance(parameter, FrozenMatrix):  # checkpoints have adapters alone
                continue
            if self.communicator.should_save(name, name in ranges):
                array = parameter.asnumpy()
                if name in ranges:
                    array = array.reshape(-1)[ranges[name]]
                weights[name] = ShardedArray(self.shard_spec(name)._replace(flat_range=ranges.get(name)), array)
        state = {}
        for key, array in self.optimizer.state_views().items():
            name = parameter_of(key)
            if self.communicator.should_save(name, name in self.optimizer.local_ranges):
                state[key] = ShardedArray(self.state_shard_spec(name), array)
        return CheckpointShard(weights, state, self.optimizer.updates, shares_memory=True)

    def shard_spec(self, name: str) -> ShardSpec:
        """Returns the spec of this rank's shard of a parameter."""
        shard = self.model.shard
        if shard is None:
            return full_shard_spec(self.model.parameters_by_name[name].shape)
        return shard.shard_spec(name)

    def state_shard_spec(self, name: str) -> ShardSpec:
        """Returns the spec of the shard of a parameter whose optimizer state this rank has."""
        return self.shard_spec(name)._replace(flat_range=self.optimizer.local_ranges.get(name))

    def state(self) -> dict:
        """Returns the state of the step for a checkpoint, without the optimizer."""
        state = self.guards.state()
        if self.first_weights:
            state["first_weights"] = self.first_weights
        if self.teacher:
            state["teacher"] = self.teacher
        return state

    def load_state(self, state: Mapping) -> None:
        """Restores what `state` returned."""
        self.guards.load_state(state)


def cross_entropy(sums: LossSums, terms: LossTerms | None) -> Tensor:
    """Returns the sum of the cross entropies of the loss tokens of a forward pass."""
    if terms is None:
        return sums.tokens
    return Tensor(np.float32(terms.cross_entropy))


def apply_gradients(
    step: StepGradients, lr: float, optimizer: Optimizer, wrapper: RunnerWrapper, guards: UpdateGuard
) -> StepResult:
    """Checks, clips and applies the gradients of a step.

    Args:
        step: Sums over all ranks, with a gradient for each parameter of `optimizer`, times the loss scale; its norms
            are those of the unsharded gradients.

    Raises:
        RunError: See `UpdateGuard.check_step`. Nothing has been updated.
    """
    scale = guards.scale

    def result(norm: float, skipped: str = "", **more: Any) -> StepResult:
        return StepResult(
            step.loss, step.tokens, lr, norm, updated=not skipped, skipped=skipped, loss_scale=scale,
            empty_micro_batches=step.empty, losses=step.others, routing=step.routing,
            router_rates=step.router_rates, reduce_seconds=step.reduce_seconds, rank_flags=step.rank_flags,
            bubble_share=step.bubble_share, **more,
        )  # fmt: skip

    norms = step.norms
    if step.gradients is None or norms is None:
        return result(0.0, "no token with a loss")
    # The norm is divided by the scale here and the gradients in the update: this saves a pass over all gradients.
    norm = norms.total / scale
    first_nonfinite = ""
    if norms.first_nonfinite:
        first_nonfinite = f"; first non-finite gradient: {norms.first_nonfinite}"
    skipped = guards.check_step(step.loss, norm, step=optimizer.updates + 1, first_nonfinite=first_nonfinite)
    if skipped == "overflow":
        return result(math.nan, skipped, overflow=True)
    if skipped:
        return result(norm, skipped)
    names = list(optimizer.parameters)
    gradients, factors = clip(step.gradients, norms, names, wrapper, optimizer.group_of, scale)
    optimizer.update(gradients, lr, factors)
    local_norms = None
    if norms.per_gradient is not None:
        local_norms = {name: each / scale for name, each in norms.per_gradient.items()}
    return result(norm, local_norms=local_norms)
