"""The command `smoke` for several files: tries all, and writes the reports."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.ci.files import find_training_files
from trainer.ci.plans import plan_with_changes
from trainer.ci.report import junit_xml, markdown
from trainer.ci.run import smoke_files
from trainer.cli.flags import Arguments
from trainer.errors import EXIT_OK, UserError
from trainer.input_files import user_path
from trainer.monitors.files import write_text

_FOLDER = "output/smoke"


def smoke_all(
    arguments: Arguments, names: Sequence[str], against: str | None, reports: dict[str, Path | None], ranks: int,
    steps: int, as_json: bool,
) -> int:  # fmt: skip
    """Smokes files and returns the exit code of the worst: 2 if one is wrong, else 1 if one failed.

    Args:
        names: Files and folders; empty: what changed since `against`.
        against: A git revision whose plans are compared, or None.
        reports: The files for `junit` and `summary`, or None.

    Raises:
        UserError: A path or the revision does not exist, or a report cannot be written.
    """
    if arguments.config is not None:
        names = [arguments.config, *names]
    paths = {kind: user_path(path, f"flag --{kind}") for kind, path in reports.items() if path is not None}
    for kind, path in paths.items():
        if not path.absolute().parent.is_dir():
            raise UserError("its folder does not exist", where=f"flag --{kind}", value=str(path), fix="create it first")
    files = find_training_files(names, against)
    folder = next((one.text for one in reversed(arguments.overrides) if one.key == "output_dir"), _FOLDER)
    settings = [each.flag for each in arguments.overrides if not each.only_if_present and each.key != "output_dir"]
    flags = [f"--steps={steps}", f"--ranks={ranks}", *settings]  # the folders are those of the files
    output = sys.stdout
    if as_json:
        output = sys.stderr
    report_progress = functools.partial(print, file=output, flush=True)
    if not files:
        report_progress("there is no training file, or none was added or changed")
    outcomes = smoke_files(files, flags, Path(folder).expanduser(), ranks, report_progress)
    if "junit" in paths:
        write_text(paths["junit"], junit_xml(outcomes))
    if "summary" in paths:
        plans = [plan_with_changes(file) for file in files]
        write_text(paths["summary"], markdown(outcomes, plans, against))
    if as_json:
        print(json.dumps([{"file": str(each.file.path), "result": each.verdict.lower(), "problem": each.problem,
                           "exit_code": each.exit_code, **each.values} for each in outcomes], indent=1))  # fmt: skip
    return max((outcome.exit_code for outcome in outcomes), default=EXIT_OK)
