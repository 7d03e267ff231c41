"""DAPO draws questions until enough of their groups have a signal: what it gains, and costs."""

import math

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


def run(method, seed, steps=60, prompts=16):
    script, flags = METHODS[method]
    args = script.Args(steps=steps, seed=seed, prompts_per_step=prompts, **flags)
    _, tokenizer = script.load_policy(args, CPU)
    _, held_out = script.load_data(args)
    drawn, enough = [], []

    def each_step(step, policy, metrics):
        """Counts the completions drawn, and notes the count where pass@1 is 0.9 or more."""
        drawn.append(metrics["num_tokens"] / metrics["completions/mean_length"])
        if step % 2 == 0:
            right = evaluate(script, policy, tokenizer, args, held_out[:128], 4)
            if right >= 0.9:
                enough.append(round(sum(drawn)))

    found = train(script, args, each_step=each_step)
    signal = [1 - share for share in found["frac_reward_zero_std"]]
    return {
        "signal at first": mean(signal[:5]),
        "signal at last": mean(signal[-10:]),
        "pass@1": found["pass@1"],
        "completions": round(sum(drawn)),
        "completions to .9": enough[0] if enough else math.nan,
    }


SIGNAL = {when: ({"method": "DAPO"}, f"signal {when}") for when in ("at first", "at last")}
ENDS = {method: ({"method": method}, "pass@1") for method in METHODS}
COSTS = {method: ({"method": method}, "completions to .9") for method in METHODS}
EXPERIMENT = Experiment(
    claim="Dynamic sampling: where every group has a signal, a step teaches more.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, method=list(METHODS)),
    smoke=grid(1, method=list(METHODS), steps=[2], prompts=[4]),
    panels=[
        Panel("Groups with a signal get rare", SIGNAL, ("share of those drawn", ""), dots=True),
        Panel("By step DAPO ends higher", ENDS, ("pass@1 after 60 rollouts", ""), dots=True),
        Panel("But it needs more samples", COSTS, ("completions to pass@1 0.9", ""), dots=True),
    ],
    finding="""
    Per step yes, per sample no. Of the groups drawn {DAPO / signal at first :.0%} have a signal at
    first, {DAPO / signal at last :.0%} at last. After 60 steps (five seeds) pass@1 is
    {DAPO / pass@1 / range :.3f} for DAPO, {DAPO, one draw / pass@1 / range :.3f} for one draw (p =
    {DAPO ~ DAPO, one draw / pass@1 / p :.3f}). But DAPO draws {DAPO / completions :,.0f}
    completions, not {GRPO / completions :,.0f}, and takes
    {DAPO / completions to .9 / range :,.0f} to reach 0.9, one draw only
    {DAPO, one draw / completions to .9 / range :,.0f} (p = {DAPO ~
    DAPO, one draw / completions to .9 / p :.3f}). GRPO ends at {GRPO / pass@1 / range :.3f}; it was
    not tried with as many samples.
    """,
)
