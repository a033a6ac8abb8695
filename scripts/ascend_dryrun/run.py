"""Runs a script of your own with MindSpore's Ascend backend in its dry run, without an Ascend (g++ is needed).

    python scripts/ascend_dryrun/run.py my_script.py ARGUMENTS
    RANK_SIZE=8 RANK_ID=3 python scripts/ascend_dryrun/run.py my_script.py      # as one rank of a job

The script calls `mindspore.set_device("Ascend")`; docs/ascend.md says what a dry run shows. For a training file use
`run_trainer.py plan --dryrun ascend`.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.dryrun.cann_stubs import build_cann_stubs  # noqa: E402
from trainer.dryrun.process import environment  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("RANK_SIZE", "1"), ("RANK_ID", "0")))
    try:
        variables = environment(os.environ, build_cann_stubs(), ranks, rank)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], variables)
