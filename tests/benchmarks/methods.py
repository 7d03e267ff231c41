"""All methods in one table: the language-model scripts and the blocks of AFTER.md, equal answers.

    python tests/benchmarks/methods.py                    # makes the runs that are missing: hours
    python tests/benchmarks/methods.py --arms grpo sapo   # only these; the table has all so far

An arm is a script with its flags, or a block with its defaults. Each run draws some 30,720 answers:
DAPO, which redraws, takes 56 steps where the others take 120, and its rate falls within these. Each
arm has two learning rates, neighbours on the grid of 3e-4, 5e-4, 1e-3, 2e-3, to which an earlier
trial had narrowed them. Both are tried on seeds 101 and 102, on the sums of this table, and the
better one is then run on seeds 1 to 5, or to 10 with --seeds 10. A run answers 256 distinct
held-out sums before training and at each quarter of it, eight times each. A run takes some 25 to 40
seconds of a core. The scripts' arms come first, then the blocks. results/methods.jsonl keeps a run
a line, and what is in it is not run again. methods_table.py makes the table and, of the scripts'
arms, the picture.
"""

import json
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from statistics import fmean
from typing import NamedTuple

import methods_table
import torch
import tyro
from bench import RESULTS, after, load, revision, run_main
from methods_table import BLOCKS, FOUR, ONE, QUARTERS, REDRAWN

LOW, MIDDLE, HIGH = (3e-4, 5e-4), (5e-4, 1e-3), (1e-3, 2e-3)
TUNING_SEEDS = (101, 102)
HELD_OUT = 256
SKIPPED = ("opd", "stale", "bf16", "checkpointing")  # it needs a teacher; they are no methods


class Arm(NamedTuple):
    title: str
    script: str  # a script, or a block of AFTER.md
    flags: dict
    group: str
    rates: tuple[float, float] = MIDDLE


FREE = {"clip_low": 1e6, "clip_high": 1e6}
DR_GRPO = {"scale_rewards": False, "length_norm": "constant", "beta": 0.0}
ARMS = {
    "rloo": Arm("RLOO", "rloo_llm", {}, ONE, HIGH),
    "grpo_1": Arm("GRPO, one step", "grpo_llm", {"minibatches": 1}, ONE),
    "rloo_4": Arm("RLOO, four steps", "rloo_llm", {"minibatches": 4}, FOUR, LOW),
    "grpo": Arm("GRPO", "grpo_llm", {}, FOUR),
    "grpo_free": Arm("GRPO without a clip", "grpo_llm", FREE, FOUR),
    "grpo_beta_0": Arm("GRPO, β = 0", "grpo_llm", {"beta": 0.0}, FOUR),
    "dr_grpo": Arm("Dr. GRPO", "grpo_llm", DR_GRPO, FOUR, LOW),
    "gspo": Arm("GSPO", "gspo_llm", {}, FOUR),
    "cispo": Arm("CISPO, cap 1.2", "cispo_llm", {}, FOUR, LOW),
    "cispo_5": Arm("CISPO, cap 5", "cispo_llm", {"clip_high": 4.0}, FOUR, LOW),
    "dapo_1": Arm("DAPO, no redraw", "dapo_llm", {"max_resample": 1}, FOUR),
    "dapo": Arm("DAPO", "dapo_llm", {"steps": 56}, REDRAWN),
}
OWN = list(ARMS)
ARMS |= {name: Arm(name, name, {}, BLOCKS) for name in after.BLOCKS if name not in SKIPPED}


# -------------------------------------------------------------------------------------------- Runs
def distinct(problems, number):
    """The first so many different ones: of 400 held-out sums 285 differ, as short ones recur."""
    return list(dict.fromkeys(problems))[:number]


def watched(script, found):
    """The script's functions, in a version that counts. After each evaluation `found` has its
    scores, and the answers drawn in training so far."""
    names = ("load_data", "rollout", "evaluate", "surrogate", "train_minibatch")
    own = {name: getattr(script, name) for name in names}

    def load_data(args):
        training, held_out = own["load_data"](args)
        return training, distinct(held_out, HELD_OUT)

    def rollout(*given):
        batch, completions, rewards = own["rollout"](*given)
        found["drawn"] += rewards.numel()
        return batch, completions, rewards

    def evaluate(*given):
        drawn = found["drawn"]
        scores = own["evaluate"](*given)
        found["drawn"] = drawn  # those of the evaluation do not count
        found["answers"].append(drawn)
        for name in ("pass@1", "pass@8"):
            found[name].append(round(scores[f"eval/{name}"], 4))
        return scores

    def surrogate(logprobs, old_logprobs, advantages, mask, args):
        objective, clipped = own["surrogate"](logprobs, old_logprobs, advantages, mask, args)
        counted = mask * (advantages != 0).view(len(mask), -1)  # tokens that have a signal
        found["clipped"] += (clipped * counted).sum().item()
        found["tokens"] += counted.sum().item()
        return objective, clipped

    def train_minibatch(*given):
        metrics = own["train_minibatch"](*given)
        found["steps"] += bool(metrics)
        return metrics

    made = (load_data, rollout, evaluate, surrogate, train_minibatch)
    return dict(zip(names, made, strict=True))


