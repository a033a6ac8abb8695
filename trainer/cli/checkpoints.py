"""The commands that use the model of a checkpoint: chat, eval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from trainer.cli.loading import ConfigFile, Options, load_file, run_config
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.cli.flags import Arguments

checkpoints = typer.Typer()

_Checkpoint = Annotated[str, Argument(metavar="CHECKPOINT", help="The folder.", show_default=False)]
_OptionalCheckpoint = Annotated[
    str | None, Argument(metavar="[CHECKPOINT]", help="The folder; without it --config FILE.", show_default=False)
]


@checkpoints.command("chat")
def _chat(context: typer.Context, checkpoint: _Checkpoint, config: ConfigFile = None, options: Options = None) -> int:
    """Talks with the model of a checkpoint, with the chat template of its tokenizer.

    The checkpoint is one of this trainer, a folder of them, or a model folder of Hugging Face. From a pipe each line is
    a message.
    """
    from trainer.run.chat import checkpoint_config

    arguments: Arguments = context.obj
    loaded = checkpoint_config(checkpoint, arguments.config, arguments.overrides, "chat")
    return run_config(loaded)


@checkpoints.command("eval")
def _eval(
    context: typer.Context, checkpoint: _OptionalCheckpoint = None, config: ConfigFile = None, options: Options = None
) -> int:
    """Evaluates a model: its loss on the evaluation data, or --tasks of EleutherAI's lm-eval.

    The checkpoint is one as for chat. Tasks print the table of lm-eval, and write lm_eval.json to the output folder.
    """
    from trainer.config import Override
    from trainer.run.chat import checkpoint_config

    arguments: Arguments = context.obj
    if checkpoint is None and arguments.config is None:
        rule = "eval needs a model: the output folder of a training, one of its checkpoints, or a model folder"
        fix = "write eval output/quickstart, or eval --config FILE --load_checkpoint output/quickstart"
        raise UserError(rule, key="CHECKPOINT", fix=fix)
    if checkpoint is None:
        arguments.overrides.append(Override("run_mode", "eval", "eval"))
        loaded = load_file(arguments)
    else:
        loaded = checkpoint_config(checkpoint, arguments.config, arguments.overrides, "eval")
    return run_config(loaded)
