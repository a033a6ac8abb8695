"""Degrees of parallelism that do not fit the model: what each cuts must be divisible by it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.schema.root import Config
from trainer.config.stages import stage_layers, stage_problems
from trainer.models.spec.sublayers import latent_spec

_MODEL = "model.model_config"


def set_to_divisor(number: int) -> str:
    """The fix for a degree that must divide `number`."""
    return f"set it to {_any_of([each for each in range(1, number + 1) if number % each == 0])}"


def tensor_problems(config: Config, repeats_heads: bool = False) -> Iterator[ConfigError]:
    """model_parallel must divide heads and columns.

    Args:
        repeats_heads: Several ranks may hold the same head of keys and values.
    """
    section = config.parallel_config
    settings = config.decoder
    degree = section.model_parallel
    kv_heads = settings.kv_heads
    parts = {"heads": settings.num_heads}
    if latent_spec(settings) is None and not (repeats_heads and degree % kv_heads == 0):
        parts["heads of keys and values"] = kv_heads
    parts["columns of the feed-forward layer"] = settings.ffn_size
    if repeats_heads and settings.experts is not None and settings.shared_expert_size:
        parts["columns of the shared experts"] = settings.shared_expert_size
    uneven = [f"{count:,} {what}" for what, count in parts.items() if count % degree]
    if uneven:
        rule = f"must divide what it cuts: {', '.join(uneven)}"
        yield problem(config, "parallel_config.model_parallel", rule, set_to_divisor(math.gcd(*parts.values())))
    tokens = config.runner_config.batch_size * settings.seq_length // section.context_parallel
    if section.use_seq_parallel and tokens % degree:
        of_rank = ""
        if section.context_parallel > 1:
            of_rank = " that a rank has"
        rule = f"the {tokens} tokens of a micro-batch{of_rank} are not divisible by model_parallel {degree}"
        yield problem(config, "parallel_config.use_seq_parallel", rule, "change seq_length, or set it to False")


def ulysses_degree(config: Config) -> int:
    """Neighbouring ones of the context-parallel ranks that exchange heads for tokens; 1: all ranks are a ring."""
    section = config.parallel_config
    degrees = {"ulysses_cp": section.context_parallel, "hybrid_cp": section.ulysses_degree_in_cp}
    return degrees.get(section.context_parallel_algo, 1)


def context_problems(config: Config) -> Iterator[ConfigError]:
    """context_parallel must divide the tokens of a sequence, and what exchanges heads the heads of a rank."""
    section = config.parallel_config
    settings = config.decoder
    key = "parallel_config.context_parallel"
    ranks = section.context_parallel
    if ranks == 1:
        return
    heads = settings.num_heads // section.model_parallel
    kv_heads = max(1, settings.kv_heads // section.model_parallel)
    fitting = [number for number in range(1, ranks + 1)
               if ranks % number == heads % number == 0 and 0 in (kv_heads % number, number % kv_heads)]  # fmt: skip
    share = f"share the {heads} heads and {kv_heads} heads of keys and values"
    ulysses = ulysses_degree(config)
    if section.context_parallel_algo == "hybrid_cp" and ulysses not in fitting:
        rule = f"must divide context_parallel {ranks}, and so many ranks {share}"
        yield problem(config, "parallel_config.ulysses_degree_in_cp", rule, f"set it to {_any_of(fitting)}")
        return
    # See trainer/data/batches/context.py.
    if ulysses == ranks:
        parts = ranks
    else:
        parts = math.lcm(ranks, 2 * ranks // ulysses)
    if settings.seq_length % parts:
        shown = "2 x context_parallel"
        if parts == ranks:
            shown = "context_parallel"
        rule = f"seq_length {settings.seq_length} is not divisible by {shown}"
        near = max(1, round(settings.seq_length / parts)) * parts
        fits = settings.seq_length * ranks / parts
        fix = "change it, or set"
        if fits.is_integer():
            fix = f"{set_to_divisor(int(fits))}, or"
        yield problem(config, key, rule, f"{fix} seq_length to {near}")
    if ulysses not in fitting:
        fix = f"change it, or write hybrid_cp and ulysses_degree_in_cp {_any_of(fitting)}"
        yield problem(config, key, f"with ulysses_cp its ranks {share}", fix)


def expert_problems(config: Config) -> Iterator[ConfigError]:
    """expert_parallel must divide the experts, and model_parallel the tokens that its ranks share for them."""
    section = config.parallel_config
    settings = config.decoder
    key = "parallel_config.expert_parallel"
    if settings.experts is None:
        if section.expert_parallel > 1:
            yield problem(config, key, "the model has no experts", "set it to 1")
        return
    number = settings.experts.expert_num
    tokens = config.runner_config.batch_size * settings.seq_length // section.context_parallel
    if number % section.expert_parallel:
        rule = f"the ranks of a group share the {number} experts of a layer equally"
        yield problem(config, key, rule, set_to_divisor(number))
    if tokens % section.model_parallel:
        of_rank = ""
        if section.context_parallel > 1:
            of_rank = " that a rank has"
        rule = f"its ranks share the {tokens} tokens of a micro-batch{of_rank} for the experts, which it must divide"
        yield problem(config, "parallel_config.model_parallel", rule, "set it to a divisor of seq_length")


def pipeline_problems(config: Config) -> Iterator[ConfigError]:
    """Stages need layers and micro-batches."""
    section = config.parallel_config
    settings = config.decoder
    number = section.pipeline_stage
    if number == 1:
        return
    if section.micro_batch_num < number:
        key = "parallel_config.micro_batch_num"
        rule = f"a pipeline of {number} stages needs as many"
        yield problem(config, key, rule, f"set it to {number} or more")
    accumulation = config.runner_config.gradient_accumulation_steps
    # A file that leaves use_parallel to the job may be one for a run without a pipeline: a note tells it there.
    disagree = accumulation > 1 and section.micro_batch_num > 1 and accumulation != section.micro_batch_num
    if config.use_parallel and disagree:
        where = config.source.where("parallel_config.micro_batch_num")
        rule = f"in a pipeline it means micro_batch_num, which is {section.micro_batch_num} ({where})"
        yield problem(config, "runner_config.gradient_accumulation_steps", rule, "remove one of the two")
    parts = settings.pp_interleave_num
    interleaves = config.parallel.pipeline_config.pipeline_interleave
    if parts > 1 and not interleaves:
        fix = "add parallel.pipeline_config.pipeline_interleave True, or set it to 1"
        yield problem(config, f"{_MODEL}.pp_interleave_num", "needs an interleaved pipeline", fix)
    if settings.num_layers < number * parts:
        rule = f"the model has {settings.num_layers} layers"
        each = ""
        if parts > 1:
            each = f", for {parts} parts of each stage"
        yield problem(config, "parallel_config.pipeline_stage", rule + each, "set it to that or less")
        return
    if any(stage_problems(config)):
        return
    # A weight that two stages use would be two weights.
    group = settings.layers_group
    if any(layer - layer % group not in layers for layers in stage_layers(config) for layer in layers):
        rule = f"the {group} layers that have one attention must be in one stage of the pipeline"
        yield problem(config, f"{_MODEL}.layers_group", rule, "set it to 1, or change num_layers or offset")


def _any_of(numbers: Sequence[int]) -> str:
    shown = numbers
    if len(numbers) > 6:
        shown = [*numbers[:5], "..."]
    if len(shown) > 1:
        return f"{', '.join(map(str, shown[:-1]))} or {shown[-1]}"
    return str(shown[0])
