"""DAPO draws questions until enough of their groups have a signal: what it gains, and costs."""

from bench import CPU, evaluate, train
from harness import PARTLY, Experiment, Panel, grid
from llm_parts import mean

import dapo_llm
import grpo_llm

METHODS = {
    "DAPO": (dapo_llm, {}),
    "DAPO, one draw": (dapo_llm, {"max_resample": 1}),
    "GRPO": (grpo_llm, {}),
}


def run(method, seed, steps=60, prompts=16, every=2):
    script, flags = METHODS[method]
    args = script.Args(steps=steps, seed=seed, prompts_per_step=prompts, **flags)
    model, tokenizer = script.load_policy(args, CPU)
    drawn, points = [0], []

    def each_step(step, policy, metrics):
        """Counts the completions drawn, and evaluates."""
        if metrics:
            drawn.append(metrics["num_tokens"] / metrics["completions/mean_length"])
        if step % every == 0:
            score = evaluate(script, policy, tokenizer, args, 128, 4)["pass@1"]
            points.append((step, round(sum(drawn)), score))

    each_step(0, model, {})
    found = train(script, args, each_step=each_step, model=(model, tokenizer))
    signal = [1 - share for share in found["frac_reward_zero_std"]]
    rollouts, completions, scores = map(list, zip(*points, strict=True))
    first = next((point for point in points if point[2] >= 0.9), (None, None, None))
    return {
        "signal at first": mean(signal[:5]),
        "signal at last": mean(signal[-10:]),
        "pass@1": found["pass@1"],
        "completions": completions[-1],
        "updates to .9": first[0] and first[0] * args.minibatches,
        "completions to .9": first[1],
        "signal": signal,
        "rollouts": rollouts,
        "completions by then": completions,
        "pass@1 by then": scores,
    }


LINES = {method: ({"method": method}, "pass@1 by then") for method in METHODS}
EXPERIMENT = Experiment(
    claim="Dynamic sampling fills every step with groups that have a signal.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, method=list(METHODS)),
    smoke=[
        {"method": method, "seed": 1, "steps": 2, "prompts": 4, "every": 1} for method in METHODS
    ],
    panels=[
        Panel("By step DAPO ends higher", LINES, ("rollouts trained on", "pass@1"), x="rollouts"),
        Panel(
            "By sample it is later",
            LINES,
            ("completions drawn", "pass@1"),
            x="completions by then",
            log="x",
        ),
    ],
    finding="""
    By step yes, by sample no. Of the groups drawn {DAPO / signal at first :.0%} have a signal at
    first and {DAPO / signal at last :.0%} at last. After 60 steps, over five seeds, draws until a
    step is full end at a pass@1 of {DAPO / pass@1 / range :.3f}, a single draw at
    {DAPO, one draw / pass@1 / range :.3f} (p = {DAPO ~ DAPO, one draw / pass@1 / p :.3f}), GRPO at
    {GRPO / pass@1 / range :.3f}. But that takes {DAPO / completions :,.0f} completions, not
    {GRPO / completions :,.0f}, and 0.9 is reached later: after
    {DAPO / completions to .9 / range :,.0f} of them, with a single draw after
    {DAPO, one draw / completions to .9 / range :,.0f} (p = {DAPO ~
    DAPO, one draw / completions to .9 / p :.3f}), with GRPO after
    {GRPO / completions to .9 / range :,.0f}. In updates that is {DAPO / updates to .9 :.0f},
    {DAPO, one draw / updates to .9 :.0f} (p = {DAPO ~ DAPO, one draw / updates to .9 / p :.2f}) and
    {GRPO / updates to .9 :.0f}. Not tried: GRPO with as many samples, and DAPO's mean over tokens
    by itself.
    """,
)
