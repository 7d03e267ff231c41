"""Many epochs over each rollout: GRPO with its clip and without, GSPO and CISPO.

`PYTHONPATH=.:tests/benchmarks python tests/experiments/passes.py` prints what the rates below were
chosen from.
"""

from statistics import mean

from bench import train
from harness import Panel
from llm_parts import started, warm_start
from verdicts import Contrast

import cispo_llm
import grpo_llm
import gspo_llm

FORMS = {  # the script, and its flags
    "clip": (grpo_llm, {}),
    "no clip": (grpo_llm, {"clip_low": 1e9, "clip_high": 1e9}),
    "GSPO": (gspo_llm, {}),
    "CISPO": (cispo_llm, {}),
}
DEFAULT = 4e-4  # the scripts' own rate, made for one epoch
RATES = {16: [3e-5, 6e-5, 1.2e-4, 2e-4, 4e-4], 1: [4e-4, 8e-4, 1.2e-3, 2.4e-3]}
# (form, epochs): of these rates the one with the highest mean reward on seeds 101 to 104
BEST = {("clip", 16): 2e-4, ("no clip", 16): 6e-5, ("clip", 1): 8e-4}


def run(form, epochs, rate, seed, start, steps=20, prompts=32, problems=256, warm=400):
    """β 0 and four gradient steps an epoch. A run that stops before its end has rewards of 0."""
    script, flags = FORMS[form]
    options = {"beta": 0.0, "minibatches": 4, "learning_rate": rate, "prompts_per_step": prompts}
    options["eval_problems"] = problems
    args = script.Args(seed=seed, steps=steps, update_epochs=epochs, **options, **flags)
    found = train(script, args, folder=warm_start("tiny", start, steps=warm))
    rewards = found["reward"] + [0.0] * (steps - len(found["reward"]))
    return {"learned": mean(rewards), "pass@1": found["pass@1"], "by rollout": rewards}


def tune():
    for form, epochs in BEST:
        for rate in RATES[epochs]:
            found = [run(form, epochs, rate, seed, seed % 4)["learned"] for seed in range(101, 105)]
            print(form, epochs, rate, [f"{each:.3f}" for each in found], flush=True)


def arm(form, epochs, rate, column="learned"):
    return {"form": form, "epochs": epochs, "rate": rate}, column


def tuned(form, epochs, column="learned"):
    return arm(form, epochs, BEST[form, epochs], column)


def jobs(seeds, arms):
    """All arms with one seed, then with the next."""
    return [job | settings for job in started(seeds) for settings, _ in arms]


CLAIM = "A clip lets one rollout serve many epochs."
TUNED = [tuned(*each) for each in BEST]
FIXED = [arm(form, 16, DEFAULT) for form in FORMS]
JOBS = jobs(20, TUNED) + jobs(12, FIXED)
SMALL = {"seed": 1, "start": 0, "steps": 1, "prompts": 4, "problems": 4, "warm": 30}
SMOKE = [SMALL | settings for settings, _ in TUNED + FIXED]
SECONDS = 16  # 18 with 16 epochs, 3 with one
PRIMARIES = [
    [Contrast("best rates: clip − no clip", TUNED[0], TUNED[1], 0.03, block="start")],
    [
        Contrast("a rate of 0.0004: clip − no clip", FIXED[0], FIXED[1], 0.03, block="start"),
        Contrast("best rates, clip: 16 epochs − 1", TUNED[0], TUNED[2], 0.03, block="start"),
    ],
]

# The page
LESSON = (
    "undecided",
    "At the default learning rate 16 epochs fail without the clip, and lose reward with it, too. "
    "At lower rates they do about as well without a clip as with it. At its best rate a single "
    "epoch is behind by little: whether by enough to be worth naming, we cannot tell.",
)
BEST_CURVES = {f"{form}, {epochs}": tuned(form, epochs, "by rollout") for form, epochs in BEST}
FIXED_CURVES = {form: arm(form, 16, DEFAULT, "by rollout") for form in FORMS}
ROLLOUTS = [*range(1, 21)]
PANELS = [
    Panel("16 epochs, 1 epoch: best rates", BEST_CURVES, ("rollouts", "reward"), ROLLOUTS),
    Panel("16 epochs: a rate of 0.0004", FIXED_CURVES, ("rollouts", "reward"), ROLLOUTS),
]


def words(runs):
    def best(form, epochs):
        return runs.mean("learned", ".2f", **tuned(form, epochs)[0])

    def fixed(form, column="learned"):
        return runs.mean(column, ".2f", **arm(form, 16, DEFAULT)[0])

    return f"""
    The mean reward over 20 rollouts of training counts. Each form had the best of four or five
    rates on four seeds that are not used here. With 16 epochs, the clip and a rate of
    {BEST["clip", 16]:g} it is {best("clip", 16)}; with 16 epochs, no clip and a rate of
    {BEST["no clip", 16]:g} it is {best("no clip", 16)}; with one epoch, the clip and a rate of
    {BEST["clip", 1]:g} it is {best("clip", 1)}. At the scripts' default rate, 0.0004, which is made
    for one epoch, 16 epochs bring {fixed("clip")} with the clip and {fixed("no clip")} without it.
    GSPO's clip brings {fixed("GSPO")} there, CISPO's {fixed("CISPO")}. All four rise for a few
    rollouts and then fall; at the end pass@1 is {fixed("clip", "pass@1")} with the clip,
    {fixed("no clip", "pass@1")} without it, {fixed("GSPO", "pass@1")} with GSPO's and
    {fixed("CISPO", "pass@1")} with CISPO's."""


NOT_TRIED = "rates in between; longer training; larger models; a clip of another width."

if __name__ == "__main__":
    tune()
