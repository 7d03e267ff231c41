"""Many epochs over each rollout: GRPO with its clip and without, and CISPO."""

from lab import LEARNED, Contrast, Experiment, mean, train, values
from llm_parts import make, start, started
from pictures import DASHED, DOTTED, SOLID, curves, figure

import cispo_llm
import grpo_llm

FORMS = {  # the script, and its flags
    "clip": (grpo_llm, {}),
    "no clip": (grpo_llm, {"clip_low": 1e9, "clip_high": 1e9}),
    "CISPO": (cispo_llm, {}),
}
DEFAULT = 5e-4  # the scripts' own rate, made for one epoch
RATES = {8: [5e-5, 1e-4, 2e-4, 4e-4], 1: [5e-4, 1e-3, 2e-3]}
# (form, epochs): of these rates the one with the highest mean reward on three networks (see tune)
BEST = {("clip", 8): 2e-4, ("no clip", 8): 1e-4, ("CISPO", 8): 1e-4, ("clip", 1): 5e-4}


def run(form, epochs, rate, seed, network, steps=16, prompts=32, problems=256, warm=make.STEPS):
    """β is 0, and an epoch has four optimizer steps. After an early stop the rewards are 0."""
    script, flags = FORMS[form]
    options = {
        "beta": 0.0,
        "num_minibatches": 4,
        "learning_rate": rate,
        "prompts_per_step": prompts,
    }
    options["eval_problems"] = problems
    args = script.Args(seed=seed, steps=steps, update_epochs=epochs, **options, **flags)
    history = train(script, args, folder=start(network, warm))
    rewards = history["reward"] + [0.0] * (steps - len(history["reward"]))
    return {LEARNED: mean(rewards), "pass@1": history["pass@1"], "by rollout": rewards}


def tune():
    for form, epochs in BEST:
        for rate in RATES[epochs]:
            scores = [run(form, epochs, rate, seed, seed)[LEARNED] for seed in (101, 102, 103)]
            print(form, epochs, rate, [f"{score:.3f}" for score in scores], flush=True)


def arm(form, epochs, rate, column=LEARNED):
    return {"form": form, "epochs": epochs, "rate": rate}, column


TUNED = CLIP, NO_CLIP, CISPO, ONE = [arm(*each, BEST[each]) for each in BEST]
FIXED = [arm(form, 8, DEFAULT) for form in FORMS]
JOBS = [job | settings for job in started() for settings, _ in TUNED + FIXED]
CONTRASTS = [
    Contrast("best rates, 8 epochs: clip − no clip", CLIP, NO_CLIP, 0.03),
    Contrast("best rates, 8 epochs: clip − CISPO", CLIP, CISPO, 0.03),
    Contrast("best rates, clip: 8 epochs − 1", CLIP, ONE, 0.03),
    Contrast("a rate of 0.0005, 8 epochs: clip − no clip", *FIXED[:2], 0.03),
]


def draw(runs):
    title = "The clip keeps 8 epochs from collapse at a high rate;\nat the best rates all are alike"
    page, (best, fixed) = figure(title, 3.3, 1, 2, sharey=True)
    looks = {"clip": ("GRPO", SOLID), "no clip": ("GRPO", DASHED), "CISPO": ("CISPO", SOLID)}
    looks["1 epoch"] = "GRPO", DOTTED
    for panel, arms in ((best, TUNED), (fixed, FIXED)):
        lines = {}
        for (label, look), (settings, _) in zip(looks.items(), arms, strict=False):
            lines[label] = values(runs, (settings, "by rollout")), *look
        curves(panel, range(1, len(lines["clip"][0][0]) + 1), lines, band=False)
        panel.set_xlabel("rollouts")
    best.set(title="best rates", ylabel="reward")
    fixed.set_title("a rate of 0.0005")
    return page


SMALL = {"steps": 1, "prompts": 4, "problems": 4, "warm": 30}
CLAIM = "The clip lets GRPO use a rollout many times."
SOURCE = (
    "[PPO](https://arxiv.org/abs/1707.06347), section 1; of language models, "
    "[GSPO](https://arxiv.org/abs/2507.18071), section 3, and [Mroueh et al. "
    "2025](https://arxiv.org/abs/2505.22257)"
)
EXPERIMENT = Experiment(run, JOBS, CONTRASTS, draw, SMALL, CLAIM, SOURCE, ("pass@1",))

if __name__ == "__main__":
    EXPERIMENT.main()
