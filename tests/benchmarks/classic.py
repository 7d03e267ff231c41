"""Compare the classic scripts (ours) with Stable-Baselines3 and sb3-contrib (theirs).

    python tests/benchmarks/classic.py cartpole          # time to a return of 475; half an hour
    python tests/benchmarks/classic.py seeds --seeds 50  # whole runs of ours alone; half an hour
    python tests/benchmarks/classic.py shapes            # steps per second; 15 minutes
    python tests/benchmarks/classic.py beyond            # other environments; 3 hours

The times are for two cores. Theirs have the settings that RL Baselines3 Zoo tuned (zoo.json; its
`steps` is the length of run that they were tuned for). `shapes` gives both sides the same rollouts
and optimizer steps, `beyond` the same number of environment steps. Ours and theirs take turns, seed
by seed, and each run is a process of its own with one thread. results/classic_beyond.json keeps the
runs of `beyond`, and a run in it is not repeated. The table goes into results/classic_….md. With
--smoke all sizes are tiny, nothing is written, and theirs may be missing.
"""

import importlib
import json
import operator
import os
import tempfile
import time
from collections import defaultdict
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
import tyro
from bench import RESULTS, own_process, revision, table, write_table
from scripts import CLASSIC_SCRIPTS as CLASSIC
from tyro.conf import Positional

# From hyperparams/*.yml of DLR-RM/rl-baselines3-zoo. "lin 0.001" falls linearly from 0.001 to 0.
ZOO = json.loads(Path(__file__).with_name("zoo.json").read_text())
PEERS = {"actor_critic": "A2C", "trpo": "TRPO", "ppo": "PPO"}
PACKAGES = ("gymnasium", "stable-baselines3", "sb3-contrib")
LEVEL = 475  # a mean return of the last 100 episodes, at which CartPole counts as solved
# Environment steps, and our flags, which were found on seeds other than those measured.
BEYOND = json.loads(Path(__file__).with_name("beyond.json").read_text())
SHAPES = [  # whose shape; script; environments, steps, minibatches, epochs
    ("ours", "reinforce", (24,)),
    ("ours", "actor_critic", (16, 64)),
    ("ours", "trpo", (16, 128, 4, 4)),
    ("ours", "ppo", (16, 128, 4, 4)),
    ("the zoo's", "actor_critic", (8, 5)),
    ("the zoo's", "trpo", (2, 512, 2, 20)),
    ("the zoo's", "ppo", (8, 32, 1, 20)),
]
FLAGS = ("--num-envs", "--num-steps", "--num-minibatches", "--update-epochs")


def peer(script: str) -> str:
    """The name of a script's peer: for ppo, "SB3 PPO"."""
    return f"{'sb3-contrib' if script == 'trpo' else 'SB3'} {PEERS[script]}"


class Watch:
    """Counts a run's steps and seconds, and notes those at which it reached the level."""

    def start(self, begun: float):
        self.found = {"solved_step": inf, "solved_seconds": inf}
        self.found["start"] = time.time() - begun  # seconds since the command, imports included
        self.first, self.steps, self.recent = time.perf_counter(), 0, []

    def note(self, steps: int, episodes: list) -> bool:
        """Add steps, and the returns of the episodes that ended; return whether it is solved."""
        self.steps += steps
        seconds = time.perf_counter() - self.first
        self.recent = (self.recent + episodes)[-100:]
        solved = len(self.recent) == 100 and sum(self.recent) / 100 >= LEVEL
        if solved and self.found["solved_step"] == inf:
            self.found |= {"solved_step": self.steps, "solved_seconds": seconds}
        self.found |= {"steps": self.steps, "seconds": seconds}
        return solved


def ours(watch, script: str, begun: float, env_id: str, seed: int, steps: int, flags: str = ""):
    """Run a script by its main() and return its greedy and its sampled return."""
    module = importlib.import_module(script)
    rollouts = module.rollouts

    def watched(*inputs):
        watch.start(begun)
        for rollout, episodes in rollouts(*inputs):
            watch.note(int(rollout["mask"].sum()), episodes)
            yield rollout, episodes

    module.rollouts = watched
    flags += f" --env-id {env_id} --seed {seed} --total-timesteps {steps}"
    with tempfile.TemporaryDirectory() as folder:
        args = tyro.cli(module.Args, args=[*flags.split(), "--output-dir", folder])
        found = module.main(args)
    return found["eval/return"], found["eval/return_stochastic"]


