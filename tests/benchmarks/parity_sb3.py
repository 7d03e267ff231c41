"""Classic scripts beside Stable-Baselines3 (SB3) and sb3-contrib, for parity.py; and its rows.

SB3 collects a rollout by its own code, computes advantages and returns, and takes its own `train`.
Then main of a script starts with the same weights, and its environment repeats SB3's rollout. Both
go by plain gradient descent, so that the gradient is how far the weights have moved. Episodes are
cut off after 12 steps: some end before, by themselves.
"""

from types import SimpleNamespace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
import tyro
from bench import load, run_main
from torch import nn


def parsed(command, **defaults):
    """The script and the Args of a command, with defaults for the flags that it does not name, as
    far as the script has them."""
    name, *flags = command.split()
    script = load(name)
    known = {flag: value for flag, value in defaults.items() if hasattr(script.Args(), flag)}
    return script, tyro.cli(script.Args, args=flags, default=script.Args(**known))


def relative(ours, theirs):
    """The largest difference, over the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


FLOATS = ("rewards", "values", "advantages", "returns", "log_probs", "episode_starts")
RATES = {"CartPole-v1": 1.0, "Pendulum-v1": 1e-2}  # so that PPO's clip acts on some steps
FLAGS = {"gamma": 0.99, "num_minibatches": 1, "update_epochs": 1, "max_grad_norm": 1e30}
FLAGS |= {"num_envs": 1, "total_timesteps": 1}  # one rollout
SETTINGS = {"gamma": 0.99, "n_steps": 256, "normalize_advantage": False, "seed": 1, "device": "cpu"}
FREE = {"max_grad_norm": 1e30, "ent_coef": 0.01}
SEARCH = {"line_search_shrinking_factor": 0.5, "line_search_max_iter": 10}
TRUST = {"target_kl": 0.01, "cg_damping": 0.1, "cg_max_steps": 10, "n_critic_updates": 1}
GAE = {"gae_lambda": 0.95, "batch_size": 256}
PEERS = {  # a script with its flags: an algorithm with its settings
    # Our update subtracts the mean of A. SB3 is given these advantages, here and below.
    "actor_critic --ent-coef 0.01": ("A2C", {"gae_lambda": 0.0} | FREE),
    # sb3-contrib's loss of the critic is twice ours. So it is halved, and so is its rate.
    "trpo --gae-lambda 0.95 --max-kl 0.01": ("TRPO", GAE | SEARCH | TRUST),
    "ppo --gae-lambda 0.95 --update-epochs 4 --ent-coef 0.01": (
        "PPO",
        GAE | {"n_epochs": 4} | FREE,
    ),
}


def collect(algorithm, settings, env_id, rate):
    """The algorithm, in float64, with a rollout of its own; and the rollout's steps, as gymnasium
    would have returned them."""
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

    envs = make_vec_env(env_id, 1, seed=1, env_kwargs={"max_episode_steps": 12})
    steps = record(envs)
    module = sb3_contrib if algorithm == "TRPO" else stable_baselines3
    kinds = {"rollout_buffer_class": Buffer, "policy_kwargs": {"features_extractor_class": Double}}
    settings = SETTINGS | settings | {"learning_rate": rate}
    model = getattr(module, algorithm)("MlpPolicy", envs, **settings, **kinds)
    model.policy.double().optimizer = torch.optim.SGD(model.policy.parameters(), lr=rate)
    _, callback = model._setup_learn(1)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model, steps


def record(envs):
    """A list that each step of this environment makes longer: of observation, reward, terminated
    and truncated. SB3 resets at once; gymnasium's next step does, so it gets an entry."""
    original, steps = envs.step_wait, []

    def step_wait():
        obs, rewards, done, infos = original()
        rewards = rewards.astype(np.float32).astype(float)  # ours are float32
        cut = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        last = infos[0]["terminal_observation"][None] if done[0] else obs
        steps.append((last.copy(), rewards.copy(), done & ~cut, cut))
        if done[0]:
            steps.append((obs.copy(), np.zeros(1), ~done, ~done))
        return obs, rewards, done, infos  # where it is cut off SB3 adds γ V to this reward

    envs.step_wait = step_wait
    return steps


