"""What a run needs beyond a valid file: a section copied from documentation loads, but cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config.checks.parallel import parallel_problems
from trainer.config.checks.problem import NO_VALUE, Problem, problem, raise_problems
from trainer.config.schema.root import Config
from trainer.parallel.world import SINGLE_PROCESS, World

_MODEL = "model.model_config"
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size")


def preflight(config: Config, world: World = SINGLE_PROCESS, of_backend: Sequence[Problem] = ()) -> None:
    """Checks what ``run_mode`` needs, as one of the ranks of `world`.

    Looks at the disk for ``output_dir``, ``load_checkpoint`` and ``adapter_id`` only.

    Args:
        config: A valid one.
        world: The job that the run is part of.
        of_backend: What the training backend finds wrong, to be told together with the rest.

    Raises:
        UserError: Sizes of the model are missing, there are no weights or prompts, nothing to evaluate on,
            ``output_dir`` is a file, or the file asks for other ranks than the job has.
    """
    raise_problems([*_run(config), *parallel_problems(config, world), *of_backend])


def _run(config: Config) -> Iterator[Problem]:
    mode, decoder = config.run_mode, config.decoder
    missing = [name for name in _SIZES if not config.source.where(f"{_MODEL}.{name}")]
    if config.source.path and missing and config.classifier is None:  # a classifier's defaults are a model to run
        rule = f"a run needs the sizes of its model; missing: {', '.join(missing)}"
        fix = f"write them in {_MODEL}, as configs/quickstart.yaml does"
        yield problem(config, _MODEL, rule, fix, value=NO_VALUE)
    # A checkpoint of adapters holds no base model: a run that resumes needs one too.
    resumes = mode == "finetune" and config.resume_training is not False and decoder.pet_config is None
    if not _exists(config.load_checkpoint):
        fix = "name a checkpoint folder (output/checkpoints/step-...) or a .safetensors file"
        yield problem(config, "load_checkpoint", "the path does not exist", fix)
    elif mode != "train" and not config.load_checkpoint and not resumes:
        fix = "give --load_checkpoint output/checkpoints/step-..., or use run_mode train"
        yield problem(config, "load_checkpoint", f"run_mode {mode} needs weights", fix, because="run_mode")
    if not _exists(config.adapter_id):
        fix = "name a folder with adapter_model.safetensors, or the checkpoints of a training with pet_config"
        yield problem(config, "adapter_id", "the path does not exist", fix)
    elif not config.trains and decoder.pet_config is not None and not config.adapter_id:
        fix = "give --adapter_id output/checkpoints, or leave pet_config out for the base model alone"
        yield problem(config, "adapter_id", f"run_mode {mode} with pet_config needs adapters", fix, because="run_mode")
    asked = "run_mode" if mode == "eval" else "do_eval" if config.do_eval and config.trains else ""
    if asked and config.eval_dataset is None and not config.train_dataset.held_out:
        fix = "set train_dataset.held_out, for example to 0.05, or write an eval_dataset"
        yield problem(config, asked, "there is nothing to evaluate on", fix)
    if mode == "predict" and not config.predict_data:
        fix = 'give --predict_data "Once upon a time"'
        yield problem(config, "predict_data", "run_mode predict needs prompts", fix, because="run_mode")
    folder = Path(config.output_dir).expanduser()
    blocking = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if blocking is not None and not blocking.is_dir():
        rule = "is a file, not a folder" if blocking == folder else f"{blocking} is a file, not a folder"
        yield problem(config, "output_dir", rule, "give another --output_dir")


def _exists(path: str | None) -> bool:
    return not path or Path(path).expanduser().exists()