def theirs(watch, algorithm: str, begun: float, env_id: str, seed: int, steps: int, settings: dict):
    """Run Stable-Baselines3 and return its greedy and its sampled return.

    On CartPole the run ends as soon as it is solved.
    """
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    class Note(BaseCallback):
        def _on_training_start(self):
            watch.start(begun)

        def _on_step(self):
            ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            solved = watch.note(self.training_env.num_envs, ended)
            return not (solved and env_id == "CartPole-v1")

    for name, value in settings.items():
        if isinstance(value, str):
            settings[name] = partial(operator.mul, float(value.removeprefix("lin ")))
    if settings.pop("cheetah_net", False):
        net = {"log_std_init": -2, "ortho_init": False, "activation_fn": torch.nn.ReLU}
        settings["policy_kwargs"] = net | {"net_arch": {"pi": [256, 256], "vf": [256, 256]}}
    envs = make_vec_env(env_id, n_envs=settings.pop("n_envs"), seed=seed)
    normalize = settings.pop("normalize", False)
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    module = sb3_contrib if algorithm == "TRPO" else stable_baselines3
    model = getattr(module, algorithm)("MlpPolicy", envs, seed=seed, device="cpu", **settings)
    model.learn(steps, callback=Note())
    fresh = make_vec_env(env_id, n_envs=16, seed=seed + 10**6)
    if normalize:
        fresh = VecNormalize(fresh, training=False, norm_reward=False)
        fresh.obs_rms = envs.obs_rms
    return [evaluate_policy(model, fresh, 100, deterministic=greedy)[0] for greedy in (True, False)]


def run(side: str, **job) -> dict:
    """Run a script or a peer."""
    torch.set_num_threads(1)  # for theirs, too
    watch = Watch()
    greedy, sampled = (ours if side in CLASSIC else theirs)(watch, side, **job)
    return watch.found | {"eval/return": float(greedy), "eval/return_stochastic": float(sampled)}


def measure(side: str, seed: int, steps: int, env_id: str = "CartPole-v1", **more) -> dict:
    """Run a script or a peer in a new process and return the result."""
    job = {"env_id": env_id, "seed": seed, "steps": steps, "begun": time.time()}
    found = own_process(run, side=side, **job, **more)
    print(side, env_id, seed, found, flush=True)
    return found


TIMES = ["solved", "steps to 475, median", "seconds to 475, median", "worst", "from the command"]


def times(runs: list[dict]) -> list[str]:
    """The cells under TIMES. The last one is the median of the seconds since the command."""
    seconds = [run["solved_seconds"] for run in runs]
    return [
        f"{sum(value < inf for value in seconds)} of {len(runs)}",
        f"{median(run['solved_step'] for run in runs):,.0f}",
        f"{median(seconds):.1f}",
        f"{max(seconds):.1f}",
        f"{median(run['start'] + run['solved_seconds'] for run in runs):.1f}",
    ]


def cartpole(seeds: int, peers: bool, smoke: bool) -> list[str]:
    """A row per script: time to 475, greedy return at the end, and with peers their time to 475."""
    runs = defaultdict(list)
    for seed in range(1, seeds + 1):
        for script in CLASSIC:
            runs[script].append(measure(script, seed, 4_000 if smoke else 200_000))
            if peers and script in PEERS:
                name = PEERS[script]
                settings = dict(ZOO[f"{name} CartPole-v1"])
                steps = settings.pop("steps")
                runs[name].append(measure(name, seed, 4_000 if smoke else steps, settings=settings))
    rows = []
    for script in CLASSIC:
        mine, other = runs[script], runs[PEERS.get(script)]
        returns = [run["eval/return"] for run in mine]
        held = f"{sum(value >= LEVEL for value in returns)} of {seeds}"
        cells = [script, *times(mine), held, f"{median(returns):.0f}", f"{min(returns):.0f}"]
        if other:
            seconds = [median(run["solved_seconds"] for run in side) for side in (mine, other)]
            cells += [peer(script), *times(other), f"{seconds[1] / seconds[0]:.1f}"]
        elif peers:
            cells += ["–"] * (len(TIMES) + 2)
        rows.append(cells)
    header = ["CartPole-v1", *TIMES, "greedy return ≥ 475", "median", "worst"]
    return table(header + ["compared with", *TIMES, "times faster"] * peers, rows)


