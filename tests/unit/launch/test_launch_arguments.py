"""The options of `launch` and the positional arguments of msrun_launcher.sh."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.launch.arguments import (
    PROGRAM,
    LaunchOptions,
    find_script,
    read_options,
    read_positional,
    split_order,
    to_arguments,
)


def test_everything_else_is_the_workers_unchanged() -> None:
    words = ["--config", "a b.yaml", "--nproc", "4", "--epochs=3", "--predict_data", "$x", "ü", "--log-dir=l", "--join"]
    options = read_options([*words, "False", "--hang_timeout", "1.5", "--force", "--use_clip_grad"])
    assert options.arguments == (
        "--config", "a b.yaml", "--epochs=3", "--predict_data", "$x", "ü", "--use_clip_grad",
    )  # fmt: skip
    assert (options.worker_num, options.local_worker_num) == (4, 4)
    assert (options.log_dir, options.join, options.hang_timeout, options.force) == (Path("l"), False, 1.5, True)
    assert options.script is None and options.master_port is None


def test_defaults() -> None:
    options = read_options([])
    assert options == LaunchOptions()
    assert options.log_dir == Path("output/msrun_log")
    for words in (["--output_dir", "x", "--config", "a.yaml"], ["--output_dir=y", "--output-dir", "x"]):
        assert read_options(words).log_dir == Path("x/msrun_log")
    assert read_options(["--output_dir", "x", "--log_dir", "l"]).log_dir == Path("l")
    assert (options.worker_num, options.join, options.cluster_time_out, options.hang_timeout) == (8, True, 7200, 600)
    assert list(options.ranks) == list(range(8)) and options.nodes == 1


def test_options_survive_their_command_line(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.touch()
    for options in (
        LaunchOptions(),
        LaunchOptions(
            4, 2, "::1", 9000, 1, Path("a b"), False, 60, 9.5, 0.5, 3, True, True, script, ("--config", "x y", "ü")
        ),
    ):
        assert read_options(to_arguments(options)) == options


def test_ranks_are_those_that_msrun_gives() -> None:
    options = LaunchOptions(worker_num=6, local_worker_num=2, node_rank=2)
    assert options.nodes == 3 and list(options.ranks) == [4, 5]
    # msrun ignores a node rank where all workers are on one node.
    assert list(LaunchOptions(worker_num=2, local_worker_num=2, node_rank=1).ranks) == [0, 1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run_trainer.py"], LaunchOptions(join=False)),
        (["run_trainer.py", "2"], LaunchOptions(2, 2, join=False)),
        (
            ["run_trainer.py", "2", "9000", "logs", "True", "60"],
            LaunchOptions(2, 2, master_port=9000, log_dir=Path("logs"), join=True, cluster_time_out=60),
        ),
        (
            ["run_trainer.py", "4", "2", "10.0.0.1", "9000", "1", "logs", "false", "60"],
            LaunchOptions(4, 2, "10.0.0.1", 9000, 1, Path("logs"), False, 60),
        ),
    ],
    ids=["1", "2", "6", "9"],
)
def test_positional_arguments(words: list[str], expected: LaunchOptions) -> None:
    assert read_positional(words, {}) == expected


def test_options_of_launch_alone_may_stand_in_the_order() -> None:
    options = read_positional(["run_trainer.py --config a.yaml --hang_timeout 9 --seed 3", "2"], {"MF_LOG_SUFFIX": "x"})
    assert options.hang_timeout == 9 and options.arguments == ("--config", "a.yaml", "--seed", "3")
    assert options.log_dir == Path("output/msrun_log_x")


def test_an_order_is_split_as_by_a_shell_but_not_expanded() -> None:
    script, words = split_order("""python run_trainer.py --a 'x "y" $HOME' "it's" `id` $(id) * ü\\ b""")
    assert script is None
    assert words == ["--a", 'x "y" $HOME', "it's", "`id`", "$(id)", "*", "ü b"]


def test_a_script_is_found_here_or_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_script("run_trainer.py") is None and find_script(str(PROGRAM)) is None
    own = tmp_path / "run_trainer.py"
    own.touch()
    assert find_script("run_trainer.py") == own
    (tmp_path / "link.py").symlink_to(PROGRAM)
    assert find_script("link.py") is None
    for option in ("--log_dir", "--script"):
        with pytest.raises(UserError, match="this machine has no user 'nosuchuser'") as caught:
            read_options([option, "~nosuchuser/x"])
        assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="no such file, neither in"):
        find_script("absent.py")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--nproc"], ["--nproc", "needs a value"]),
        (["--nproc", "two"], ["--nproc", "'two'", "must be an integer"]),
        (["--nproc", "2.0"], ["must be an integer"]),
        (["--hang_timeout", "-1"], ["--hang_timeout", "at least 0"]),
        (["--hang_timeout", "inf"], ["--hang_timeout"]),
        (["--hang_timeout", "nan"], ["--hang_timeout"]),
        (["--join", "maybe"], ["--join", "true or false"]),
        (["--script", "absent.py"], ["absent.py", "no such file"]),
    ],
)
def test_bad_options(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_options(words)
    assert all(part in str(caught.value) for part in parts), caught.value
