"""Classic scripts beside Stable-Baselines3 (SB3) and sb3-contrib, for parity.py; and its rows.

SB3 collects a rollout by its own code, computes advantages and returns, and takes its own `train`.
A script gets the transitions of that rollout and the same weights, and takes its own
compute_advantages and `update`. Both go by plain gradient descent, so that the gradient is how far
the weights have moved. Episodes are cut off after 12 steps: some end before, by themselves.
"""

import types
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import tyro
from bench import load
from torch import nn


@dataclass
class Row:
    """A row of the table, whose cells show the largest of these numbers."""

    ours: str
    theirs: str
    losses: list[float] = field(default_factory=list)  # absolute differences
    values: list[float] = field(default_factory=list)  # relative ones, of gradients and values
    clipped: list[float] = field(default_factory=list)  # shares of tokens or steps

    def cells(self):
        """What is kept of it."""
        loss, values = (f"{max(d):.0e}" if d else "–" for d in (self.losses, self.values))
        clipped = f"{max(self.clipped):.0%}" if self.clipped else "–"
        cells = {"theirs": self.theirs, "n": len(self.losses + self.values), "loss": loss}
        return cells | {"values": values, "clipped": clipped}


def parsed(command, **defaults):
    """The script and the Args of a command, with defaults for the flags that it does not name."""
    name, *flags = command.split()
    script = load(name)
    return script, tyro.cli(script.Args, args=flags, default=script.Args(**defaults))


def relative(ours, theirs):
    """The largest difference, over the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Peer(NamedTuple):
    """A script with its flags, beside an algorithm of SB3 with its settings."""

    ours: str
    algorithm: str
    settings: dict


FLOATS = ("rewards", "values", "advantages", "returns", "log_probs", "episode_starts")
RATES = {"CartPole-v1": 1.0, "Pendulum-v1": 1e-2}  # so that PPO's clip acts on some steps
FLAGS = {"gamma": 0.99, "num_minibatches": 1, "update_epochs": 1, "max_grad_norm": 1e30}
SETTINGS = {"gamma": 0.99, "n_steps": 64, "normalize_advantage": False, "seed": 1, "device": "cpu"}
FREE = {"max_grad_norm": 1e30, "ent_coef": 0.01}
SEARCH = {"line_search_shrinking_factor": 0.5, "line_search_max_iter": 10}
TRUST = {"target_kl": 0.01, "cg_damping": 0.1, "cg_max_steps": 10, "n_critic_updates": 1}
PEERS = [
    # Our update subtracts the mean of A. SB3 is given these advantages, here and below.
    Peer("actor_critic --ent-coef 0.01", "A2C", {"gae_lambda": 0.0} | FREE),
    # sb3-contrib's loss of the critic is twice ours. So it is halved, and so is its rate.
    Peer(
        "trpo --gae-lambda 0.95 --max-kl 0.01",
        "TRPO",
        {"gae_lambda": 0.95, "batch_size": 256} | SEARCH | TRUST,
    ),
    Peer(
        "ppo --gae-lambda 0.95 --update-epochs 4 --ent-coef 0.01",
        "PPO",
        {"gae_lambda": 0.95, "batch_size": 256, "n_epochs": 4} | FREE,
    ),
]


def collect(peer, env_id, rate):
    """The algorithm, in float64, with a rollout of its own in four environments; and the rollout's
    transitions as our scripts have them, (T, N, …)."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import FlattenExtractor

    class Double(FlattenExtractor):
        def forward(self, obs):
            return super().forward(obs).double()

    class Buffer(RolloutBuffer):
        def reset(self):
            super().reset()
            for name in FLOATS:
                setattr(self, name, getattr(self, name).astype(float))

    envs = make_vec_env(env_id, 4, seed=1, env_kwargs={"max_episode_steps": 12})
    rollout = record(envs)
    module = sb3_contrib if peer.algorithm == "TRPO" else stable_baselines3
    kinds = {"rollout_buffer_class": Buffer, "policy_kwargs": {"features_extractor_class": Double}}
    settings = SETTINGS | peer.settings | {"learning_rate": rate}
    model = getattr(module, peer.algorithm)("MlpPolicy", envs, **settings, **kinds)
    model.policy.double().optimizer = torch.optim.SGD(model.policy.parameters(), lr=rate)
    _, callback = model._setup_learn(1)
    buffer = model.rollout_buffer
    model.collect_rollouts(model.env, callback, buffer, model.n_steps)
    transitions = {name: torch.as_tensor(np.stack(column)) for name, column in rollout.items()}
    transitions["obs"] = torch.as_tensor(buffer.observations).double()
    actions = torch.as_tensor(buffer.actions)
    transitions["actions"] = actions.squeeze(-1) if env_id == "CartPole-v1" else actions
    transitions["mask"] = torch.ones_like(transitions["done"])
    return model, transitions


