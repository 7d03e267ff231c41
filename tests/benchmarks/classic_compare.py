"""The classic scripts against Stable-Baselines3 and sb3-contrib.

    python tests/benchmarks/classic_compare.py            # CartPole-v1: time to a return of 475
    python tests/benchmarks/classic_compare.py --beyond   # other environments, at equal steps
    python tests/benchmarks/classic_compare.py --beyond --only LunarLander-v3 --scripts trpo

Theirs have the settings that RL Baselines3 Zoo tuned for these environments. On CartPole ours and
theirs run in turns, 5 seeds of each. Each run is a process of its own with one thread. Beyond
CartPole each run is kept in results/classic_beyond.json, and what is there is not run again. Needs
tests/benchmarks/requirements.txt. Prints tables in Markdown and writes them, with machine and
versions, into tests/benchmarks/results/.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import gymnasium as gym
import torch
import tyro
from bench import CLASSIC, RESULTS, ROOT, table, write_table

# hyperparams/*.yml of github.com/DLR-RM/rl-baselines3-zoo; lin(x): falls linearly from x to 0.
ZOO = {
    ("PPO", "CartPole-v1"): {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": "lin 0.001",
        "clip_range": "lin 0.2",
    },
    ("A2C", "CartPole-v1"): {"n_envs": 8, "ent_coef": 0.0},
    ("TRPO", "CartPole-v1"): {
        "n_envs": 2,
        "n_steps": 512,
        "batch_size": 512,
        "cg_damping": 1e-3,
        "gae_lambda": 0.98,
        "gamma": 0.99,
        "learning_rate": 1e-3,
        "n_critic_updates": 20,
    },
    ("PPO", "Acrobot-v1"): {
        "normalize": True,
        "n_envs": 16,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "gamma": 0.99,
        "n_epochs": 4,
        "ent_coef": 0.0,
    },
    ("TRPO", "Acrobot-v1"): {"normalize": True, "n_envs": 2, "n_steps": 1024},
    ("PPO", "Pendulum-v1"): {
        "n_envs": 4,
        "n_steps": 1024,
        "gae_lambda": 0.95,
        "gamma": 0.9,
        "n_epochs": 10,
        "ent_coef": 0.0,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    ("TRPO", "Pendulum-v1"): {
        "n_envs": 2,
        "n_steps": 1024,
        "gamma": 0.9,
        "n_critic_updates": 15,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    ("PPO", "LunarLander-v3"): {
        "n_envs": 16,
        "n_steps": 1024,
        "batch_size": 64,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "n_epochs": 4,
        "ent_coef": 0.01,
    },
    ("TRPO", "LunarLander-v3"): {
        "n_envs": 2,
        "n_steps": 512,
        "cg_damping": 0.01,
        "gae_lambda": 0.98,
        "gamma": 0.99,
        "learning_rate": 1e-3,
        "n_critic_updates": 15,
    },
    ("PPO", "HalfCheetah-v5"): {
        "normalize": True,
        "n_envs": 1,
        "n_steps": 512,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "cheetah_net": True,
    },
    ("TRPO", "HalfCheetah-v5"): {
        "normalize": True,
        "n_envs": 2,
        "n_steps": 1024,
        "batch_size": 128,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "sub_sampling_factor": 1,
        "cg_max_steps": 25,
        "cg_damping": 0.1,
        "n_critic_updates": 20,
        "learning_rate": 1e-3,
        "target_kl": 0.04,
    },
}
STEPS = {
    "ppo": 100_000,
    "actor_critic": 500_000,
    "trpo": 300_000,
}  # on CartPole, at most: the zoo's, for TRPO thrice that
ZOO_STEPS = {  # for how many the zoo's settings are meant
    ("PPO", "Acrobot-v1"): 1_000_000,
    ("TRPO", "Acrobot-v1"): 100_000,
    ("PPO", "Pendulum-v1"): 100_000,
    ("TRPO", "Pendulum-v1"): 100_000,
    ("PPO", "LunarLander-v3"): 1_000_000,
    ("TRPO", "LunarLander-v3"): 200_000,
    ("PPO", "HalfCheetah-v5"): 1_000_000,
    ("TRPO", "HalfCheetah-v5"): 1_000_000,
}
LABELS = {
    "PPO": "SB3 PPO",
    "A2C": "SB3 A2C",
    "TRPO": "sb3-contrib TRPO",
}
PACKAGES = ("gymnasium", "stable-baselines3", "sb3-contrib")
PEERS = {"ppo": "PPO", "trpo": "TRPO", "actor_critic": "A2C"}
BEYOND = {  # (environment, script): steps, and our flags
    ("Acrobot-v1", "ppo"): (
        200_000,
        {"gae_lambda": 0.95, "num_minibatches": 8, "update_epochs": 8},
    ),
    ("Acrobot-v1", "trpo"): (
        200_000,
        {"num_steps": 64, "gae_lambda": 0.95, "num_minibatches": 16, "update_epochs": 8},
    ),
    ("Pendulum-v1", "ppo"): (200_000, {"gamma": 0.9}),
    ("Pendulum-v1", "trpo"): (200_000, {"gamma": 0.9}),
    ("LunarLander-v3", "ppo"): (
        500_000,
        {
            "gamma": 0.999,
            "num_steps": 256,
            "num_minibatches": 8,
            "learning_rate": 2e-3,
            "ent_coef": 0.01,
        },
    ),
    ("LunarLander-v3", "trpo"): (
        500_000,
        {
            "gamma": 0.999,
            "num_steps": 64,
            "max_kl": 0.02,
            "damping": 0.01,
            "num_minibatches": 8,
            "update_epochs": 8,
        },
    ),
    ("HalfCheetah-v5", "ppo"): (
        300_000,
        {
            "gamma": 0.98,
            "gae_lambda": 0.92,
            "init_std": 0.37,
            "num_envs": 4,
            "num_steps": 512,
            "num_minibatches": 16,
            "learning_rate": 1e-3,
        },
    ),
    ("HalfCheetah-v5", "trpo"): (300_000, {"init_std": 0.37, "max_kl": 0.04}),
}


def ours(script: str, flags: dict) -> dict:
    """One run of a script of this repository, by its main()."""
    module = __import__(script)
    with tempfile.TemporaryDirectory() as folder:
        return module.main(module.Args(**flags, output_dir=folder))


def theirs(algorithm: str, env_id: str, seed: int, steps: int, until_solved: bool) -> dict:
    """One run of Stable-Baselines3: seconds from the first step on; solved as the scripts of this
    repository see it."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    settings = dict(ZOO[algorithm, env_id])
    for name, value in settings.items():
        if isinstance(value, str):
            start = float(value.removeprefix("lin "))
            settings[name] = lambda left, start=start: left * start
    if settings.pop("cheetah_net", False):
        net = {"pi": [256, 256], "vf": [256, 256]}
        settings["policy_kwargs"] = {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": net,
        }
    envs = make_vec_env(env_id, n_envs=settings.pop("n_envs"), seed=seed)
    normalize = settings.pop("normalize", False)
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    threshold, solved, recent = gym.spec(env_id).reward_threshold, [], []

    class Watch(BaseCallback):
        def _on_step(self):
            recent.extend(
                info["episode"]["r"] for info in self.locals["infos"] if "episode" in info
            )
            del recent[:-100]
            if threshold and not solved and len(recent) == 100 and sum(recent) / 100 >= threshold:
                solved.extend((self.num_timesteps, time.perf_counter() - start))
            return not (solved and until_solved)

    module = sb3_contrib if algorithm == "TRPO" else stable_baselines3
    model = getattr(module, algorithm)("MlpPolicy", envs, seed=seed, device="cpu", **settings)
    start = time.perf_counter()
    model.learn(steps, callback=Watch())
    seconds = time.perf_counter() - start
    fresh = make_vec_env(env_id, n_envs=16, seed=seed + 10**6)
    if normalize:
        fresh = VecNormalize(fresh, training=False, norm_reward=False)
        fresh.obs_rms = envs.obs_rms
    greedy, _ = evaluate_policy(model, fresh, n_eval_episodes=100, deterministic=True)
    sampled, _ = evaluate_policy(model, fresh, n_eval_episodes=100, deterministic=False)
    return {
        "eval/return": float(greedy),
        "eval/return_stochastic": float(sampled),
        "solved_step": (solved or [None])[0],
        "solved_seconds": (solved or [None] * 2)[1],
        "seconds": seconds,
    }


