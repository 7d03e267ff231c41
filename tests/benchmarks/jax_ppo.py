"""PPO on CartPole-v1 as a single JAX program, timed: a peer for ppo.py.

    python tests/benchmarks/jax_ppo.py --seed 1

Written after the design of PureJaxRL (Lu et al. 2022): environments, rollouts and updates are one
function, which XLA compiles as a whole. Runs on one CPU core. The environment is gymnax's, which
resets itself within the step. Its limit of 500 steps is a termination: where ppo.py would count on
V(s_{t+1}), nothing follows.

The settings are ppo.py's defaults. What differs, after PureJaxRL: advantages are z-scores within
each minibatch, observations are left as they are, weights start orthogonal, Adam's ε is 1e-5. V is
50 + 50 times the critic's output, as returns lie between 0 and 1 / (1 - γ) = 100; its loss is in
these units. The rollouts are 98, whole ones, so that the steps are 200,704.

Solved is as in ppo.py: the first end of a rollout at which the last 100 training episodes have a
mean return of 475. Prints one line of JSON. Its solved_seconds are imports, compilation and the
share of run_seconds up to there. Needs jax, flax, distrax, optax and gymnax of
tests/benchmarks/requirements.txt, best in an environment of their own.
"""

# ruff: noqa: E402
import time

START = time.perf_counter()

import argparse
import json
import os
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["JAX_PLATFORMS"] = "cpu"
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, for the compiler as well

import distrax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

IMPORTED = time.perf_counter()

NUM_ENVS, NUM_STEPS, UPDATE_EPOCHS, NUM_MINIBATCHES = 16, 128, 4, 4
GAMMA, GAE_LAMBDA, CLIP, MAX_GRAD_NORM = 0.99, 0.98, 0.2, 1.0
LEARNING_RATE, TOTAL_TIMESTEPS = 3e-3, 200_000
BATCH = NUM_ENVS * NUM_STEPS
NUM_ROLLOUTS = -(-TOTAL_TIMESTEPS // BATCH)
V_SCALE = 0.5 / (1 - GAMMA)
THRESHOLD = 475  # mean return of the last 100 episodes

env, env_params = gymnax.make("CartPole-v1")


class Network(nn.Module):
    outputs: int
    last_scale: float

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
        return nn.Dense(self.outputs, kernel_init=nn.initializers.orthogonal(self.last_scale))(x)


actor, critic = Network(2, 0.01), Network(1, 1.0)


def policy(params, obs):
    return distrax.Categorical(logits=actor.apply(params["actor"], obs))


def value(params, obs):
    return V_SCALE + V_SCALE * critic.apply(params["critic"], obs).squeeze(-1)


def learning_rate(step):
    """Falls once per rollout, linearly to 0, as in ppo.py; step counts optimizer steps."""
    rollouts = step // (UPDATE_EPOCHS * NUM_MINIBATCHES) + 1
    return LEARNING_RATE * jnp.maximum(0, 1 - rollouts * BATCH / TOTAL_TIMESTEPS)


# Two of these, so that the gradients of actor and critic are each clipped to the norm.
adam = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(learning_rate, eps=1e-5))
optimizer = optax.partition({"actor": adam, "critic": adam}, {"actor": "actor", "critic": "critic"})


def env_step(params, carry, key):
    """One step of all environments; returns the transition and, where done, episode returns."""
    obs, state, returns = carry
    action_key, step_key = jax.random.split(key)
    pi = policy(params, obs)
    action, logprob = pi.sample_and_log_prob(seed=action_key)
    keys = jax.random.split(step_key, NUM_ENVS)
    step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    next_obs, state, reward, done, _ = step(keys, state, action, env_params)
    returns = returns + reward
    transition = {"obs": obs, "action": action, "logprob": logprob, "reward": reward, "done": done}
    transition["value"] = value(params, obs)
    return (next_obs, state, returns * ~done), (transition, returns)


def compute_advantages(rollout, last_value):
    def backward(carry, step):
        following, next_value = carry
        delta = step["reward"] + GAMMA * next_value * ~step["done"] - step["value"]
        following = delta + GAMMA * GAE_LAMBDA * following * ~step["done"]
        return (following, step["value"]), following

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(backward, start, rollout, reverse=True)[1]


def loss(params, batch):
    ratio = jnp.exp(policy(params, batch["obs"]).log_prob(batch["action"]) - batch["logprob"])
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage).mean()
    error = (value(params, batch["obs"]) - batch["return"]) / V_SCALE
    return 0.5 * jnp.square(error).mean() - surrogate


def minibatch_step(carry, batch):
    params, opt_state = carry
    updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state)
    return (optax.apply_updates(params, updates), opt_state), None


def rollout_and_update(carry, key):
    params, opt_state, play = carry
    rollout_key, update_key = jax.random.split(key)
    keys = jax.random.split(rollout_key, NUM_STEPS)
    play, (rollout, returns) = jax.lax.scan(partial(env_step, params), play, keys)
    rollout["advantage"] = compute_advantages(rollout, value(params, play[0]))
    rollout["return"] = rollout["value"] + rollout["advantage"]
    batch = jax.tree.map(lambda x: x.reshape(BATCH, *x.shape[2:]), rollout)

    def epoch(carry, key):
        order = jax.random.permutation(key, BATCH).reshape(NUM_MINIBATCHES, -1)
        minibatches = jax.tree.map(lambda x: x[order], batch)
        return jax.lax.scan(minibatch_step, carry, minibatches)

    keys = jax.random.split(update_key, UPDATE_EPOCHS)
    (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), keys)
    return (params, opt_state, play), (returns, rollout["done"])


def train(seed):
    """The whole run; returns, for each step, returns so far and ends of episodes (K, T, N)."""
    actor_key, critic_key, reset_key, key = jax.random.split(jax.random.key(seed), 4)
    reset_keys = jax.random.split(reset_key, NUM_ENVS)
    obs, state = jax.vmap(env.reset, in_axes=(0, None))(reset_keys, env_params)
    params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs)}
    carry = (params, optimizer.init(params), (obs, state, jnp.zeros(NUM_ENVS)))
    return jax.lax.scan(rollout_and_update, carry, jax.random.split(key, NUM_ROLLOUTS))[1]


def summarize(returns, done):
    """The step at which the last 100 episodes reached the threshold, and their mean at the end."""
    recent, solved = [], None
    for k in range(NUM_ROLLOUTS):
        recent = (recent + returns[k][done[k]].tolist())[-100:]
        if solved is None and len(recent) == 100 and np.mean(recent) >= THRESHOLD:
            solved = (k + 1) * BATCH
    return solved, float(np.mean(recent))


def main(seed):
    start = time.perf_counter()
    compiled = jax.jit(train).lower(seed).compile()
    compile_seconds = time.perf_counter() - start
    start = time.perf_counter()
    returns, done = jax.block_until_ready(compiled(seed))
    run_seconds = time.perf_counter() - start
    solved_step, mean = summarize(np.asarray(returns), np.asarray(done))
    steps = NUM_ROLLOUTS * BATCH
    result = {
        "seed": seed,
        "import_seconds": IMPORTED - START,
        "compile_seconds": compile_seconds,
        "run_seconds": run_seconds,
        "steps_per_second": steps / run_seconds,
        "solved_step": solved_step,
        "solved_seconds": None,
        "final_mean_return": mean,
    }
    if solved_step:
        before = result["import_seconds"] + compile_seconds
        result["solved_seconds"] = before + run_seconds * solved_step / steps
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args().seed)
