"""DAPO draws questions until enough of their groups have a signal: what it gains, and costs."""

import math

from bench import CPU, evaluate, train
from harness import grid
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


SMOKE = grid(1, method=list(METHODS), steps=[2], prompts=[4])
