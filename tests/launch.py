"""Scripts in processes of their own, without the seconds that each import of torch takes.

A fork server (multiprocessing's) imports the packages once and runs nothing; each new process is
forked off it and then does what `python SCRIPT FLAGS` would do, in the same folder, with the same
exit status. Where a system has no fork, a process imports the packages itself. What the
interpreter, the shell or torchrun do is left to the slow tests, which start real commands.
"""

import functools
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
PACKAGES = [
    "launch",
    "tokenizers",
    "torch.utils.tensorboard",
    "tyro",
    "gymnasium",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


@functools.cache
def context():
    """multiprocessing, as it starts processes here; the first call imports the packages."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(PACKAGES)
    with patch.dict(os.environ, PYTHONPATH=f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def become(command: list[str], environment: dict, files: list[Path]):
    """In the new process: run the script, which writes into these files."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # it may start processes itself
    torch.set_num_threads(1)  # two threads in each of two processes would wait for each other
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    os.chdir(ROOT)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


class Launched:
    """A running script; stdout and stderr hold what it has written so far."""

    def __init__(self, *command, environment: dict | None = None):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for file in self.files:
            file.touch()
        inputs = ([str(part) for part in command], environment or dict(os.environ), self.files)
        self.process = context().Process(target=become, args=inputs, daemon=True)
        self.process.start()
        self.kill = self.process.kill

    def wait(self, seconds: float = 120):
        """Its exit status; minus the number of the signal that has ended it."""
        self.process.join(seconds)
        status = self.process.exitcode
        if status is None:
            self.kill()
        assert status is not None, f"still running after {seconds} s\n{self.stderr[-3000:]}"
        return status

    @property
    def stdout(self) -> str:
        return self.files[0].read_bytes().decode()

    @property
    def stderr(self) -> str:
        return self.files[1].read_bytes().decode()


def run(*command, **options) -> Launched:
    """Start a script, wait for its end, expect success."""
    process = Launched(*command, **options)
    assert process.wait() == 0, process.stderr[-3000:]
    return process


def side_by_side(*command, processes: int = 2) -> list[Launched]:
    """Start a script as torchrun would, as many times, in processes that find each other; wait for
    their ends, expect success."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(processes)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    launched = [Launched(*command, environment=common | rank) for rank in ranks]
    statuses = [process.wait() for process in launched]
    assert statuses == [0] * processes, "".join(process.stderr for process in launched)
    return launched


def flags(values: dict) -> list[str]:
    """{"eval_problems": 8} as it is typed: --eval-problems 8."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items()}
    return [part for pair in named.items() for part in pair]


def wait_for(condition, seconds: float = 120):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.02)
