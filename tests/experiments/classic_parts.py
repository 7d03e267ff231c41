"""What the experiments on the classic scripts share: a run, watched from outside."""

import contextlib
import io
import tempfile
from unittest.mock import patch

import numpy as np
import torch

PARTS = 40  # of a learning curve


def train(script, after_update=None, after_rollout=None, **flags):
    """A run of the script. Returns its greedy return at the end and its learning curve, the mean
    return of the episodes that ended in each of 40 equal parts of the steps; and its agent.

    after_update(agent, batch) is called after each update, if given, where batch["logprobs"] are
    those before it; and after_rollout(step, episodes) after each rollout, with the steps so far and
    the returns of the episodes that ended in it.
    """
    args, seen, steps, returns = script.Args(**flags), [], [], []
    make_rollouts, update = script.rollouts, script.update

    def rollouts(envs, agent, args):
        seen.append(agent)
        for rollout, episodes in make_rollouts(envs, agent, args):
            steps.append(int(rollout["mask"].sum()))
            returns.append(episodes)
            if after_rollout:
                after_rollout(sum(steps), episodes)
            yield rollout, episodes

    def watched(agent, optimizer, batch, *rest):
        with torch.no_grad():
            batch["logprobs"] = agent.policy(batch["obs"]).log_prob(batch["actions"])
        stats = update(agent, optimizer, batch, *rest)
        if after_update:
            after_update(agent, batch)
        return stats

    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(io.StringIO()),
        patch.multiple(script, rollouts=rollouts, update=watched),
    ):
        try:
            greedy_return = script.main(args)["eval/return"]
        except SystemExit:  # the loss is not finite: nothing was learned
            greedy_return = 0.0
    curve = learning_curve(np.cumsum(steps) / args.total_timesteps, returns)
    return {"greedy_return": float(greedy_return), "curve": curve}, seen[-1]


def learning_curve(ends, returns):
    """Mean returns of the episodes in equal parts of the run; the last one's where none ended.
    ends: the share of the run that was over at the end of each rollout."""
    curve, last = [], 0.0
    for part in range(PARTS):
        in_part = (part / PARTS <= ends) & (ends < (part + 1) / PARTS)
        episodes = [each for i in np.flatnonzero(in_part) for each in returns[i]]
        if episodes:
            last = float(np.mean(episodes))
        curve.append(last)
    return curve


def thousands(steps):
    """The middles of a learning curve's parts, in thousands of steps."""
    return [(part + 0.5) / PARTS * steps / 1000 for part in range(PARTS)]
