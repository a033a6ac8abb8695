"""What a run needs beyond a valid file: a section copied from documentation loads, but cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config.checks.parallel import parallel_problems
from trainer.config.checks.problem import NOWHERE, Problem, SourceLocation, raise_problems
from trainer.config.schema.root import Config
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS, World

_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size")


def check_runnable(
    config: Config, world: World = SINGLE_PROCESS, of_backend: Sequence[Problem] = ()
) -> None:
    """Checks what ``run_mode`` needs; looks at the disk for ``output_dir`` and ``load_checkpoint`` only.

    Args:
        config: Of the run.
        world: The job it runs in.
        of_backend: What its training backend finds wrong, to be told together with the rest.

    Raises:
        UserError: Sizes of the model are missing, there are no weights or prompts, nothing to evaluate on,
            ``output_dir`` is a file, or the file asks for other ranks than the job has.
    """
    checks = (_model, _weights, _adapters, _evaluation, _prompts, _output)
    found = [problem for check in checks for problem in check(config)]
    raise_problems([*found, *parallel_problems(config, world), *of_backend])


def _problem(config: Config, key: str, rule: str, fix: str, *, because: str = "", value: object = None) -> Problem:
    place = config.source.place(key)
    if place == NOWHERE:
        place = config.source.place(because) if because else NOWHERE
    if place == NOWHERE:
        place = SourceLocation(0, config.source.path)
    shown = {"value": value} if value is not None else {}
    return Problem(place, UserError(rule, where=place.text, key=key, fix=fix, **shown))


def _model(config: Config) -> list[Problem]:
    if config.classifier is not None:  # its defaults are a model to run
        return []
    missing = [name for name in _SIZES if not config.source.where(f"model.model_config.{name}")]
    if not config.source.path or not missing:
        return []
    key = "model.model_config"
    rule = f"a run needs the sizes of its model; missing: {', '.join(missing)}"
    return [_problem(config, key, rule, "write them in model.model_config, as configs/quickstart.yaml does")]


def _weights(config: Config) -> list[Problem]:
    mode, path = config.run_mode, config.load_checkpoint
    if path and not Path(path).expanduser().exists():
        fix = "name a checkpoint folder (output/checkpoints/step-...) or a .safetensors file"
        return [_problem(config, "load_checkpoint", "the path does not exist", fix, value=path)]
    # A checkpoint of adapters holds no base weights: a run that resumes needs them too.
    resumes = mode == "finetune" and config.resume_training is not False and config.decoder.pet_config is None
    if mode != "train" and not path and not resumes:
        fix = "give --load_checkpoint output/checkpoints/step-..., or use run_mode train"
        return [
            _problem(config, "load_checkpoint", f"run_mode {mode} needs weights", fix, because="run_mode", value="")
        ]
    return []


def _adapters(config: Config) -> list[Problem]:
    path, key = config.adapter_id, "adapter_id"
    if path and not Path(path).expanduser().exists():
        fix = "name a folder with adapter_model.safetensors, or the checkpoints of a training with pet_config"
        return [_problem(config, key, "the path does not exist", fix, value=path)]
    if config.run_mode in ("eval", "predict") and config.decoder.pet_config is not None and not path:
        rule = f"run_mode {config.run_mode} with pet_config needs adapters"
        fix = "give --adapter_id output/checkpoints, or leave pet_config out for the base model alone"
        return [_problem(config, key, rule, fix, because="run_mode", value="")]
    return []


def _evaluation(config: Config) -> list[Problem]:
    asked = "do_eval" if config.do_eval and config.trains else ""
    asked = "run_mode" if config.run_mode == "eval" else asked
    if not asked or config.eval_dataset is not None or config.train_dataset.held_out:
        return []
    fix = "set train_dataset.held_out, for example to 0.05, or write an eval_dataset"
    return [_problem(config, asked, "there is nothing to evaluate on", fix, value=getattr(config, asked))]


def _prompts(config: Config) -> list[Problem]:
    if config.run_mode != "predict" or config.predict_data:
        return []
    fix = 'give --predict_data "Once upon a time"'
    return [_problem(config, "predict_data", "run_mode predict needs prompts", fix, because="run_mode")]


def _output(config: Config) -> list[Problem]:
    folder = Path(config.output_dir).expanduser()
    blocking = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if blocking is None or blocking.is_dir():
        return []
    rule = "is a file, not a folder" if blocking == folder else f"{blocking} is a file, not a folder"
    return [_problem(config, "output_dir", rule, "give another --output_dir", value=config.output_dir)]