def arguments(name, rate, seed, small):
    script = load(ARMS[name].script)
    flags = {"eval_problems": 400} | ARMS[name].flags | small
    args = script.Args(seed=seed, learning_rate=rate, **flags)
    args.eval_every = args.steps // QUARTERS
    return script, args


def run(name, rate, seed, small):
    """One run, in a process of its own: a line of the file. If it has not come to its end, as the
    loss was not finite, the scores that are missing are 0."""
    torch.set_num_threads(1)
    start = time.process_time()
    script, args = arguments(name, rate, seed, small)
    found = {"arm": name, "rate": rate, "seed": seed, "pass@1": [], "pass@8": [], "answers": []}
    found |= {"steps": 0, "drawn": 0, "clipped": 0, "tokens": 0}
    run_main(script, args, **watched(script, found))
    for scores in found["pass@1"], found["pass@8"]:
        scores += [0.0] * (QUARTERS + 1 - len(scores))
    found["answers"] += [found["drawn"]] * (QUARTERS + 1 - len(found["answers"]))
    found["clipped"] = round(found["clipped"] / max(found.pop("tokens"), 1), 4)
    found["seconds"] = round(time.process_time() - start)
    del found["drawn"]
    return found | {"revision": revision()}


def results(function, missing, jobs, small):
    """Each in a new process, in the order in which they end; small ones here, one by one."""
    if small:
        yield from (function(*job, small) for job in missing)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(function, *job, small) for job in missing]):
            yield future.result()


class Runs:
    """Those that are known, by arm, rate and seed; and in a file, one a line."""

    def __init__(self, path=None):
        self.path, self.known = path, {}
        for line in path.read_text().splitlines() if path and path.exists() else []:
            self.add(json.loads(line))

    def add(self, made):
        self.known[made["arm"], made["rate"], made["seed"]] = made

    def make(self, function, wanted, jobs, small):
        """Make those that are missing, and keep each one at once."""
        missing = [job for job in wanted if job not in self.known]
        for made in results(function, missing, jobs, small):
            self.add(made)
            print(json.dumps(made)[:160], flush=True)
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps(made) + "\n")

    def rates(self, name):
        """The arm's rates that were tried on the tuning seeds, best mean first."""
        scores = defaultdict(list)
        for (arm, rate, seed), made in self.known.items():
            if arm == name and seed in TUNING_SEEDS:
                scores[rate].append(made["pass@1"][-1])
        return sorted(scores, key=lambda rate: fmean(scores[rate]), reverse=True)

    def reported(self, name):
        """{seed: run}, at the arm's best rate, without those that it was tuned on."""
        found = {}
        for arm, rate, seed in sorted(self.known):
            if [arm, rate] == [name, *self.rates(name)[:1]] and seed not in TUNING_SEEDS:
                found[seed] = self.known[arm, rate, seed]
        return found


def campaign(runs, names, seeds, jobs, small):
    """Tune each arm and report it, one after the other."""
    for name in names:
        rates = ARMS[name].rates[: 1 if small else 2]
        runs.make(run, [(name, *job) for job in product(rates, TUNING_SEEDS)], jobs, small)
        runs.make(run, [(name, runs.rates(name)[0], seed) for seed in seeds], jobs, small)


def main(arms: tuple[str, ...] = (), jobs: int = 1, seeds: int = 5, smoke: bool = False):
    """--arms names some of the arms; none are all. --jobs runs are made at a time, --seeds of each
    arm are reported. With --smoke two arms make short runs, and nothing is written."""
    unknown = set(arms) - set(ARMS)
    if unknown:
        sys.exit(f"--arms: {' '.join(unknown)}: choose from {' '.join(ARMS)}")
    if smoke:
        runs, small = Runs(), {"steps": 4, "prompts_per_step": 8, "eval_problems": 4}
        campaign(runs, arms or ["grpo", "sapo"], [1], jobs, small)
    else:
        runs = Runs(RESULTS / "methods.jsonl")
        names = [name for name in ARMS if name in arms or not arms]
        campaign(runs, names, range(1, seeds + 1), jobs, {})
    methods_table.write(ARMS, runs, smoke)


if __name__ == "__main__":
    tyro.cli(main)