def shapes(rounds: int, peers: bool, smoke: bool) -> list[str]:
    """A row per shape: steps per second, of ours in 100,000 steps and of theirs in 20,000."""
    rows = []
    for whose, script, shape in SHAPES[-1:] if smoke else SHAPES:
        flags = " ".join(f"{flag} {n}" for flag, n in zip(FLAGS, shape, strict=False))
        mine, other = [], []
        for seed in range(1, rounds + 1):
            found = measure(script, seed, 4_000 if smoke else 100_000, flags=flags)
            mine.append(found["steps"] / found["seconds"])
            if peers and script in PEERS:
                settings = their_shape(script, *shape)
                steps = 4_000 if smoke else 20_000
                found = measure(PEERS[script], seed, steps, settings=settings)
                other.append(found["steps"] / found["seconds"])
        cells = [f"{whose}: {flags}", f"{script} {median(mine):,.0f}", "–", "–"]
        if other:
            cells[2:] = [f"{peer(script)} {median(other):,.0f}"]
            cells.append(f"{median(mine) / median(other):.1f}")
        rows.append(cells)
    return table(["shapes", "steps per second", "compared with", "times faster"], rows)


def their_shape(script: str, envs: int, steps: int, minibatches=None, epochs=None) -> dict:
    """The settings of Stable-Baselines3 that have the same shape."""
    settings = {"n_envs": envs, "n_steps": steps}
    if minibatches:
        settings["batch_size"] = envs * steps // minibatches
        settings["n_epochs" if script == "ppo" else "n_critic_updates"] = epochs
    return settings


KEPT = ("eval/return", "eval/return_stochastic", "seconds")


def beyond(seeds: int, peers: bool, smoke: bool) -> list[str]:
    """A row per environment and side: returns after the same number of environment steps."""
    path, rows = RESULTS / "classic_beyond.json", []
    known = {} if smoke else json.loads(path.read_text())
    for name, chosen in BEYOND.items():
        env_id, script = name.split()
        if smoke and env_id != "Pendulum-v1":
            continue
        steps, flags = chosen["steps"], chosen["flags"]
        sides = [(script, {"flags": flags}, f"{script}.py {flags}")]
        if peers:
            zoo = dict(ZOO[f"{PEERS[script]} {env_id}"])
            title = f"{peer(script)}, the zoo's for {zoo.pop('steps'):,} steps"
            sides.append((peer(script), {"settings": zoo}, title))
        for seed, (side, more, _) in product(range(1, seeds + 1), sides):
            key = f"{env_id}, {side}, seed {seed}"
            if key not in known:
                found = measure(side.split()[-1], seed, 4_000 if smoke else steps, env_id, **more)
                known[key] = {name: round(found[name], 2) for name in KEPT}
                known[key]["revision"] = revision()
            if not smoke:
                path.write_text(json.dumps(known, indent=1) + "\n")
        for side, _, title in sides:
            runs = [run for key, run in known.items() if key.startswith(f"{env_id}, {side}, ")]
            rows.append([f"{env_id}, {steps:,}", title, len(runs), *returns(runs)])
    header = ["environment, steps", "", "seeds", "greedy return, IQM (95 % interval)"]
    header += ["median", "worst", "sampled return, IQM", "seconds, median"]
    return table(header, rows)


def middle(values: np.ndarray) -> np.ndarray:
    """The interquartile mean along the last axis; of five values, the mean of the middle three."""
    cut = values.shape[-1] // 4
    return np.sort(values)[..., cut : values.shape[-1] - cut].mean(-1)


def returns(runs: list[dict]) -> list[str]:
    """The cells from "greedy return" on.

    IQM is the interquartile mean; its interval is a bootstrap over the seeds (Agarwal et al. 2021,
    arXiv:2108.13264).
    """
    greedy, sampled, seconds = (np.array([run[part] for run in runs]) for part in KEPT)
    draws = np.random.default_rng(0).choice(greedy, (10_000, len(runs)))
    low, high = np.percentile(middle(draws), (2.5, 97.5))
    cells = [f"{middle(greedy):.0f} ({low:.0f} to {high:.0f})"]
    cells += [f"{np.median(greedy):.0f}", f"{greedy.min():.0f}"]
    return [*cells, f"{middle(sampled):.0f}", f"{np.median(seconds):.0f}"]


def main(
    what: Positional[Literal["cartpole", "seeds", "shapes", "beyond"]],
    seeds: int = 5,
    smoke: bool = False,
):
    """Run one of the four benchmarks, with seeds 1, 2, … With --smoke nothing is written."""
    os.environ["OMP_NUM_THREADS"] = "1"  # each run has one thread
    seeds = 1 if smoke else seeds
    peers = what != "seeds" and (find_spec("sb3_contrib") is not None or not smoke)
    lines = WORK[what](seeds, peers, smoke)
    packages = PACKAGES if peers else PACKAGES[:1]
    note = f"one thread, {seeds} seeds" + "; theirs with the zoo's tuned settings" * peers
    write_table(f"classic_{what}", lines, *packages, note=note, smoke=smoke)


WORK = {"cartpole": cartpole, "seeds": cartpole, "shapes": shapes, "beyond": beyond}

if __name__ == "__main__":
    tyro.cli(main)
