"""Many epochs over a rollout: PPO with its clip, without, and with the adaptive KL penalty."""

from math import inf
from statistics import mean

from classic_parts import train
from lab import LEARNED, Contrast, Experiment, grid, values
from pictures import dots, figure, plain

import ppo

FORMS = {"clip": {}, "no clip": {"clip_coef": inf}, "penalty": {"clip_coef": inf, "beta": 1.0}}
# (form, epochs): the rate with the highest mean return on seeds 101 to 103 (see tune), with rates
# tried until both neighbours of the best were worse
BEST = {("clip", 1): 3e-2, ("clip", 10): 3e-3, ("no clip", 10): 1e-3}
BEST |= {("penalty", 10): 3e-3, ("clip", 20): 1e-3, ("no clip", 20): 1e-4}


def run(form, epochs, seed, steps=60_000, rate=None):
    flags = {"update_epochs": epochs, "learning_rate": rate or BEST[form, epochs]}
    found = train(ppo, seed=seed, total_timesteps=steps, **flags, **FORMS[form])
    return {LEARNED: found.mean, "solved": found.greedy_return >= 475, "largest KL": found.kl}


def tune():
    for form, epochs in BEST:
        for rate in (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
            learned = [run(form, epochs, seed, rate=rate)[LEARNED] for seed in (101, 102, 103)]
            print(form, epochs, rate, round(mean(learned)), flush=True)


def arm(form, epochs, column=LEARNED):
    return {"form": form, "epochs": epochs}, column


def jobs(seeds, *chosen):
    return [job | arm(*each)[0] for job in grid(seeds) for each in chosen]


TESTED = [("clip", 10), ("no clip", 10), ("clip", 20), ("no clip", 20)]
JOBS = jobs(64, *TESTED) + jobs(24, ("clip", 1), ("penalty", 10))
TESTS = [
    [
        Contrast(f"return, {e} epochs: clip − no clip", arm("clip", e), arm("no clip", e), 30)
        for e in (10, 20)
    ],
    [Contrast("return, clip: 10 epochs − 1", arm("clip", 10), arm("clip", 1), 30)],
]


def draw(runs):
    title = "PPO: many epochs teach more than one;\nwithout the clip some runs fall far behind"
    page, axes = figure(title, 3.4, 1, 2, sharey=True)
    rows = {"1 epoch": ("clip", 1), "10 epochs": ("clip", 10), "10, no clip": ("no clip", 10)}
    rows |= {"20 epochs": ("clip", 20), "20, no clip": ("no clip", 20)}
    for panel, column in zip(axes, (LEARNED, "largest KL"), strict=True):
        found = {label: values(runs, arm(*each, column)) for label, each in rows.items()}
        dots(panel, {label: (each, "PPO", "no" not in label) for label, each in found.items()})
    axes[0].set(title="return over training", xlim=(0, 500))
    axes[1].set(title="largest KL of an update", xscale="log")
    plain(axes[1].xaxis, [0.01, 0.1, 1])
    return page


CLAIM = "The clip lets PPO use a rollout for many epochs."
SOURCE = "[PPO](https://arxiv.org/abs/1707.06347), sections 1, 3 and 6.1"
SHOWN = ("solved", "largest KL")
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {"steps": 2500}, CLAIM, SOURCE, shown=SHOWN)

if __name__ == "__main__":
    EXPERIMENT.main()
