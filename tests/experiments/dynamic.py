"""DAPO's dynamic sampling, against one draw of as many questions: the filter, or the samples?"""

from bench import train
from harness import Panel, arms
from llm_parts import mean, started, warm_start
from verdicts import Contrast

import dapo_llm

# DAPO draws about four times as many answers in its 24 steps as one draw of 16 questions: so many
# the last two draw, too, with larger steps and with more of them. (Measured on seeds 101 and 102.)
FORMS = {
    "DAPO": {},
    "one draw": {"max_resample": 1},
    "large draw": {"max_resample": 1, "prompts_per_step": 64},
    "more steps": {"max_resample": 1, "steps": 96},
}


def run(form, seed, start, shorter=1, warm=400):
    flags = {"prompts_per_step": 16, "steps": 24} | FORMS[form]
    args = dapo_llm.Args(seed=seed, **flags)
    args.steps //= shorter
    found = train(dapo_llm, args, folder=warm_start("tiny", start, warm))
    tokens, lengths = found["num_tokens"], found["completions/mean_length"]
    signal = [1 - share for share in found["frac_reward_zero_std"]]
    return {
        "pass@1": found["pass@1"],
        "reward": mean(found["reward"]),
        "answers": sum(each / length for each, length in zip(tokens, lengths, strict=True)),
        "signal": mean(signal),
        "signal, last quarter": mean(signal[-len(signal) // 4 :]),
    }


def contrast(other):
    more, less = arms("pass@1", "form", ["DAPO", other]).values()
    return Contrast(f"pass@1 at the end: DAPO − {other}", more, less, 0.01, block="start")


CLAIM = "With dynamic sampling every group has a signal, so a step teaches more."
JOBS = started(20, form=list(FORMS))
SMOKE = started(1, form=list(FORMS), shorter=[24], warm=[10])
SECONDS = 5
PRIMARIES = [[contrast("one draw")], [contrast("large draw"), contrast("more steps")]]

# The page
LESSON = (
    "it depends",
    "A step of DAPO teaches more than one without redrawing, and draws four times the answers. As "
    "many answers without redrawing, in larger steps or in more steps, teach as much.",
)
PANELS = [
    Panel("24 steps (the last: 96)", arms("pass@1", "form", FORMS), ("pass@1 at the end", "")),
    Panel("What they cost", arms("answers", "form", FORMS), ("answers drawn", "")),
]


def words(runs):
    right = {form: runs.mean("pass@1", ".3f", form=form) for form in FORMS}
    drawn = {form: runs.mean("answers", ",.0f", form=form) for form in FORMS}
    return f"""
    Four arms of dapo_llm.py differ in how they draw questions; all leave out groups with equal
    rewards, which have no gradient. DAPO draws 16 at a time until 16 groups have answers with
    different rewards; after 24 steps its pass@1 is {right["DAPO"]}. With one draw of 16 questions a
    step pass@1 is {right["one draw"]}: a step of DAPO teaches more. But it also draws more answers,
    {drawn["DAPO"]} instead of {drawn["one draw"]} in all. If one draw has 64 questions,
    {drawn["large draw"]} answers bring {right["large draw"]}. If the steps stay small and there are
    96 of them, as many answers bring {right["more steps"]}. With a good policy most groups are all
    right: in the last quarter of the steps {runs.mean("signal, last quarter", ".0%", form="DAPO")}
    of the groups that DAPO draws have unequal rewards, and it throws the others away."""


NOT_TRIED = "harder sums; a time limit, as drawing costs less time than training on large models."