def theirs_of(policy):
    """SB3's actor and critic, as networks with the layers that ours have, and all weights, (P,)."""
    actor = nn.Sequential(*policy.mlp_extractor.policy_net, policy.action_net)
    critic = nn.Sequential(*policy.mlp_extractor.value_net, policy.value_net)
    log_std = [policy.log_std] if hasattr(policy, "log_std") else []
    return actor, critic, flat([*log_std, *actor.parameters(), *critic.parameters()])


class Unscaled(nn.Identity):
    """In place of our RunningNorm. SB3's is a wrapper around the environments."""

    def update(self, x):
        pass

    def std(self):
        return 1.0

    def forward(self, x):
        return torch.as_tensor(x).double()


class Repeated(gym.vector.VectorEnv):
    """An environment whose steps are those of a list, whatever is done in it."""

    num_envs, metadata = 1, {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, env_id, model, steps):
        self.spec, self.first = SimpleNamespace(name=env_id), model.rollout_buffer.observations[0]
        self.steps = steps
        self.single_observation_space = model.observation_space
        self.single_action_space = model.action_space

    def reset(self, **_):
        return self.first, {}

    def step(self, actions):
        return *self.steps.pop(0), {}


def make_agent(script, model, actions):
    """Our agent with the weights of SB3's policy, which first draws these actions."""
    agent = script.Agent(Repeated("", model, [])).double()
    actor, critic, _ = theirs_of(model.policy)
    agent.actor.load_state_dict(actor.state_dict(), strict=False)  # all but log_std
    agent.critic.load_state_dict(critic.state_dict())
    if hasattr(model.policy, "log_std"):
        agent.actor.log_std.data.copy_(model.policy.log_std.data)
    policy = agent.policy

    def policy_of(obs):
        return SimpleNamespace(sample=lambda: actions.pop(0)) if actions else policy(obs)

    agent.policy = policy_of
    return agent


def beside_sb3(command, algorithm, settings, env_id):
    """Differences of credit, targets and gradient, and shares of steps that are clipped."""
    rate = RATES[env_id]
    # sb3-contrib's actor does not use the rate.
    model, steps = collect(algorithm, settings, env_id, rate / (1 + (algorithm == "TRPO")))
    script, args = parsed(command, learning_rate=rate, num_steps=len(steps), **FLAGS)
    buffer, credit = model.rollout_buffer, []
    real = torch.tensor([True, *(not (cut or ended) for _, _, ended, cut in steps[:-1])])
    actions = torch.as_tensor(buffer.actions)[real.cumsum(0) - 1]
    if env_id == "CartPole-v1":
        actions = actions[:, :, 0]

    def compute_advantages(*inputs, original=script.compute_advantages):
        credit.append(original(*inputs))
        return credit[-1]

    with patch.object(script, "RunningNorm", Unscaled):
        agent = make_agent(script, model, list(actions))
    before = flat(agent.parameters())
    functions = {
        "RunningNorm": Unscaled,
        "make_envs": lambda *_: Repeated(env_id, model, steps),
        "Agent": lambda envs: agent,
        "compute_advantages": compute_advantages,
    }
    with patch("torch.optim.Adam", lambda weights, rate, **_: torch.optim.SGD(weights, rate)):
        log = run_main(script, args, **functions)["log"]
    pairs = zip(credit[0], (buffer.advantages, buffer.returns), strict=True)
    values = [relative(ours[real].detach(), torch.as_tensor(theirs)) for ours, theirs in pairs]
    buffer.advantages -= buffer.advantages.mean()
    *_, their_before = theirs_of(model.policy)
    model.train()
    *_, their_after = theirs_of(model.policy)
    values.append(relative(flat(agent.parameters()) - before, their_after - their_before))
    return values, log["losses/clipfrac"]


def rows():
    """Of each row: ours, theirs, differences of losses and values, and shares that are clipped."""
    for command, (algorithm, settings) in PEERS.items():
        found = [beside_sb3(command, algorithm, settings, env_id) for env_id in RATES]
        values, clipped = (sum(parts, []) for parts in zip(*found, strict=True))
        yield command, f"{algorithm}, gae_lambda {settings['gae_lambda']}", [], values, clipped
