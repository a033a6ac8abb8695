"""Rules about degrees of parallelism and the model: each degree must divide what it shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainer.config.checks.problem import ConfigError, one_of, problem
from trainer.config.schema.root import Config
from trainer.config.stages import stage_layers, stage_problems
from trainer.models.spec.sublayers import attention_spec, latent_spec

_MODEL = "model.model_config"


def set_to_divisor(number: int) -> str:
    """Returns the fix for a degree that must divide `number`."""
    return f"set it to {_any_of([degree for degree in range(1, number + 1) if number % degree == 0])}"


def tensor_problems(config: Config, repeats_heads: bool = False) -> Iterator[ConfigError]:
    """Yields errors where model_parallel does not divide heads or columns of matrices, or tokens if use_seq_parallel.

    Args:
        config: The configuration of a decoder.
        repeats_heads: Whether several ranks may have the same key-value head.
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
        rule = f"must divide what it shards: {', '.join(uneven)}"
        yield problem(config, "parallel_config.model_parallel", rule, set_to_divisor(math.gcd(*parts.values())))
    if degree > 1 and attention_spec(settings).norms_all_heads:
        rule = "not yet supported for a model whose norms of query and key are over all heads, which ranks would shard"
        yield problem(config, "parallel_config.model_parallel", rule, "set it to 1")
    tokens = config.runner_config.batch_size * settings.seq_length // section.context_parallel
    if section.use_seq_parallel and tokens % degree:
        rule = f"{_tokens_text(tokens, section.context_parallel)} are not divisible by model_parallel {degree}"
        yield problem(config, "parallel_config.use_seq_parallel", rule, "change seq_length, or set it to false")


def _tokens_text(tokens: int, context_parallel: int) -> str:
    if context_parallel > 1:
        return f"the {tokens} tokens of a micro-batch that a rank has"
    return f"the {tokens} tokens of a micro-batch"


def ulysses_degree(config: Config) -> int:
    """Returns how many neighbouring context-parallel ranks exchange heads for tokens (Ulysses); 1: ring attention."""
    section = config.parallel_config
    degrees = {"ulysses_cp": section.context_parallel, "hybrid_cp": section.ulysses_degree_in_cp}
    return degrees.get(section.context_parallel_algo, 1)


def context_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors where context_parallel does not divide seq_length, or the Ulysses degree the heads of a rank."""
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
        rule = f"must divide context_parallel {ranks}, and that number of ranks must {share}"
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
        fix = f"change it, or use the hybrid method with ulysses_degree_in_cp {_any_of(fitting)}"
        yield problem(config, key, f"with Ulysses its ranks must {share}", fix)


def expert_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors where expert_parallel does not divide expert_num, or model_parallel the tokens for the experts."""
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
        yield problem(config, key, f"must divide the {number} experts of a layer", set_to_divisor(number))
    if tokens % section.model_parallel:
        rule = f"must divide {_tokens_text(tokens, section.context_parallel)}, which its ranks share for the experts"
        yield problem(config, "parallel_config.model_parallel", rule, "set it to a divisor of seq_length")


def pipeline_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for a pipeline with too few layers or micro-batches, or with keys that contradict it."""
    section = config.parallel_config
    settings = config.decoder
    number = section.pipeline_stage
    if number == 1:
        return
    runner = config.runner_config
    if section.micro_batch_num < number and runner.global_batch_size:
        rule = f"it makes {section.micro_batch_num} micro-batches of a rank, and {number} stages need at least {number}"
        least = runner.global_batch_size * number // section.micro_batch_num
        yield problem(config, "runner_config.global_batch_size", rule, f"set it to {least} or more")
    elif section.micro_batch_num < number:
        key = "parallel_config.micro_batch_num"
        rule = f"a pipeline of {number} stages needs at least {number} micro-batches"
        yield problem(config, key, rule, f"set it to {number} or more")
    accumulation = runner.gradient_accumulation_steps
    # Without use_parallel the file may be for a run without a pipeline: there a note says it.
    disagree = accumulation > 1 and section.micro_batch_num > 1 and accumulation != section.micro_batch_num
    if config.use_parallel and disagree:
        where = config.source.where("parallel_config.micro_batch_num")
        rule = f"in a pipeline it means micro_batch_num, which is {section.micro_batch_num} ({where})"
        yield problem(config, "runner_config.gradient_accumulation_steps", rule, "remove one of the two")
    parts = settings.pp_interleave_num
    interleaves = config.parallel.pipeline_config.pipeline_interleave
    if parts > 1 and not interleaves:
        fix = "add parallel.pipeline_config.pipeline_interleave: true, or set it to 1"
        yield problem(config, f"{_MODEL}.pp_interleave_num", "needs an interleaved pipeline", fix)
    if settings.num_layers < number * parts:
        rule = f"the model has {settings.num_layers} layers"
        if parts > 1:
            rule += f", and each stage has {parts} model chunks"
        yield problem(config, "parallel_config.pipeline_stage", rule, "set it to that or less")
        return
    if any(stage_problems(config)):
        return
    # A weight that two stages use would become two weights.
    group = settings.layers_group
    if any(layer - layer % group not in layers for layers in stage_layers(config) for layer in layers):
        rule = f"the {group} layers that share attention weights must be in one pipeline stage"
        yield problem(config, f"{_MODEL}.layers_group", rule, "set it to 1, or change num_layers or offset")


def _any_of(numbers: Sequence[int]) -> str:
    if len(numbers) > 6:
        return one_of([*numbers[:5], "..."])
    return one_of(numbers)
