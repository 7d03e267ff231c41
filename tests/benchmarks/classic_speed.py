"""Where a classic script's time goes, and its steps a second beside Stable-Baselines3's.

    python tests/benchmarks/classic_speed.py

On CartPole-v1, each run a process of its own with one thread, ours and theirs in turns, medians of
three. First with the shapes that our scripts have by default, on both sides: environments, steps,
minibatches, passes. Then with those that RL Baselines3 Zoo has for that environment. Needs
tests/benchmarks/requirements.txt. Prints a table in Markdown and writes it, with machine and
versions, into tests/benchmarks/results/classic_speed.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import tyro
from bench import CLASSIC, ROOT, table, write_table
from torch.distributions import Distribution

# The same in both vocabularies: environments N, steps T, minibatches and passes over a rollout.
SHAPES = {
    "ours": {
        "reinforce": {"num_envs": 24},
        "actor_critic": {"num_envs": 16, "num_steps": 64},
        "trpo": {"num_envs": 16, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4},
        "ppo": {"num_envs": 16, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4},
    },
    "the zoo's": {
        "actor_critic": {"num_envs": 8, "num_steps": 5},
        "trpo": {"num_envs": 2, "num_steps": 512, "num_minibatches": 2, "update_epochs": 20},
        "ppo": {"num_envs": 8, "num_steps": 32, "num_minibatches": 1, "update_epochs": 20},
    },
}
SHORT = {"num_envs": "N", "num_steps": "T", "num_minibatches": "minibatches"}
SHORT |= {"update_epochs": "passes"}
PEERS = {"actor_critic": "A2C", "trpo": "TRPO", "ppo": "PPO"}
PARTS = {"acting": "Agent.act", "environment": "envs.step", "update": "prepare, update"}


def timed(function, spent: dict, name: str):
    """The function, but its seconds are added to spent[name]."""

    def wrapped(*args, **flags):
        start = time.perf_counter()
        result = function(*args, **flags)
        spent[name] += time.perf_counter() - start
        return result

    return wrapped


def ours(script: str, shape: dict, steps: int) -> dict:
    """Seconds of training by part, and steps a second, of a run of a script."""
    module = __import__(script)
    spent = dict.fromkeys(PARTS, 0.0)
    counted, starts = [], []
    make_envs, rollouts = module.make_envs, module.rollouts

    def measured_envs(*args, **options):
        envs = make_envs(*args, **options)
        envs.step = timed(envs.step, spent, "environment")
        return envs

    def counted_rollouts(*args):
        starts.append(time.perf_counter())  # not before: Adam imports a compiler that nobody uses
        for rollout, episodes in rollouts(*args):
            counted.append(int(rollout["mask"].sum()))
            yield rollout, episodes

    module.make_envs, module.rollouts = measured_envs, counted_rollouts
    module.Agent.act = timed(module.Agent.act, spent, "acting")
    module.prepare = timed(module.prepare, spent, "update")
    module.update = timed(module.update, spent, "update")
    args = module.Args(total_timesteps=steps, **shape)
    torch.manual_seed(args.seed)
    Distribution.set_default_validate_args(False)  # as main does
    envs = module.make_envs(args.env_id, args.num_envs)
    with tempfile.TemporaryDirectory() as folder:
        module.train(envs, module.Agent(envs), Path(folder, "agent.pt"), args)
    seconds = time.perf_counter() - starts[0]
    return spent | {"all": seconds, "steps a second": sum(counted) / seconds}


def theirs(algorithm: str, shape: dict, steps: int) -> dict:
    """Steps a second of Stable-Baselines3."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    rows = shape["num_envs"] * shape["num_steps"]
    settings = {"n_steps": shape["num_steps"]}
    if algorithm != "A2C":
        settings["batch_size"] = rows // shape["num_minibatches"]
        passes = "n_epochs" if algorithm == "PPO" else "n_critic_updates"
        settings[passes] = shape["update_epochs"]
    module = sb3_contrib if algorithm == "TRPO" else stable_baselines3
    envs = make_vec_env("CartPole-v1", n_envs=shape["num_envs"], seed=1)
    model = getattr(module, algorithm)("MlpPolicy", envs, seed=1, device="cpu", **settings)
    start = time.perf_counter()
    model.learn(steps)
    return {"steps a second": model.num_timesteps / (time.perf_counter() - start)}


def measure(**job) -> dict:
    """A run in a process of its own."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(steps: int = 100_000, their_steps: int = 20_000, rounds: int = 3):
    runs = {}
    for _ in range(rounds):
        for whose, shapes in SHAPES.items():
            for script, shape in shapes.items():
                job = {"script": script, "shape": shape, "steps": steps}
                runs.setdefault((whose, script), []).append(measure(**job))
                if script in PEERS:
                    job = {"algorithm": PEERS[script], "shape": shape, "steps": their_steps}
                    runs.setdefault((whose, PEERS[script]), []).append(measure(**job))
    header = ["shapes", "script", *(f"{part}: {what}" for part, what in PARTS.items()), "rest"]
    header += ["steps a second", "SB3's", "times faster"]
    rows = []
    for whose, shapes in SHAPES.items():
        for script in filter(shapes.__contains__, CLASSIC):
            done = runs[whose, script]
            parts = [median(run[part] / run["all"] for run in done) for part in PARTS]
            speed, cells = median_speed(done), ["–", "–"]
            if script in PEERS:
                peer = median_speed(runs[whose, PEERS[script]])
                cells = [f"{peer:,.0f}", f"{speed / peer:.1f}"]
            shares = [f"{share:.0%}" for share in [*parts, 1 - sum(parts)]]
            shape = ", ".join(f"{SHORT[name]} {n}" for name, n in shapes[script].items())
            rows.append([f"{whose}: {shape}", script, *shares, f"{speed:,.0f}", *cells])
    note = f"one thread, medians of {rounds}; {steps:,} steps of ours, {their_steps:,} of theirs"
    packages = ("gymnasium", "stable-baselines3", "sb3-contrib")
    write_table("classic_speed", table(header, rows), *packages, note=note)


def median_speed(runs: list[dict]) -> float:
    return median(run["steps a second"] for run in runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        torch.set_num_threads(1)
        job = json.loads(sys.argv[2])
        print(json.dumps(ours(**job) if "script" in job else theirs(**job)))
    else:
        tyro.cli(main)