def record(envs):
    """{name: list}, which each step of these environments makes longer."""
    original = envs.step_wait
    columns = {"next_obs": [], "rewards": [], "done": [], "terminated": []}

    def step_wait():
        obs, rewards, done, infos = original()
        last = [info.get("terminal_observation", row) for info, row in zip(infos, obs, strict=True)]
        cut = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        rewards = rewards.astype(float)
        step = np.stack(last).astype(float), rewards.copy(), done.copy(), done & ~cut
        for column, values in zip(columns.values(), step, strict=True):
            column.append(values)
        return obs, rewards, done, infos  # where it is cut off SB3 adds γ V to this reward

    envs.step_wait = step_wait
    return columns


def theirs_of(policy):
    """SB3's actor and critic, as networks with the layers that ours have, and all weights, (P,)."""
    actor = nn.Sequential(*policy.mlp_extractor.policy_net, policy.action_net)
    critic = nn.Sequential(*policy.mlp_extractor.value_net, policy.value_net)
    log_std = [policy.log_std] if hasattr(policy, "log_std") else []
    return actor, critic, flat([*log_std, *actor.parameters(), *critic.parameters()])


def make_agent(script, model):
    """Our agent with the weights of SB3's policy."""
    spaces = {"single_observation_space": model.observation_space}
    spaces |= {"single_action_space": model.action_space}
    agent = script.Agent(types.SimpleNamespace(**spaces)).double()
    agent.obs_norm = nn.Identity()  # SB3's is a wrapper around the environments
    actor, critic, _ = theirs_of(model.policy)
    agent.actor.load_state_dict(actor.state_dict(), strict=False)  # all but log_std
    agent.critic.load_state_dict(critic.state_dict())
    if hasattr(model.policy, "log_std"):
        agent.actor.log_std.data.copy_(model.policy.log_std.data)
    return agent


def beside_sb3(row, peer, env_id):
    """Add the comparisons in this environment to the row."""
    rate = RATES[env_id]
    script, args = parsed(peer.ours, learning_rate=rate, **FLAGS)
    # sb3-contrib's actor does not use the rate.
    model, rollout = collect(peer, env_id, rate / 2 if peer.algorithm == "TRPO" else rate)
    agent = make_agent(script, model)
    values, next_values = agent.value(rollout["obs"]), agent.value(rollout["next_obs"])
    credit = script.compute_advantages(rollout, values, next_values, args)
    buffer = model.rollout_buffer
    for ours, theirs in zip(credit, (buffer.advantages, buffer.returns), strict=True):
        row.values.append(relative(ours.detach(), torch.as_tensor(theirs)))
    batch = script.prepare(agent, rollout, args)
    weights = [*agent.actor.parameters(), *agent.critic.parameters()]
    before, optimizer = flat(weights), torch.optim.SGD(agent.parameters(), lr=rate)
    stats = script.update(agent, optimizer, batch, 1.0, args)
    buffer.advantages -= buffer.advantages.mean()
    *_, their_before = theirs_of(model.policy)
    model.train()
    *_, their_after = theirs_of(model.policy)
    row.values.append(relative(flat(weights) - before, their_after - their_before))
    if "clipfrac" in stats:
        row.clipped.append(stats["clipfrac"])


def rows():
    """All rows, one by one."""
    for peer in PEERS:
        row = Row(peer.ours, f"{peer.algorithm}, gae_lambda {peer.settings['gae_lambda']}")
        for env_id in RATES:
            beside_sb3(row, peer, env_id)
        yield row
