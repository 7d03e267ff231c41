"""Scripts in processes of their own, without the seconds that each import of torch takes.

A fork server (multiprocessing's) imports the packages once and runs nothing; each new process is
forked off it and then does what `python SCRIPT FLAGS` would do, in the same folder, with the same
streams, signals and exit status. What the interpreter, the shell or torchrun themselves do is left
to the slow tests, which start real commands.
"""

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
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
def start_server():
    """Once, before the first process: the imports."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{before}"
    FORKS.set_forkserver_preload(PACKAGES)
    forkserver.ensure_running()
    os.environ["PYTHONPATH"] = before


def become(command: list[str], environment: dict, streams: list):
    """In the new process: run the script, which writes to these pipes."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # two threads in each of two processes would wait for each other
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    os.chdir(ROOT)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


class Launched:
    """A running script; stdout and stderr hold what it has written so far."""

    def __init__(self, *command, environment: dict | None = None):
        start_server()
        pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
        inputs = ([str(part) for part in command], environment or dict(os.environ))
        streams = [end for _, end in pipes]
        self.process = FORKS.Process(target=become, args=(*inputs, streams), daemon=True)
        self.process.start()
        self.written = [bytearray(), bytearray()]
        self.readers = []
        for (reader, writer), text in zip(pipes, self.written, strict=True):
            writer.close()
            self.readers.append(threading.Thread(target=self.read, args=(reader, text)))
            self.readers[-1].start()

    @staticmethod
    def read(pipe, text: bytearray):
        with pipe:
            while piece := os.read(pipe.fileno(), 2**16):
                text += piece

    def send_signal(self, number: int):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()

    def wait(self, seconds: float = 120):
        """Its exit status; minus the number of the signal that has ended it."""
        self.process.join(seconds)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
        for reader in self.readers:
            reader.join()
        assert status is not None, f"still running after {seconds} s\n{self.stderr[-3000:]}"
        return status

    @property
    def stdout(self) -> str:
        return self.written[0].decode()

    @property
    def stderr(self) -> str:
        return self.written[1].decode()


def run(*command, **options) -> Launched:
    """Start a script, wait for its end, expect success."""
    process = Launched(*command, **options)
    assert process.wait() == 0, process.stderr[-3000:]
    return process


def side_by_side(*command, processes: int = 2) -> list[Launched]:
    """Start a script as torchrun would, as many times, in processes that find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(processes)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [Launched(*command, environment=common | rank) for rank in ranks]


def flags(values: dict) -> list[str]:
    """{"eval_problems": 8} as it is typed: --eval-problems 8."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items()}
    return [part for pair in named.items() for part in pair]


def wait_for(condition, seconds: float = 120):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.02)
