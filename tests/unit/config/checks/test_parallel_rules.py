"""What a file asks for in a job of one or several ranks: degrees, what is not yet built, what does not count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_helpers import BASE, error_of, failure, load
from no_decoder import NO_DECODER_TEXT

from trainer.cli.flags import split_arguments
from trainer.config import config_notes, dump_config, parse_config, preflight
from trainer.config.checks.parallel import (
    parallel_degrees,
    parallel_problems,
    resolve_for_job,
    shard_threshold_bytes,
    shards_optimizer,
)
from trainer.config.checks.preferences import distillation_problems, term_problems
from trainer.config.checks.problem import ConfigError
from trainer.errors import UserError
from trainer.ops.select import on_arrays
from trainer.parallel.mesh import Degrees
from trainer.parallel.world import SINGLE_PROCESS, world_of
from trainer.plan.ascend import ascend_problems, sample_notes, samples_text
from trainer.run.plan_file import world_from_degrees
from trainer.run.prepare import build_plan, select_execution_mode
from trainer.semi_auto.rules import semi_auto_problems

EIGHT = world_of(8)
LATENT = "multi_latent_attention: True, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8"


def run_error(text: str, world=EIGHT, *overrides: str) -> str:
    """Returns the message that a job ends in before it starts; lines of `text` with "=" are flags."""
    lines = text.splitlines()
    flags = [line for line in lines if "=" in line]
    config = load(BASE + "".join(f"{line}\n" for line in lines if line not in flags), *flags, *overrides)
    return failure(lambda: preflight(config, world, select_execution_mode(config, world).problems()))


def told(text: str, world=EIGHT) -> str:
    config = load(BASE + text)
    return "\n".join([*config_notes(config, world), *select_execution_mode(config, world).notes()])


def test_a_file_without_a_word_about_ranks_runs_on_any_number() -> None:
    config = load(BASE)
    for world in (SINGLE_PROCESS, world_of(2), EIGHT):
        preflight(config, world)
        assert parallel_degrees(config, world) == Degrees(data_parallel=world.size)
    assert config_notes(config) == []
    assert config_notes(config, EIGHT) == ["use_parallel: not set; it is true, because the job has 8 ranks"]
    assert "data_parallel" not in dump_config(config)


@pytest.mark.parametrize(
    "text",
    [
        "use_parallel: True\n",
        "use_parallel: True\nparallel_config: {data_parallel: 8}\n",
        "use_parallel: True\nparallel_config: {data_parallel: null}\nparallel: {parallel_mode: data_parallel}\n",
        "use_parallel: True\nparallel: {parallel_mode: 0, enable_parallel_optimizer: True}\n",
    ],
)
def test_what_fits_eight_ranks_gives_no_note(text: str) -> None:
    config = load(BASE + text)
    preflight(config, EIGHT)
    assert parallel_degrees(config, EIGHT) == Degrees(data_parallel=8)
    assert config_notes(config, EIGHT) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("use_parallel: False\n", ["a.yaml:16: use_parallel = false: the job has 8 ranks", "leave `launch` out"]),
        (
            "parallel_config: {data_parallel: 4}\n",
            ["a.yaml:16: parallel_config.data_parallel = 4: data_parallel 4 needs 4 ranks, but the job has 8",
             "launch --nproc 4`, or set data_parallel 8; an unset data_parallel takes"],
        ),
        (
            "parallel_config: {pipeline_stage: 2, model_parallel: 3}\n",
            ["a.yaml:16: parallel_config.model_parallel = 3: pipeline_stage 2 x model_parallel 3 needs 6 ranks, but",
             "set it to 1, 2 or 4, or start it with `run_trainer.py launch --nproc 6`; an unset data_parallel takes"],
        ),
        (
            "parallel_config: {model_parallel: 8}\n",
            ["a.yaml:16: parallel_config.model_parallel = 8: must divide what it shards: 4 heads", "set it to 1, 2 or"],
        ),
        (
            "parallel_config: {model_parallel: 2}\nmodel.arch.type=Olmo2ForCausalLM",
            ["model_parallel = 2: not yet supported for a model whose norms of query and key are", "set it to 1"],
        ),
        (
            "parallel_config: {model_parallel: 2, pipeline_stage: 2, micro_batch_num: 2}\nrun_mode=chat",
            ["run_mode = 'chat': run_mode chat runs in one process, and the job has 8", "start it without launch"],
        ),
        (
            "parallel_config: {context_parallel: 8}\nmodel.model_config.seq_length=24",
            ["context_parallel = 8: seq_length 24 is not divisible by 2 x context_parallel",
             "set it to 1, 2, 3, 4, 6 or 12, or seq_length to 32"],
        ),
        ("parallel_config: {expert_parallel: 2}\n", ["expert_parallel = 2: the model has no experts"]),
        (
            "parallel_config: {context_parallel: 2, model_parallel: 4, use_seq_parallel: True}\n"
            "model.model_config.seq_length=12",
            ["use_seq_parallel = true: the 6 tokens of a micro-batch that a rank has are not divisible by model_paral"],
        ),
        ("parallel_config: {pipeline_stage: 2}\n", ["micro_batch_num = 1: a pipeline of 2 stages needs at least 2"]),
        (
            "parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n"
            "parallel: {pipeline_config: {pipeline_interleave: True, pipeline_scheduler: seqpipe}}\n",
            ["pipeline_scheduler = 'seqpipe': explicit mode supports 1f1b and gpipe only", "write 1f1b"],
        ),
        (
            "parallel: {parallel_mode: 1, parallel_fallback: explicit}\n"
            "parallel_config: {context_parallel: 2, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 3}\n",
            ["ulysses_degree_in_cp = 3: must divide context_parallel 2, and", "set it to 1 or 2"],
        ),
        ("parallel: {enable_parallel_optimizer: True, parallel_optimizer_config: {optimizer_weight_shard_size: 3}}\n",
         ["optimizer_weight_shard_size = 3: must divide data_parallel 8", "set it to 1, 2, 4 or 8, or to -1"]),
        ("parallel: {parallel_mode: 2}\n", ["parallel_mode = 2: not yet supported"]),
        ("parallel: {parallel_mode: hybrid_parallel}\n", ["= 'hybrid_parallel': not yet supported"]),
        ("parallel: {parallel_mode: STAND_ALONE}\n", ["'stand_alone': runs one rank, and the job has 8"]),
    ],
)  # fmt: skip
def test_what_eight_ranks_cannot_run_is_an_error(text: str, parts: list[str]) -> None:
    message = run_error(text)
    assert all(part in message for part in parts), message
    assert "\n  Fix: " in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("use_parallel: True\nparallel_config: {data_parallel: 8}\n", ["needs 8 ranks, but the job has 1",
         "launch --nproc 8`, or set data_parallel 1; to run one process, add --use_parallel false"]),
        ("use_parallel: True\nparallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n",
         ["pipeline_stage 2 needs 2 ranks"]),
    ],
)  # fmt: skip
def test_a_file_for_several_ranks_says_how_to_start_them(text: str, parts: list[str]) -> None:
    message = run_error(text, SINGLE_PROCESS)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("parallel_config: {data_parallel: 8, model_parallel: 2}\n",
         "parallel_config.data_parallel 8, parallel_config.model_parallel 2: not used"),
        ("parallel_config: {data_parallel: 8}\n", "the run has one device: start several with `launch --nproc`"),
        ("use_parallel: false\nparallel_config: {data_parallel: 8}\n", "the run has one device: use_parallel is false"),
        ("use_parallel: True\n", "the job has one rank; `run_trainer.py launch --nproc 8` starts eight"),
        ("parallel: {parallel_mode: 1, enable_parallel_optimizer: True}\n",
         "parallel.parallel_mode 1, parallel.enable_parallel_optimizer true: not used, the run has one"),
    ],
)  # fmt: skip
def test_what_does_not_count_alone_is_told(text: str, note: str) -> None:
    preflight(load(BASE + text))
    assert note in told(text, SINGLE_PROCESS)
    assert parallel_degrees(load(BASE + text), SINGLE_PROCESS) == Degrees()


@pytest.mark.parametrize("mode", ["predict", "eval", "chat"])
@pytest.mark.parametrize(
    "text",
    [
        "parallel_config: {data_parallel: 2, model_parallel: 2}\n",
        "parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n",
        "parallel_config: {data_parallel: 2}\nparallel: {parallel_mode: 1}\n",
    ],
)
def test_what_several_ranks_have_trained_one_process_evaluates_and_continues(mode: str, text: str) -> None:
    file = load(BASE + "use_parallel: True\n" + text, f"run_mode={mode}", "predict_data=a", "load_checkpoint=.",
                "train_dataset.held_out=0.05")  # fmt: skip
    config = resolve_for_job(file, SINGLE_PROCESS)
    preflight(config, SINGLE_PROCESS, select_execution_mode(config, SINGLE_PROCESS).problems())
    why = "semi-automatic mode trains only" if "parallel_mode" in text else "start several with `launch --nproc`"
    why = "run_mode chat has one rank" if mode == "chat" else why
    assert f"the run has one device: {why}" in "".join(config_notes(config))
    assert world_from_degrees(file, SINGLE_PROCESS) == SINGLE_PROCESS, "the plan is of that process, too"
    assert resolve_for_job(file, EIGHT).use_parallel, "a job keeps its degrees"


@pytest.mark.parametrize(("degrees", "divides"), [("{model_parallel: 2}", True), ("{data_parallel: 2}", False)])
def test_several_ranks_are_recommended_where_they_run(degrees: str, divides: bool) -> None:
    """For a prediction on an Ascend, whose jobs divide no model."""
    file = load(f"{BASE}use_parallel: True\nparallel_config: {degrees}\n", "run_mode=predict", "predict_data=a",
                "load_checkpoint=.", "context.device_target=Ascend")  # fmt: skip
    why = "prediction shards a model on CPUs only"
    refused = [one.error.rule for one in ascend_problems(file, parallel_degrees(file, world_of(2)))]
    assert refused == [why] * divides
    notes = "".join(config_notes(resolve_for_job(file, SINGLE_PROCESS)))
    assert f"the run has one device: {why if divides else 'start several'}" in notes


def test_semi_automatic_mode_generates_no_samples_and_says_so() -> None:
    config = load(f"{BASE}parallel: {{parallel_mode: 1}}\nsample_prompt: a\n")
    preflight(config, EIGHT)
    said = "\n".join(config_notes(config, EIGHT))
    assert "sample_prompt: not used, semi-automatic mode generates no text" in said


@pytest.mark.parametrize(("degrees", "samples"), [("{model_parallel: 8}", False), ("{data_parallel: 8}", True)])
def test_ranks_of_an_ascend_that_divide_a_model_train_without_samples_and_say_so(degrees: str, samples: bool) -> None:
    config = load(f"{BASE}parallel_config: {degrees}\nuse_parallel: True\n", "sample_prompt=a")
    select_execution_mode(config, EIGHT).check_device("Ascend")
    assert [samples_text(config, EIGHT, device) for device in ("CPU", "Ascend")] == [True, samples]
    said = "".join(sample_notes(config, EIGHT, "Ascend"))
    assert said.startswith("sample_prompt: not used, ranks of an Ascend that divide a model (model_p") is not samples
    assert not "".join(sample_notes(config, EIGHT, "CPU"))


def test_rules_of_ranks_are_asked_of_a_model_with_too_many_heads() -> None:
    text = "model_config: {hidden_size: 2, num_heads: 4}\nparallel_config: {model_parallel: 2}\n"
    problems: list[ConfigError] = []
    config = parse_config("a.yaml", text, (), problems)  # as a plan does, which names all problems
    assert "must divide hidden_size" in str(problems[0].error) and not parallel_problems(config, world_of(2))


def test_numbers_have_the_names_of_mindspore() -> None:
    config = load("context: {mode: PYNATIVE_MODE}\nparallel: {parallel_mode: SEMI_AUTO_PARALLEL}\n")
    assert (config.context.mode, config.parallel.parallel_mode) == (1, "semi_auto_parallel")


def test_data_parallelism_takes_the_place_of_semi_automatic_mode() -> None:
    text = "parallel: {parallel_mode: 1, parallel_fallback: explicit}\n"
    config = load(BASE + "use_parallel: True\n" + text)
    preflight(config, EIGHT)
    assert parallel_degrees(config, EIGHT) == Degrees(data_parallel=8)
    said = "parallel.parallel_mode 1: replaced by explicit mode, because parallel_fallback is explicit"
    assert config_notes(config, EIGHT) == [said]
    flagged = load(BASE + "parallel: {parallel_mode: semi_auto_parallel}\n", "parallel.parallel_fallback=explicit")
    preflight(flagged, EIGHT)
    assert split_arguments(["--parallel_fallback", "explicit"]).overrides[0].key == "parallel.parallel_fallback"
    assert "parallel_fallback" in error_of("parallel: {parallel_fallback: automatic}\n")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("parallel_config: {pipeline_stage: 2}\nrunner_config: {gradient_accumulation_steps: 4}\n",
         ["micro_batch_num = 1: a pipeline of 2 stages needs at least 2", "set it to 2 or more"]),
        ("use_parallel: True\nparallel_config: {pipeline_stage: 2, micro_batch_num: 4}\n"
         "runner_config: {gradient_accumulation_steps: 8}\n",
         ["gradient_accumulation_steps = 8: in a pipeline it means micro_batch_num, which is 4 (a.yaml:18)"]),
        ("parallel_config: {pipeline_stage: 8, micro_batch_num: 8}\n", ["stage = 8: the model has 2 layers"]),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\nmodel.model_config.layers_group=2",
         ["layers_group = 2: the 2 layers that share attention weights must be in one"]),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\ndo_eval: True\n"
         "model.model_config.moe_config.expert_num=4", ["do_eval = true: not yet", "with experts in a pipeline"]),
        ("parallel_config: {model_parallel: 8}\n", ["= 8: must divide what it shards: 4 heads, 4 heads of k"]),
        ("parallel_config: {model_parallel: 4, use_seq_parallel: True}\nmodel.model_config.seq_length=7",
         ["use_seq_parallel = true: the 7 tokens of a micro-batch are not divisible by model_parallel 4"]),
        ("parallel.comm_fusion={'alltoall': {}}", ["MindSpore fuses allreduce, allgather, reducescatter"]),
        ("parallel.comm_fusion={'openstate': 1}", ["comm_fusion.openstate = 1: must be true or false"]),
        ("parallel.comm_fusion={'allreduce': {'mode': 'size'}}", ["allreduce = {'mode': 'size'}: must have the keys"]),
        ("parallel.comm_fusion={'allgather': {'mode': 'index', 'config': [1]}}", ["its mode must be auto or size"]),
        ("parallel.comm_fusion={'allreduce': {'mode': 'auto', 'config': 32}}", ["mode auto takes no config"]),
        ("parallel.comm_fusion={'reducescatter': {'mode': 'size', 'config': 0}}", ["a number of megabytes above 0"]),
        ("parallel.comm_fusion={'allreduce': {'mode': 'index', 'config': [2, 2]}}", ["is a list of ascending numbers"]),
        ("parallel_config: {data_parallel: 8}\nparallel.parallel_optimizer_config.optimizer_weight_shard_size=3",
         ["optimizer_weight_shard_size = 3: must divide data_parallel 8"]),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n"
         "parallel.pipeline_config.pipeline_scheduler=seqpipe",
         ["pipeline_scheduler = 'seqpipe': without pipeline_interleave MindSpore supports 1f1b only"]),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n"
         "parallel.pipeline_config={'pipeline_interleave': True, 'pipeline_scheduler': 'seqvpp'}",
         ["pipeline_scheduler = 'seqvpp': needs several model chunks of a stage", "set pp_interleave_num to 2"]),
        ("parallel_config: {pipeline_stage: 3, micro_batch_num: 3}\nmodel.model_config.num_layers=6\n"
         "model.model_config.pp_interleave_num=2\n"
         "parallel.pipeline_config={'pipeline_interleave': True, 'pipeline_scheduler': 'seqsmartvpp'}",
         ["pipeline_scheduler = 'seqsmartvpp': needs an even number of stages, not 3", "write seqvpp"]),
        ("parallel_config: {pipeline_stage: 4, micro_batch_num: 4}\nmodel.model_config.num_layers=4\n"
         "model.model_config.offset=[0,-1,0,1]", ["assigns no layer to pipeline stage 1"]),
        ("parallel_config: {data_parallel: 8}\nparallel.parallel_optimizer_config.optimizer_weight_shard_size=256\n"
         "parallel.enable_parallel_optimizer=True", ["optimizer_weight_shard_size = 256: the job has 8 ranks"]),
        ("parallel_config: {model_parallel: 2}\nparallel.parallel_optimizer_config.optimizer_weight_shard_size=3",
         ["optimizer_weight_shard_size = 3: must divide data_parallel 4"]),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\nmodel.model_config.pp_interleave_num=2",
         ["pp_interleave_num = 2: needs an interleaved", "parallel.pipeline_config.pipeline_interleave: true"]),
        ("parallel_config: {data_parallel: 3}\n", ["data_parallel 3 needs 3 ranks, but the job has 8"]),
        ("parallel_config: {context_parallel: 2}\n", ["context_parallel = 2: semi-automatic mode does not support"]),
        ("parallel_config: {expert_parallel: 2}\n", ["expert_parallel = 2: the model has no experts"]),
        ("parallel_config: {expert_parallel: 8}\nmodel.model_config.moe_config.expert_num=4",
         ["expert_parallel = 8: must divide the 4 experts of a layer"]),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\nmodel.model_config.moe_config.expert_num=4\n"
         "recompute_config: {recompute: True, parallel_optimizer_comm_recompute: True}\n"
         "parallel.enable_parallel_optimizer=True", ["with experts and recomputed blocks or experts in a pipeline"]),
        ("parallel_config: {data_parallel: 8}\nmodel.model_config.moe_config.expert_num=4\n"
         "runner_config.gradient_accumulation_steps=2\nrecompute_config: {select_recompute: {mlp: [0]}}\n"
         "parallel.parallel_optimizer_config.optimizer_level=level3\nparallel.enable_parallel_optimizer=True",
         ["with experts and recomputed blocks or experts in a pipeline or with accumulation: level3"]),
        ("parallel_config: {data_parallel: 8}\nmodel.model_config.hidden_dropout=0.1\n"
         "runner_config.gradient_accumulation_steps=2\nrecompute_config: {recompute: True}\n"
         "parallel.parallel_optimizer_config.optimizer_level=level3\nparallel.enable_parallel_optimizer=True",
         ["with dropout and recomputed blocks with accumulation: level3", "optimizer_level to level2"]),
        ("parallel_config: {data_parallel: 8}\nmodel.model_config.attention_sinks=True",
         ["attention_sinks = true: not yet supported in semi-automatic mode", "parallel.parallel_mode to 0"]),
        ("parallel_config: {data_parallel: 8}\nmodel.model_config.moe_config.expert_num=4\n"
         "model.model_config.moe_config.swiglu_limit=7.0\nmodel.model_config.moe_config.moe_router_has_bias=True\n"
         "model.model_config.moe_config.moe_mlp_has_bias=True",
         [f"moe_config.{name} = {value}: not yet supported in semi-automatic mode"
          for name, value in (("moe_mlp_has_bias", "true"), ("moe_router_has_bias", "true"), ("swiglu_limit", 7.0))]),
        ("optimizer: {type: Muon}\n", ["optimizer.type = 'Muon'", "AdamW or SGD"]),
        ("run_mode: eval\nload_checkpoint: .\n", ["'eval': semi-automatic mode supports train and finetune only"]),
    ],
)  # fmt: skip
def test_what_semi_automatic_mode_cannot_do_is_an_error(text: str, parts: list[str]) -> None:
    message = run_error("parallel: {parallel_mode: 1}\n" + text)
    assert all(part in message for part in parts), message
    assert "Fix: " in message


def test_semi_automatic_mode_is_for_decoders() -> None:
    text = f"{NO_DECODER_TEXT}parallel: {{parallel_mode: 1}}\n"
    [found] = semi_auto_problems(parse_config("a.yaml", text), EIGHT)
    assert "a.yaml:3: parallel.parallel_mode = 1: semi-automatic mode supports decoders only" in str(found.error)


def test_what_mindspore_documents_of_joined_collectives_is_taken() -> None:
    fusion = "{openstate: True, allreduce: {mode: index, config: [1, 5]}, allgather: {mode: size, config: 32},"
    text = f"parallel: {{parallel_mode: 1, comm_fusion: {fusion} reducescatter: {{mode: auto, config: null}}}}}}\n"
    config = load(BASE + text)
    preflight(config, EIGHT, select_execution_mode(config, EIGHT).problems())


def test_semi_automatic_mode_is_refused_where_the_run_would_be_on_a_cpu() -> None:
    """Before anything else is found wanting, whatever else there is."""
    text = BASE + "parallel: {parallel_mode: semi_auto_parallel}\nparallel_config: {model_parallel: 2}\n"
    with pytest.raises(UserError) as error:
        build_plan(load(text), EIGHT)
    said = str(error.value)
    assert "a.yaml:16: parallel.parallel_mode = 'semi_auto_parallel': semi-automatic mode requires Ascend" in said
    assert "this run uses the CPU" in said and "add --parallel_fallback explicit" in said
    select_execution_mode(load(text), SINGLE_PROCESS).check_device("CPU")  # not in force
    explicit = load(BASE + "parallel: {parallel_mode: 1}\n", "parallel.parallel_fallback=explicit")
    select_execution_mode(explicit, EIGHT).check_device("CPU")
    preflight(load(text), EIGHT, select_execution_mode(load(text), EIGHT).problems())  # nothing else is wrong with it


@pytest.mark.parametrize(
    ("text", "model", "said"),
    [
        ("{context_parallel: 2, context_parallel_algo: ulysses_cp}", "", "_algo = 'ulysses_cp': on an Ascend the rank"),
        (
            "{context_parallel: 4, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 2}", "",
            "_algo = 'hybrid_cp': on an Ascend the rank",
        ),
        ("{context_parallel: 2}", "attention_dropout: 0.1", "attention_dropout = 0.1: not yet supported with context"),
        ("{context_parallel: 2}", "use_flash_attention: False", "needs flash_attention_score, and use_flash_attention"),
        ("{context_parallel: 2}", LATENT.replace(", ", "\n    "), "context_parallel = 2: on an Ascend ranks do not"),
        ("{context_parallel: 2}", "head_dim: 24", "takes heads of a multiple of 16"),
        (
            "{expert_parallel: 2}", "moe_config: {expert_num: 4, moe_token_dispatcher_type: allgather}",
            "moe_token_dispatcher_type = 'allgather': not yet supported on an Ascend",
        ),
        (
            "{model_parallel: 2}", "moe_config: {expert_num: 4, capacity_factor: 1.5}",
            "capacity_factor = 1.5: not yet supported where ranks of an Ascend share",
        ),
        (
            "{pipeline_stage: 2, micro_batch_num: 2}\nparallel: {enable_parallel_optimizer: True}", "mtp_depth: 1",
            "enable_parallel_optimizer = true: not yet supported on an Ascend with an embedding that two stages",
        ),
        ("{pipeline_stage: 2, micro_batch_num: 2}\nrun_mode: predict", "", "prediction shards a model on CPUs only"),
        ("{model_parallel: 2}\nrun_mode: predict", "", "model_parallel = 2: prediction shards a model on CPUs only"),
    ],
)
def test_what_explicit_mode_cannot_do_on_an_ascend_is_refused(text: str, model: str, said: str) -> None:
    config = load(BASE.replace("model_config:", "model_config:\n    " + model, 1) + f"parallel_config: {text}\n")
    backend = select_execution_mode(config, EIGHT)
    backend.check_device("CPU")
    with pytest.raises(UserError, match=re.escape(said)):
        backend.check_device("Ascend")


def test_what_has_no_effect_in_semi_automatic_mode_is_told() -> None:
    pipeline = "parallel: {parallel_mode: 1}\nparallel_config: {pipeline_stage: 2, micro_batch_num: 4}\n"
    more = "runner_config: {gradient_accumulation_steps: 4}\n"
    notes = told(pipeline + more, EIGHT)
    assert "gradient_accumulation_steps 4: no effect in a pipeline" in notes
    assert "micro_batch_num 4 sets the micro-batches" in notes
    graph_alone = "parallel_config: {use_seq_parallel: True}\nrecompute_config: {mp_comm_recompute: False}\n"
    said = "recompute_config.mp_comm_recompute false: not used, only semi"
    assert said in told(graph_alone, EIGHT) and said not in told("parallel: {parallel_mode: 1}\n" + graph_alone, EIGHT)
    sharing = "parallel: {parallel_mode: 1, parallel_optimizer_config: {optimizer_level: level2}, "
    order, sequence = "pipeline_config: {pipeline_interleave: True}", "parallel_config: {use_seq_parallel: True}\n"
    notes = told(f"{sharing}{order}}}\n{sequence}")
    assert "optimizer_config.optimizer_level: not used, parallel.enable_parallel_optimizer is false" in notes
    assert "pipeline_interleave true: not used, parallel_config.pipeline_stage is 1" in notes
    assert "use_seq_parallel true: not used, parallel_config.model_parallel is 1" in notes
    degrees = "parallel_config: {pipeline_stage: 2, micro_batch_num: 2, model_parallel: 2, use_seq_parallel: True}\n"
    assert "not used" not in told(f"{sharing}enable_parallel_optimizer: True, {order}}}\n{degrees}")
    differs = load(BASE + pipeline + "runner_config: {gradient_accumulation_steps: 8}\n")
    # A problem only beside use_parallel True.
    preflight(differs, EIGHT, select_execution_mode(differs, EIGHT).problems())
    alone = "parallel: {parallel_mode: 1}\nparallel_config: {micro_batch_num: 4}\ncontext: {mode: 1}\n"
    notes = told(alone, EIGHT)
    assert "micro_batch_num 4: no effect without a pipeline" in notes and "context.mode 1: no effect" in notes
    assert "full_batch" not in told("parallel: {parallel_mode: 1, full_batch: False}\n", EIGHT)
    assert "full_batch false: not used" in told("parallel: {full_batch: false}\n", EIGHT)
    one = told("use_parallel: True\nparallel: {parallel_mode: 1}\n", SINGLE_PROCESS)
    assert "parallel_mode" not in one and "the job has one rank" in one


def test_every_rank_of_semi_automatic_mode_reads_the_rows_of_all() -> None:
    config = load(BASE + "parallel: {parallel_mode: 1}\nparallel_config: {model_parallel: 2, data_parallel: 4}\n"
                  "runner_config: {batch_size: 3, gradient_accumulation_steps: 5}\n")  # fmt: skip
    backend = select_execution_mode(config, EIGHT)
    read = backend.data_config.runner_config
    assert (read.batch_size, read.gradient_accumulation_steps, backend.data_ranks) == (12, 5, (0, 1))
    assert config.runner_config.batch_size == 3


def test_sharing_optimizer_state_needs_several_ranks() -> None:
    config = load(BASE + "parallel: {enable_parallel_optimizer: True}\n")
    assert shards_optimizer(config, EIGHT) and not shards_optimizer(config, SINGLE_PROCESS)
    assert not shards_optimizer(load(BASE), EIGHT)
    muon = load(BASE + "parallel: {enable_parallel_optimizer: True}\noptimizer: {type: Muon}\n")
    preflight(muon, SINGLE_PROCESS)
    preflight(muon, EIGHT)


def test_the_threshold_may_stand_in_either_place() -> None:
    assert shard_threshold_bytes(load(BASE)) == 64 * 1024
    for text in ("parallel_optimizer_config: {parallel_optimizer_threshold: 0}", "parallel_optimizer_threshold: 0"):
        assert shard_threshold_bytes(load(f"{BASE}parallel: {{{text}}}\n")) == 0
    assert shard_threshold_bytes(load(BASE, "parallel.parallel_optimizer_threshold=2")) == 2048
    both = "parallel: {parallel_optimizer_threshold: 1, parallel_optimizer_config: {parallel_optimizer_threshold: 2}}\n"
    assert "disagrees with" in error_of(both)
    again = parse_config("again.yaml", dump_config(load(BASE, "parallel.parallel_optimizer_threshold=2")))
    assert shard_threshold_bytes(again) == 2048


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("parallel: {parallel_mode: 4}\n", ["parallel_mode = 4: must be 0, 1, 2, 3"]),
        ("parallel: {parallel_mode: true}\n", ["parallel_mode = true: must be 0, 1, 2, 3, stand_alone"]),
        ("model_config: {num_labels: true}\n", ["num_labels = true: must be 1"]),
        ("parallel: {parallel_mode: semi_auto}\n", ["parallel_mode = 'semi_auto'", "write semi_auto_parallel"]),
        ("parallel: {parallel_optimizer_threshold: -1}\n", ["threshold = -1: must be at least 0"]),
        ("parallel_config: {data_parallel: 0}\n", ["data_parallel = 0: must be at least 1"]),
        ("use_parallel: 1\n", ["use_parallel = 1: must be true or false"]),
    ],
)
def test_values_of_another_kind_are_errors(text: str, parts: list[str]) -> None:
    message = error_of(text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("degrees", "native"),
    [
        ("model_parallel: 2", True), ("context_parallel: 2", True), ("pipeline_stage: 2, micro_batch_num: 2", False),
        ("data_parallel: 8", False),
    ],
)  # fmt: skip
def test_context_mode_1_and_ranks_that_compute_a_layer_together(degrees: str, native: bool) -> None:
    text = f"use_parallel: True\nparallel_config: {{{degrees}}}\ncontext: {{mode: 1}}\n"
    assert on_arrays(load(BASE + text), "CPU", EIGHT) == native
    assert ("context.mode 1: no effect on a CPU" in told(text, EIGHT)) == native
    assert ("context.mode 1 is for debugging" in told(text, EIGHT)) != native


METHODS = pytest.mark.parametrize("method", ["init_lora_weights=pissa", "use_dora=True", "base_dtype=nf4"])
PET = "model.model_config.pet_config"


@METHODS
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("parallel_config: {model_parallel: 2}\n", "data parallelism only"),
        ("parallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n", "data parallelism only"),
        (
            "parallel: {enable_parallel_optimizer: True, parallel_optimizer_config: {optimizer_level: level3}}\n",
            "data parallelism only",
        ),
        ("parallel: {parallel_mode: 1}\n", "not yet supported in semi-automatic mode"),
    ],
    ids=["tensor", "pipeline", "level 3", "semi-automatic"],
)
def test_adapters_from_whole_matrices_need_whole_matrices(text: str, what: str, method: str) -> None:
    message = run_error(text, EIGHT, f"{PET}.lora_rank=4", f"{PET}.{method}")
    assert f"{PET}.{method.split('=')[0]}" in message and what in message and message.count("Fix:") == 1
    replicas = load(f"{BASE}parallel: {{enable_parallel_optimizer: True}}\n", f"{PET}.{method}")
    preflight(replicas, EIGHT, select_execution_mode(replicas, EIGHT).problems())


@pytest.mark.parametrize("key", ["ema_decay=0.9", "type=PmaAdamW"])
def test_averages_of_weights_are_for_explicit_mode_on_cpus(key: str) -> None:
    optimizer = f"optimizer.{key}"
    message = run_error("parallel: {parallel_mode: 1}\n", EIGHT, optimizer)
    assert f"optimizer.{key.split('=')[0]}" in message and message.count("Fix:") == 1
    assert "not yet supported in semi-automatic mode" in message
    config = load(BASE, optimizer)
    with pytest.raises(UserError, match="is supported on a CPU only"):
        select_execution_mode(config, SINGLE_PROCESS).check_device("Ascend")
    select_execution_mode(config, SINGLE_PROCESS).check_device("CPU")


def test_evaluations_of_averages_need_averages() -> None:
    message = run_error("", SINGLE_PROCESS, "use_ema=True", "do_eval=True", "train_dataset.held_out=0.1")
    assert "use_ema = true: the training keeps no averages of its weights" in message
    assert "is 0.488 times a mean" in told("optimizer: {type: PmaAdamW, fused_num: 3}\n", SINGLE_PROCESS)


MODEL_KEYS = "model.model_config"
WEIGHTS = "train_dataset.data_loader.columns"
TERMS = {
    f"{MODEL_KEYS}.label_smoothing": "0.1", f"{MODEL_KEYS}.z_loss_weight": "1e-4",
    f"{MODEL_KEYS}.neftune_noise_alpha": "5", WEIGHTS: "{weight: weight}",
}  # fmt: skip
RECORDS = ["train_dataset.data_loader.type=JsonlDataset"]
CELLS = "anything but native layers on a CPU"


@pytest.mark.parametrize("key", TERMS)
def test_terms_noise_and_weights_say_at_once_what_they_lack(key: str) -> None:
    """One message names everything that is not supported beside a key."""
    mine = [*RECORDS, f"{key}={TERMS[key]}"]

    def lacking(*others: str) -> str:
        config = load(BASE, *mine, *others)
        native = on_arrays(config, "CPU", SINGLE_PROCESS)
        messages = [str(each.error) for each in term_problems(config, native)]
        assert len(messages) <= 1 and all(key in message for message in messages)
        return "".join(messages)

    is_noise = "neftune" in key
    assert not lacking()
    assert f"is not yet supported with {CELLS}" in lacking("context.mode=1")
    others = "a loss of preferences (simpo), multi-token prediction"
    found = lacking("context.mode=1", "loss.type=simpo", f"{MODEL_KEYS}.mtp_depth=1")
    assert CELLS in found and (others in found) != is_noise
    assert ("embedding_multiplier 2" in lacking(f"{MODEL_KEYS}.embedding_multiplier=2")) == is_noise
    assert ("with experts" in lacking(f"{MODEL_KEYS}.moe_config.expert_num=4")) == (key == WEIGHTS)


@pytest.mark.parametrize(
    ("text", "device"), [("context: {mode: 1}\n", "CPU"), ("", "Ascend")], ids=["mode 1", "Ascend"]
)
def test_a_base_in_few_bytes_needs_the_array_engine(text: str, device: str) -> None:
    config = load(BASE + text, f"{PET}.base_dtype=int8")
    with pytest.raises(UserError) as caught:
        select_execution_mode(config, SINGLE_PROCESS).check_device(device)
    message = str(caught.value)
    assert f"{PET}.base_dtype" in message and "array engine of CPUs only" in message and "Fix: leave it out" in message
    select_execution_mode(load(BASE, f"{PET}.base_dtype=int8"), SINGLE_PROCESS).check_device("CPU")


TEACHER_LACKS = {
    "": [CELLS, "multi-token prediction", "model_parallel 2", "context_parallel 2"],
    "parallel_config.pipeline_stage=2": ["pipeline_stage 2"],
    "parallel.parallel_mode=1": [CELLS],
}


@pytest.mark.parametrize("change", TEACHER_LACKS)
def test_a_distillation_says_at_once_what_it_lacks(change: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 4000}')
    changes = [change]
    if not change:
        degrees = [f"parallel_config.{name}=2" for name in ("model_parallel", "context_parallel")]
        changes = ["context.device_target=Ascend", f"{MODEL_KEYS}.mtp_depth=1", *degrees]
    config = load(BASE, "loss.type=distillation", f"loss.teacher={tmp_path}", *changes)
    native = on_arrays(config, config.context.device_target or "CPU", EIGHT)
    first, *others = (str(each.error) for each in distillation_problems(config, EIGHT, native))
    assert "a distillation is not yet supported with" in first and first.count("Fix:") == 1
    assert all(text in first for text in TEACHER_LACKS[change])
    assert all("its vocabulary has 4,000 tokens" in text for text in others) and len(others) <= 1
