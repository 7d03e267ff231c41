"""A run of a classic script, watched from outside."""

import contextlib
import io
import tempfile
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

PARTS = 40  # of a learning curve


def train(script, after_update=None, **flags):
    """A run of the script: its agent, and its learning curve with the mean of it. The curve is the
    mean return of the episodes that ended in each of 40 equal parts of the steps.
    after_update(agent) is called after each update."""
    args = script.Args(**flags)
    run = SimpleNamespace(curve=[])
    episodes = []  # (steps so far, the returns of the episodes that ended)
    make_rollouts, make_update = script.rollouts, script.update

    def rollouts(envs, agent, args):
        run.agent, step = agent, 0
        for rollout, returns in make_rollouts(envs, agent, args):
            step += int(rollout["mask"].sum())
            episodes.append((step, returns))
            yield rollout, returns

    def update(agent, *rest):
        stats = make_update(agent, *rest)
        if after_update:
            after_update(agent)
        return stats

    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(io.StringIO()),
        patch.multiple(script, rollouts=rollouts, update=update),
    ):
        script.main(args)
    latest = [0.0]
    for part in range(PARTS):
        start, end = args.total_timesteps * np.array([part, part + 1]) / PARTS
        ended = sum((returns for step, returns in episodes if start <= step < end), [])
        latest = ended or latest  # where no episode ended, the ones before
        run.curve.append(float(np.mean(latest)))
    run.mean = float(np.mean(run.curve))
    return run


def thousands(steps):
    """The middles of a learning curve's parts, in thousands of steps."""
    return [(part + 0.5) / PARTS * steps / 1000 for part in range(PARTS)]