def measure(**job) -> dict:
    """A run in a process of its own, and its seconds of all, imports included."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    output = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return json.loads(output.splitlines()[-1]) | {"wall": time.perf_counter() - start}


def from_the_command(run: dict) -> float:
    """Seconds from the start of the process to a return of 475, imports included."""
    if run["solved_seconds"] is None:
        return float("inf")
    return run["wall"] - run["seconds"] + run["solved_seconds"]


def seconds_of(runs):
    return [
        run["solved_seconds"] if run["solved_seconds"] is not None else float("inf") for run in runs
    ]


def run_cartpole(seeds: int):
    runs = {}
    for seed in range(1, seeds + 1):
        for script in CLASSIC:
            runs.setdefault(script, []).append(measure(script=script, flags={"seed": seed}))
            if script in PEERS:
                job = {
                    "algorithm": PEERS[script],
                    "env_id": "CartPole-v1",
                    "seed": seed,
                    "steps": STEPS[script],
                }
                runs.setdefault(PEERS[script], []).append(measure(**job, until_solved=True))
            print(f"seed {seed} {script} {seconds_of(runs[script])[-1]:.2f} s", flush=True)
    lines = [*cartpole_table(runs), "", *cartpole_rest(runs)]
    note = f"one thread, {seeds} seeds; theirs with the zoo's tuned settings"
    write_table("classic_cartpole", lines, *PACKAGES, note=note)


def cartpole_table(runs: dict[str, list[dict]]) -> list[str]:
    """A row for each script: seconds and steps to 475, those of Stable-Baselines3, the ratio."""
    header = ["CartPole-v1, median (worst)", "seconds to 475", "steps", "SB3's seconds"]
    header += ["SB3's steps", "times faster"]
    rows = []
    for script in CLASSIC:
        cells = [script, *solved_cells(runs[script]), "–", "–", "–"]
        if script in PEERS:
            theirs = runs[PEERS[script]]
            ratio = median(seconds_of(theirs)) / median(seconds_of(runs[script]))
            cells[3:] = [*solved_cells(theirs), f"{ratio:.1f}"]
        rows.append(cells)
    return table(header, rows)


def cartpole_rest(runs: dict[str, list[dict]]) -> list[str]:
    """Sentences: who solved it, and the seconds from the command."""
    solved, totals = [], []
    for name, done in runs.items():
        count = sum(run["solved_step"] is not None for run in done)
        solved.append(f"{LABELS.get(name, name)} {count} of {len(done)}")
        total = median(from_the_command(run) for run in done)
        totals.append(f"{LABELS.get(name, name)} {shown(total, '.1f')}")
    return [
        f"Solved: {', '.join(solved)}.",
        "",
        f"Seconds from the command, imports included: {', '.join(totals)}.",
    ]


def solved_cells(runs: list[dict]) -> list[str]:
    """Seconds to 475, median and worst; steps, median."""
    seconds = seconds_of(runs)
    steps = median(run["solved_step"] or float("inf") for run in runs)
    both = f"{shown(median(seconds), '.2f')} ({shown(max(seconds), '.2f')})"
    return [both, shown(steps, ",.0f")]


def shown(value: float, form: str) -> str:
    return "never" if value == float("inf") else format(value, form)


def run_beyond(seeds: int, only: tuple[str, ...], scripts: tuple[str, ...], ours_only: bool):
    """What is in classic_beyond.json is not run again; ours and theirs in turns, seed by seed."""
    known = RESULTS / "classic_beyond.json"
    runs = json.loads(known.read_text()) if known.exists() else {}
    for env_id, script in BEYOND:
        if (only and env_id not in only) or script not in scripts:
            continue
        steps, flags = BEYOND[env_id, script]
        job = {"env_id": env_id, "total_timesteps": steps, **flags}
        peer = {"algorithm": PEERS[script], "env_id": env_id, "steps": steps}
        for seed in range(1, seeds + 1):
            jobs = {script: {"script": script, "flags": job | {"seed": seed}}}
            if not ours_only:
                jobs[LABELS[PEERS[script]]] = peer | {"seed": seed, "until_solved": False}
            for name, settings in jobs.items():
                key = f"{env_id}, {name}, seed {seed}"
                if key not in runs:
                    found = measure(**settings)
                    runs[key] = {part: round(found[part], 2) for part in KEPT}
                    known.write_text(json.dumps(runs, indent=1) + "\n")
                    print(key, runs[key], flush=True)
    note = "a thread each, two runs or more at a time, so seconds are rough; ours include the "
    note += "evaluation, SB3's are of the training alone"
    write_table("classic_beyond", table(HEADER, beyond_rows(runs)), *PACKAGES, note=note)


KEPT = ("eval/return", "eval/return_stochastic", "seconds")
HEADER = ["environment, steps", "", "seeds", "greedy return, IQM (95 % interval)"]
HEADER += ["median", "worst", "sampled return, IQM", "seconds, median"]


def beyond_rows(runs: dict[str, dict]) -> list[list[str]]:
    """A row for each side of each comparison."""
    rows = []
    for (env_id, script), (steps, flags) in BEYOND.items():
        shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
        peer = LABELS[PEERS[script]]
        budget = f"{ZOO_STEPS[PEERS[script], env_id]:,}"
        names = {script: f"{script}.py {shown}", peer: f"{peer}, the zoo's for {budget} steps"}
        for name, title in names.items():
            of_it = [run for key, run in runs.items() if key.startswith(f"{env_id}, {name}, ")]
            if of_it:
                rows.append([f"{env_id}, {steps:,}", title, str(len(of_it)), *returns_of(of_it)])
    return rows


def returns_of(runs: list[dict]) -> list[str]:
    """Cells: greedy returns' interquartile mean with an interval by bootstrap over the seeds,
    median and worst; the sampled ones' interquartile mean; median seconds."""
    greedy, sampled, seconds = ([run[part] for run in runs] for part in KEPT)
    cells = [f"{interquartile_mean(greedy):.0f}"]
    if len(runs) > 1:
        low, high = interval(greedy)
        cells[0] += f" ({low:.0f} to {high:.0f})"
    cells += [f"{median(greedy):.0f}", f"{min(greedy):.0f}"]
    return [*cells, f"{interquartile_mean(sampled):.0f}", f"{median(seconds):.0f}"]


def interquartile_mean(values, axis=-1):
    """The mean without the lowest and the highest quarter (of five: without the ends)."""
    from scipy.stats import trim_mean  # the tests' --help runs without it

    return trim_mean(values, 0.25, axis=axis)


def interval(values) -> tuple[float, float]:
    """Of the interquartile mean, 95 %, by the percentiles of 10,000 resamples (Agarwal et al. 2021,
    arXiv:2108.13264)."""
    from scipy.stats import bootstrap

    options = {"n_resamples": 10_000, "method": "percentile", "rng": 0}
    return tuple(bootstrap((values,), interquartile_mean, **options).confidence_interval)


def main(
    beyond: bool = False,
    seeds: int = 5,
    only: tuple[str, ...] = (),
    scripts: tuple[str, ...] = ("ppo", "trpo"),
    ours_only: bool = False,
):
    if beyond:
        run_beyond(seeds, only, scripts, ours_only)
    else:
        run_cartpole(seeds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job = json.loads(sys.argv[2])
        torch.set_num_threads(1)
        print(json.dumps(ours(**job) if "script" in job else theirs(**job)))
    else:
        tyro.cli(main)
