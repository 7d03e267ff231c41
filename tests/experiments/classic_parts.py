"""What the experiments on the classic scripts share: a run, watched from outside."""

import contextlib
import io
import tempfile
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from ppo import mean_kl

PARTS = 40  # of a learning curve


def train(script, after_update=None, **flags):
    """A run of the script: its agent, last batch and greedy_return; after each rollout the steps so
    far and the returns of the episodes that ended; after each update KL(π_old ‖ π); and a learning
    curve, the mean return of the episodes that ended in each of 40 equal parts of the steps."""
    args = script.Args(**flags)
    run = SimpleNamespace(rollouts=[], kl=[], curve=[], greedy_return=0.0)
    make_rollouts, update = script.rollouts, script.update

    def rollouts(envs, agent, args):
        run.agent, step = agent, 0
        for rollout, returns in make_rollouts(envs, agent, args):
            step += int(rollout["mask"].sum())
            run.rollouts.append((step, returns))
            yield rollout, returns

    def watched(agent, optimizer, batch, *rest):
        with torch.no_grad():
            batch["logprobs"] = agent.policy(batch["obs"]).log_prob(batch["actions"])
        stats = update(agent, optimizer, batch, *rest)
        run.batch = batch
        run.kl.append(mean_kl(agent, batch))
        if after_update:
            after_update(agent, batch)
        return stats

    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),  # the loss is not finite: nothing was learned
        patch.multiple(script, rollouts=rollouts, update=watched),
    ):
        run.greedy_return = float(script.main(args)["eval/return"])
    ended = [0.0]
    for part in range(PARTS):
        steps = args.total_timesteps * np.array([part, part + 1]) / PARTS
        within = [each for step, each in run.rollouts if steps[0] <= step < steps[1]]
        ended = sum(within, []) or ended  # where no episode ended, the last ones before
        run.curve.append(float(np.mean(ended)))
    return run


def thousands(steps):
    """The middles of a learning curve's parts, in thousands of steps."""
    return [(part + 0.5) / PARTS * steps / 1000 for part in range(PARTS)]
