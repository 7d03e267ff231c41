"""What the experiments on the classic scripts share: a run, watched from outside; a corridor."""

import contextlib
import io
import tempfile
from types import SimpleNamespace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from lab import LEARNED

from ppo import kl_k3

PARTS = 40  # of a learning curve


def train(script, after_update=None, **flags):
    """A run of the script: its agent, last batch and greedy_return; the largest KL(π_old ‖ π) of an
    update; and a learning curve, the mean return of the episodes that ended in each of 40 equal
    parts of the steps, with its mean. after_update(agent, batch) is called after each update."""
    args = script.Args(**flags)
    run = SimpleNamespace(kl=0.0, curve=[], greedy_return=0.0)
    episodes = []  # (steps so far, the returns of the episodes that ended)
    make_rollouts, update = script.rollouts, script.update

    def rollouts(envs, agent, args):
        run.agent, step = agent, 0
        for rollout, returns in make_rollouts(envs, agent, args):
            step += int(rollout["mask"].sum())
            episodes.append((step, returns))
            yield rollout, returns

    def watched(agent, optimizer, batch, *rest):
        @torch.no_grad()
        def logprobs():
            return agent.policy(batch["obs"]).log_prob(batch["actions"])

        batch["logprobs"] = logprobs()
        stats = update(agent, optimizer, batch, *rest)
        run.batch = batch
        run.kl = max(run.kl, kl_k3(batch["logprobs"], logprobs()).mean().item())
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
        within = [each for step, each in episodes if steps[0] <= step < steps[1]]
        ended = sum(within, []) or ended  # where no episode ended, the last ones before
        run.curve.append(float(np.mean(ended)))
    run.mean = float(np.mean(run.curve))
    return run


def thousands(steps):
    """The middles of a learning curve's parts, in thousands of steps."""
    return [(part + 0.5) / PARTS * steps / 1000 for part in range(PARTS)]


class Corridor(gym.Env):
    """The first of 20 actions opens the left door or the right one. The last pays 1 if that was the
    door that a cue had named at the start. Each step also pays noise, N(0, noise). If `seen`, the
    state tells throughout whether the door was the right one, otherwise it only tells the time."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 1, (25,), np.float32)

    def __init__(self, seen, noise):
        self.noise, self.seen = noise, seen

    def observe(self):
        state = np.zeros(25, np.float32)
        state[self.time] = 1
        if self.time == 0:
            state[21 + self.cue] = 1
        elif self.seen:
            state[23 + self.right] = 1
        return state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.cue, self.right = 0, int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action):
        if self.time == 0:
            self.right = int(action == self.cue)
        self.time += 1
        end = self.time == 20
        reward = self.right * end + self.noise * self.np_random.standard_normal()
        return self.observe(), reward, end, False, {}


PLACES = {"CartPole": "CartPole-v1"}
for name, seen, noise in (("seen, 0.5", True, 0.5), ("seen, 2", True, 2.0), ("hidden", False, 0.5)):
    PLACES[name] = f"Corridor{len(PLACES)}-v0"
    gym.register(PLACES[name], Corridor, kwargs={"seen": seen, "noise": noise})


@torch.no_grad()
def right_door(agent):
    """The probability that the agent opens the right door: its return in a corridor, without the
    noise. A mean over both cues."""
    starts = torch.zeros(2, 25)
    starts[:, 0] = 1
    starts[range(2), [21, 22]] = 1
    return agent.policy(starts).probs[range(2), range(2)].mean().item()


def learn(script, place, **flags):
    """A run in one of PLACES, in corridors with γ = 1: the mean over training of the return, there
    of the probability of the right door, and its learning curve."""
    if place == "CartPole":
        found = train(script, **flags)
        return {LEARNED: found.mean, "curve": found.curve}
    doors = []
    options = {"env_id": PLACES[place], "gamma": 1.0} | flags
    train(script, lambda agent, batch: doors.append(right_door(agent)), **options)
    curve = [doors[i] for i in np.linspace(0, len(doors) - 1, PARTS).astype(int)]
    return {LEARNED: float(np.mean(doors)), "curve": curve}
