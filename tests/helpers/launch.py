"""Starts scripts and functions in processes of their own, forks of a server that has imported the
packages, so that none waits seconds for its imports. The slow tests start real commands."""

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path

import torch
from scripts import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch.utils.tensorboard", "tyro", "gymnasium", "pytest"]
    + ["transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"]
)


def is_ours(path) -> bool:
    return str(path).startswith(str(ROOT)) and "site-packages" not in str(path)


def become(target, environment: dict, files: list[Path]):
    """In the new process: call the function, or run the script as a command would. Our modules are
    imported again, as they read RANK then."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = os.fdopen(1, "w", encoding=environment.get("PYTHONIOENCODING"))
    sys.stderr = os.fdopen(2, "w", 1)
    for name, module in list(sys.modules.items()):
        if is_ours(getattr(module, "__file__", None)):
            del sys.modules[name]
    torch.set_num_threads(1)  # two threads in each of two processes would wait for each other
    os.chdir(ROOT)
    if callable(target):
        return target()
    sys.argv = target
    others = [path for path in sys.path if not is_ours(path)]
    sys.path[:] = [str(Path(target[0]).resolve().parent), *others]
    runpy.run_path(target[0], run_name="__main__")


class Launched:
    """A running script with its flags, or a running function."""

    def __init__(self, *command, environment: dict | None = None):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for file in self.files:
            file.touch()
        target = command[0] if callable(command[0]) else [str(part) for part in command]
        inputs = (target, environment or dict(os.environ), self.files)
        self.process = CONTEXT.Process(target=become, args=inputs)
        self.process.start()
        self.kill = self.process.kill
        atexit.register(self.kill)  # if a test fails that waits for it

    def wait(self, seconds: float = 120):
        """Its exit status; minus the number of the signal that has ended it."""
        self.process.join(seconds)
        status = self.process.exitcode
        assert status is not None, f"still running after {seconds} s\n{self.stderr[-3000:]}"
        return status

    stdout = property(lambda self: self.files[0].read_text())
    stderr = property(lambda self: self.files[1].read_text())


def run(*command, **options) -> Launched:
    """Start a script or a function, wait for its end, expect success."""
    process = Launched(*command, **options)
    assert process.wait() == 0, process.stderr[-3000:]
    return process


def side_by_side(function) -> list[Launched]:
    """Call it in two processes that find each other, as torchrun's would; wait for success."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    launched = [Launched(function, environment=common | rank) for rank in ranks]
    statuses = [process.wait() for process in launched]
    assert statuses == [0, 0], "".join(process.stderr for process in launched)
    return launched


def flags(values: dict) -> list[str]:
    """{"eval_problems": 8} as it is typed: --eval-problems 8."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items()}
    return [part for pair in named.items() for part in pair]
