"""Training from Python: the examples of docs/training.md, run as they stand there, and what a run can be asked."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from fork_server import FORKED, REPOSITORY, ensure_server
from run_helpers import settings, steps_done, write_config

from trainer.errors import UserError

NOTHING_LOADED = """
import sys
import trainer
assert [name for name in sys.modules if name.startswith("trainer.")] == [], "import trainer is free of work"
assert trainer.__version__ and set(trainer.__all__) == {"Run", "load", "train"}
"""


@pytest.fixture(scope="module")
def run(home: Path):
    from trainer import train

    return train(write_config(home, home / "data"), stop_step=4, do_eval=True, eval_step_interval=2,
                 **{"optimizer.eps": 1e-7})  # fmt: skip


def test_a_run_tells_what_it_did(run) -> None:
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4]
    assert [(each["step"], each["epoch"]) for each in run.evaluations] == [(2, 1), (4, 1)]
    assert (run.exit_code, run.summary.outcome, run.checkpoint.name) == (0, "finished", "step-00000004")
    assert run.record.config.optimizer.eps == 1e-7
    assert repr(run) == f"run {run.folder}: finished at step 4 of 4"


def test_a_run_is_drawn_and_shown_as_a_picture(run) -> None:
    figure = run.plot()
    assert figure.axes[0].get_title(loc="left").startswith("loss")
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_table_of_pandas_where_it_is_installed(run) -> None:
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(UserError, match=r"pandas is not installed.\n  Fix: pip install pandas; run.metrics has "):
            run.frame()
        return
    table = run.frame()
    assert table.index.tolist() == [1, 2, 3, 4] and table["loss"].tolist() == [step["loss"] for step in run.metrics]
    assert table["eval_loss"].notna().tolist() == [False, True, False, True]


def test_a_run_is_found_again_and_its_model_writes(run, capfd: pytest.CaptureFixture) -> None:
    from trainer import load

    found = load(str(run.folder))
    assert (found.metrics, found.exit_code, found.summary) == (run.metrics, 0, None)
    capfd.readouterr()
    texts = found.generate(["the cat", "a dog"], max_new_tokens=3)
    assert found.generate("the cat", max_new_tokens=3) == texts[0] and len(texts) == 2
    of_a_job = {"use_parallel": True, "parallel_config.pipeline_stage": 2, "parallel_config.micro_batch_num": 2}
    assert found.generate("the cat", max_new_tokens=3, **of_a_job) == texts[0], "as in the file of a job of two ranks"
    assert capfd.readouterr().out == "" and not (run.folder / "predictions.jsonl").exists()


def test_a_mistake_is_an_exception_with_the_text_of_the_command_line(home: Path, run) -> None:
    from trainer import load, train

    path = run.folder / "config.yaml"
    for call, text in (
        (lambda: train(path, stop_stp=3), "flag --stop_stp: unknown flag.\n  Fix: you probably mean --stop_step"),
        (lambda: train(path, batch_size="many"), "flag --batch_size: runner_config.batch_size = 'many'"),
        (lambda: train(path, run_mode="predict", predict_data=["x"]), "'predict': must be train or finetune"),
        (lambda: train(run.record.config, seed=3), "flag --seed: a loaded configuration takes no flags"),
        (lambda: load(home), f"folder = '{home}': is not the folder of a run"),
        (lambda: run.generate(""), "predict_data = ''"),
        (lambda: train(None), "train: config = null: must be a YAML file, its content as a mapping"),
        (lambda: train(5), "config = 5: must be a YAML file"),
        (lambda: load(None), "load: folder = null: is not the folder of a run.\n  Fix: give the output_dir of a"),
        (lambda: run.generate(5), "generate: prompts = 5: must be a text, or a list of texts.\n  Fix: write run."),
        (lambda: run.generate(["a", 5]), "must be a text, or a list of texts"),
        (lambda: run.generate([]), "prompts = []: must be a text"),
        (lambda: run.generate(b"a"), "must be a text"),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert text in str(error.value)


def test_an_interrupt_saves_and_the_next_run_goes_on(home: Path) -> None:
    from trainer import train

    values = settings(home / "long", home / "data")
    values["runner_config"]["epochs"] = 100_000
    output = Path(values["output_dir"])

    def interrupt() -> None:
        while steps_done(output) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    stopped = train(values)
    # MindSpore makes a SIGTERM of it, where this process has called a compiled function.
    assert stopped.exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    step = stopped.metrics[-1]["step"]
    assert step >= 3 and stopped.checkpoint.name == f"step-{step:08d}"
    again = train(yaml.safe_load(stopped.folder.joinpath("config.yaml").read_text()), stop_step=step + 2,
                  resume_training=True)  # fmt: skip
    assert [one["step"] for one in again.metrics] == list(range(1, step + 3))


def test_a_thread_trains_too(home: Path) -> None:
    from trainer import train

    found: list = []
    path = write_config(home / "thread", home / "data")
    worker = threading.Thread(target=lambda: found.append(train(path, stop_step=1)))
    worker.start()
    worker.join()
    assert found[0].metrics[-1]["step"] == 1


def test_a_kernel_shows_the_progress_and_survives_an_interrupt(home: Path) -> None:
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client").manager.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(REPOSITORY), env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    client = manager.client()
    client.start_channels()

    def outputs(code: str, interrupt_at: int = 0) -> list[tuple[str, dict]]:
        asked, found, left = client.execute(code), [], interrupt_at
        while True:
            try:
                message = client.get_iopub_msg(timeout=0.1 if left else 120)
            except queue.Empty:
                message = {"parent_header": {}}
            if left and steps_done(output) >= left:
                manager.interrupt_kernel()
                left = 0
            if message["parent_header"].get("msg_id") == asked:
                if message["content"].get("execution_state") == "idle":
                    return found
                found.append((message["msg_type"], message["content"]))

    try:
        client.wait_for_ready(timeout=60)
        path, output = write_config(home / "kernel", home / "data"), home / "kernel" / "output"
        shown = outputs(f"from trainer import train; run = train({str(path)!r}, epochs=100000)", interrupt_at=30)
        lines = [content["data"]["text/plain"] for kind, content in shown if kind == "update_display_data"]
        assert re.match(r"step +\d+/\d+  loss ", lines[-1])
        printed = "".join(content["text"] for kind, content in shown if kind == "stream")
        assert "stopped by SIG" in printed and "checkpoint of step" in printed
        ((_, picture),) = [each for each in outputs("run.plot()") if each[0] == "execute_result"]
        assert "image/png" in picture["data"]
    finally:
        manager.shutdown_kernel(now=True)


def test_importing_the_package_loads_nothing() -> None:
    subprocess.run([sys.executable, "-c", NOTHING_LOADED], cwd=REPOSITORY, check=True)


def test_the_examples_train(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (of_steps,) = (text for text in blocks if "open_training" in text)
    (of_runs,) = (text for text in blocks if "from trainer import load, train" in text)
    of_runs = of_runs.replace("output/notebook", str(tmp_path / "output")).replace("stop_step=20", "stop_step=10")
    example = of_runs + of_steps
    program = tmp_path / "notebook.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{example}", encoding="utf-8")
    ensure_server()
    command = [sys.executable, FORKED, program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for start, lines in ((r"\| ", 2), ("^", 20)):
        losses = [float(loss) for loss in re.findall(rf"{start}loss ([\d.]+) ", done.stdout, re.M)]
        assert len(losses) == lines
        assert losses[-1] < losses[0] - 0.5  # the text is Python's library, of any version


_SCRIPT = """
from trainer import train
run = train({config!r}, stop_step=500, do_eval=False, sample_prompt=None, report=False, output_dir={folder!r})
print("exit code", run.exit_code, run.checkpoint.name)
"""


def test_an_interrupt_ends_a_run_of_a_python_program_with_a_checkpoint(tmp_path: Path) -> None:
    """Two signals within a moment, which MindSpore's own handler takes for a crash of the process."""
    folder = tmp_path / "run"
    script = _SCRIPT.format(config=str(REPOSITORY / "configs" / "quickstart.yaml"), folder=str(folder))
    with (tmp_path / "out").open("w+") as out:
        program = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=out, stderr=out)
        metrics, until = folder / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert program.poll() is None and time.monotonic() < until, (tmp_path / "out").read_text()
            time.sleep(0.05)
        for _ in range(2):
            program.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert program.wait(60) == 0, (tmp_path / "out").read_text()
    last = (tmp_path / "out").read_text().splitlines()[-1]
    assert last.startswith("exit code 130 step-")
