"""DAPO's dynamic sampling, against one draw of as many questions: the filter, or the samples?"""

from unittest.mock import patch

from lab import Contrast, Experiment, arms, mean, train, values
from llm_parts import make, start, started
from pictures import dots, figure

import dapo_llm

# DAPO draws about twice as many answers in its 32 steps as one draw of 16 questions; in more steps
# one draw has as many. (Measured on other networks.)
FORMS = {
    "DAPO": {},
    "one draw": {"max_resample": 1},
    "more steps": {"max_resample": 1, "steps": 64},
}


def run(form, seed, network, shorter=1, warm=make.STEPS):
    flags = {"prompts_per_step": 16, "steps": 32} | FORMS[form]
    args = dapo_llm.Args(seed=seed, **flags)
    args.steps //= shorter
    drawn, answers = [], []  # of the step that goes on, and of the steps so far

    def rollout(*inputs, own=dapo_llm.rollout):
        found = own(*inputs)
        drawn.append(found[2].numel())
        return found

    def each_step(step, model, metrics):
        answers.append(sum(drawn))
        drawn.clear()

    with patch.object(dapo_llm, "rollout", rollout):
        found = train(dapo_llm, args, None, each_step, start(network, warm))
    signal = [1 - share for share in found["frac_reward_zero_std"]]
    return {
        "pass@1": found["pass@1"],
        "reward": mean(found["reward"]),
        "answers": sum(answers),
        "signal": mean(signal),
        "signal, last quarter": mean(signal[-len(signal) // 4 :]),
    }


def contrast(other):
    more, less = arms("pass@1", "form", ["DAPO", other])
    return Contrast(f"pass@1 at the end: DAPO − {other}", more, less, 0.01)


JOBS = started(form=list(FORMS))
TESTS = [[contrast("one draw")], [contrast("more steps")]]


def draw(runs):
    title = "Redrawing: a step draws more answers. Does it teach more?"
    page, axes = figure(title, 2.8, 1, 2, sharey=True)
    for panel, column in zip(axes, ("pass@1", "answers"), strict=True):
        found = {form: values(runs, ({"form": form}, column)) for form in FORMS}
        dots(panel, {form: (each, "DAPO", form == "DAPO") for form, each in found.items()})
    axes[0].set_title("pass@1 at the end")
    axes[1].set_title("answers drawn")
    return page


CLAIM = "With dynamic sampling every group has a signal, so a step teaches more."
SOURCE = "[DAPO](https://arxiv.org/abs/2503.14476), 3.2 and 4.2"
FORMER = "as claimed / opposite / not seen; of interest / open"
SHOWN = ("answers", "signal", "signal, last quarter")
EXPERIMENT = Experiment(
    run, JOBS, TESTS, draw, {"shorter": 32, "warm": 10}, CLAIM, SOURCE, FORMER, shown=SHOWN
)

if __name__ == "__main__":
    EXPERIMENT.main()
